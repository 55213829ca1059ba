"""Two releases and one database: newer events, older schemas, changed files, and hosts that roll over."""

from __future__ import annotations

import shutil
from pathlib import Path

import psycopg
import pytest

from adapters.client import CallFailed, segment
from adapters.migrate import FOLDER, applied, available, migrate
from domain.events import AttemptClaimed
from tests.process.site import HostProcess, Site, found
from tests.process.truth import nothing_was_sent_twice

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(150)]
TOUCH = """
    insert into stored_events (originator_id, originator_version, topic, state)
    select originator_id, originator_version + 1, coalesce(%(topic)s, topic),
        convert_to(jsonb_set(convert_from(state, 'UTF8')::jsonb, '{v}', %(version)s)::text, 'UTF8')
    from stored_events where originator_id = %(history)s order by originator_version desc limit 1
"""


def touch(place: Site, history: str, *, topic: str | None = None, version: int = 99) -> None:
    """Add an event as a newer release would: of a higher version, or of a topic that is not known here."""
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        connection.execute(TOUCH.encode(), {"history": history, "topic": topic, "version": str(version)})


def code_of(host: HostProcess, path: str) -> str:
    """The code with which a read is refused."""
    with pytest.raises(CallFailed) as told:
        host.api().get(path)
    return told.value.code


@pytest.mark.proves("B099")
def test_histories_touched_by_a_newer_release_are_refused_and_never_acted_upon(place: Site) -> None:
    host = place.host("one")
    host.start()
    start = {"body": {"input": "TEXT x"}}
    kept = host.submit("run_start", start, "kept")["action_result"]
    settled = host.submit("run_start", start, "settled")["action_result"]
    asking = host.begin("ASK rm -rf /srv/x", "asking")
    given = {"run_id": asking, "choice": "once", "reviewed": host.asked(asking)}
    pending = host.submit("run_approval", given, "choice")["action_result"]
    renamed = host.submit("run_start", start, "renamed")["action_result"]
    host.kill()
    histories = [f"default/act/{action['action_id']}" for action in (settled, pending)]
    for history in histories:
        touch(place, history)
    touch(place, f"default/act/{renamed['action_id']}", topic="action.reconsidered", version=1)
    with psycopg.connect(place.dsn) as connection:
        before = connection.execute("select * from stored_events order by notification_id").fetchall()
    host.start()
    for action in (settled, pending, renamed):
        assert code_of(host, f"/aip/v1/actions/{segment(action['action_id'])}") == "history.newer_version"
    with pytest.raises(CallFailed) as told:
        host.submit("run_start", start, "settled")
    assert told.value.code == "history.newer_version"
    with pytest.raises(CallFailed) as told:
        host.decide(pending["output"]["approval_id"])
    assert told.value.code == "history.newer_version"
    assert place.hermes.received("approval") == 0

    def unreadable() -> int | None:
        return int(host.api().get("/views/recovery").body["unreadable_count"]) or None

    assert found(unreadable) == 3
    assert host.submit("run_start", start, "kept")["action_result"]["output"]["run_id"] == kept["output"]["run_id"]
    host.run_in(host.begin("TEXT new", "new"), "completed")
    with psycopg.connect(place.dsn) as connection:
        after = connection.execute("select * from stored_events order by notification_id").fetchall()
    assert after[: len(before)] == before
    written = {row[0] for row in after[len(before) :]}
    assert written.isdisjoint({*histories, f"default/act/{renamed['action_id']}"})


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The migrations of the release before: all but the newest file."""
    folder = tmp_path / "sql"
    folder.mkdir()
    for migration in available()[:-1]:
        shutil.copy(FOLDER / migration.name, folder)
    return folder


def test_an_older_schema_is_brought_up_to_date_while_work_of_it_is_stored(place: Site, earlier: Path) -> None:
    newest = available()[-1]
    assert [m.number for m in migrate(place.dsn, folder=earlier)] == [m.number for m in available(earlier)]
    host = place.host("one")
    host.start()
    assert applied(place.dsn)[-1].name == newest.name
    assert migrate(place.dsn, folder=earlier) == []  # the release before starts beside it and leaves it alone
    run_id = host.begin("TEXT x", "k")
    other = place.host("two")
    other.start()
    assert other.submit("run_start", {"body": {"input": "TEXT x"}}, "k")["action_result"]["output"]["run_id"] == run_id


def test_a_host_refuses_a_schema_whose_applied_file_changed(place: Site) -> None:
    migrate(place.dsn)
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        connection.execute("update schema_migrations set checksum = repeat('0', 64) where number = 2")
    host = place.host("one")
    host.spawn()
    assert found(lambda: host.process.poll() if host.process else None) == 1
    told = host.out.read_text("utf-8") + host.err.read_text("utf-8")
    assert "storage.unsuitable" in told
    assert available()[1].name in told
    assert "Traceback" not in told


def test_a_second_host_on_the_same_embedded_database_is_refused_by_name(place: Site) -> None:
    config = 'dsn_file = "dsn"\n'
    hosts = [place.host(name) for name in ("one", "two")]
    for host in hosts:
        host.config.write_text(host.config.read_text("utf-8").replace(config, ""), "utf-8")
    hosts[0].start()
    hosts[1].spawn()
    assert found(lambda: hosts[1].process.poll() if hosts[1].process else None) == 1
    told = hosts[1].out.read_text("utf-8") + hosts[1].err.read_text("utf-8")
    assert "postgres.owned" in told
    assert "Traceback" not in told
    hosts[0].terminate()


@pytest.mark.proves("B001", "B103")
def test_hosts_roll_over_without_settling_a_run_or_leaving_a_gap_unnamed(place: Site) -> None:
    old, new = place.host("old"), place.host("new")
    old.start()
    runs = [old.begin("SLEEP 6\nTEXT done", f"run-{number}") for number in range(8)]
    asking = [old.begin(f"ASK rm -rf /srv/{number}", f"ask-{number}") for number in range(3)]
    for run_id in asking:
        old.asked(run_id)
    new.start()
    assert old.terminate() == 0
    for run_id in runs:
        assert new.run_in(run_id, "completed", "failed", "cancelled", "unknown")["state"] == "completed"
    for run_id in asking:
        view = new.run(run_id)
        assert view["state"] not in ("completed", "failed", "cancelled")
        assert len(view["events"]["gaps"]) <= 1
    nothing_was_sent_twice(place)
    assert sum(isinstance(event.event, AttemptClaimed) for event in place.events()) == len(runs) + len(asking)
