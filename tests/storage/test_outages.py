"""A host whose database answers late, not at all, for reading only, or with no space left."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from adapters.client import CallFailed
from adapters.postgres import EmbeddedPostgres
from domain.events import ActionAccepted, ActionSettled, AttemptAccepted, AttemptClaimed
from tests.faults.pg_proxy import PgProxy
from tests.pg import until
from tests.process.site import CLOCK, HostProcess, Site, found
from tests.process.truth import every_state_is_justified, nothing_was_sent_twice

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(150)]
WRITER, LISTENER = "journal-writer", "journal-listener"
READERS = (WRITER, LISTENER, "journal-reader", "views", "vault")
MOMENTS = {
    "acceptance": ("action.accepted", ActionAccepted),
    "claim": ("attempt.claimed", AttemptClaimed),
    "receipt": ("attempt.accepted", AttemptAccepted),
    "settlement": ("action.settled", ActionSettled),
}


@contextmanager
def proxied(place: Site, replica: str = "one", **settings: object) -> Iterator[tuple[HostProcess, PgProxy]]:
    """A host that reaches its database through a proxy."""
    with PgProxy(place.dsn) as proxy:
        host = place.host(replica, dsn_file=place.through(proxy.dsn, f"proxied-{replica}"), **settings)
        host.start()
        yield host, proxy
        host.kill()


def refused(host: HostProcess, key: str) -> CallFailed:
    """How a start is refused."""
    with pytest.raises(CallFailed) as told:
        host.submit("run_start", {"body": {"input": "TEXT x"}}, key)
    return told.value


@pytest.mark.proves("A142")
def test_a_lost_commit_answer_is_resolved_by_identity_at_every_moment_of_an_action(place: Site) -> None:
    with proxied(place) as (host, proxy):
        for moment, (topic, _) in MOMENTS.items():
            for point, action in (("call", "cut"), ("sync", "cut"), ("row", "cut"), ("commit", "cut")):
                proxy.add(WRITER, point, action, holding=topic.encode())
                key = f"{moment}-{point}"
                told = host.submit("run_start", {"body": {"input": "TEXT x"}}, key)["action_result"]
                assert told["status"] == "completed", key
                again = host.submit("run_start", {"body": {"input": "TEXT x"}}, key)["action_result"]
                assert again["output"]["run_id"] == told["output"]["run_id"]
                proxy.clear()
        assert proxy.counts[WRITER, "connect"] > 16
    events = place.events()
    for topic, kind in MOMENTS.values():
        assert sum(isinstance(event.event, kind) for event in events) == 16, topic
    assert place.hermes.received("start") == 16
    nothing_was_sent_twice(place)


@pytest.mark.parametrize("silence", ["dropped", "frozen"])
def test_a_lost_wake_up_delays_a_waiting_caller_by_the_poll_bound_alone(place: Site, silence: str) -> None:
    other = place.host("two")
    other.start()
    with proxied(place) as (host, proxy):
        if silence == "dropped":
            proxy.add(LISTENER, "notify", "drop", times=-1)
        else:
            proxy.freeze_all(LISTENER)
        place.hermes.fault(kind="delay", route="start", seconds=3.0)
        given = {"body": {"input": "TEXT slow"}}
        begun = other.submit("run_start", given, "slow", mode="async")
        told_at: list[float] = []

        def wait() -> None:
            host.answered(begun["ack"]["action_id"])
            host.submit("run_start", given, "slow")
            told_at.append(CLOCK.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        other.answered(begun["ack"]["action_id"])
        settled_at = CLOCK.monotonic()
        waiting.join(30)
        assert told_at[0] - settled_at < 6
        assert host.run_in(host.submit("run_start", given, "slow")["action_result"]["output"]["run_id"], "completed")


@pytest.mark.proves("B002", "B030", "B031", "B105")
def test_a_network_that_swallows_everything_stops_new_work_and_ends_with_the_network(place: Site) -> None:
    with proxied(place) as (host, proxy):
        host.begin("TEXT before", "before")
        sent = place.hermes.received("start")
        for application in READERS:
            proxy.add(application, "connect", "freeze", times=-1)
            proxy.freeze_all(application)
        until(lambda: host.readiness()[0] == 503, 30)
        first = refused(host, "during")
        assert (first.status, first.error["effect"], first.error["retryable"]) == (503, "none", True)
        assert place.hermes.received("start") == sent
        proxy.clear()
        until(host.ready, 60)
        assert (
            host.submit("run_start", {"body": {"input": "TEXT x"}}, "during")["action_result"]["status"] == "completed"
        )
        assert place.hermes.received("start") == sent + 1
    every_state_is_justified(place)


@pytest.mark.proves("B105")
def test_connections_that_went_silent_are_given_up_and_replaced(place: Site) -> None:
    with proxied(place, ttl_ms=30_000) as (host, proxy):
        run_id = host.begin("TEXT before", "before")
        host.run_in(run_id, "completed")
        for application in READERS:
            proxy.freeze_all(application)

        def works() -> dict[str, object] | None:
            try:
                return host.submit("run_start", {"body": {"input": "TEXT x"}}, "after")["action_result"]
            except CallFailed:
                return None

        told = found(works)
        assert told["status"] == "completed"
        assert host.run_in(run_id, "completed")["end"]["known"]


@pytest.mark.proves("B002", "B031", "B028")
def test_a_read_only_database_takes_nothing_new_and_sends_nothing(place: Site) -> None:
    host = place.host("one")
    host.start()
    began = host.submit("run_start", {"body": {"input": "SLEEP 3\nTEXT done"}}, "before")["action_result"]
    run_id = began["output"]["run_id"]
    sent = place.hermes.received("start")
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f"alter database {name} set default_transaction_read_only = on".encode())
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() "
            "and datname = current_database()"
        )
        until(lambda: host.readiness()[0] == 503, 30)
        told = refused(host, "during")
        assert (told.status, told.error["effect"], told.error["retryable"]) == (503, "none", True)
        threading.Event().wait(3)
        assert host.result(began["action_id"]) == began
        assert place.hermes.received("start") == sent
        connection.execute("set default_transaction_read_only = off")
        connection.execute(f"alter database {name} reset default_transaction_read_only".encode())
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() "
            "and datname = current_database()"
        )
    until(host.ready, 60)
    assert host.run_in(run_id, "completed")["end"]["known"]
    host.begin("TEXT after", "during")
    assert host.process is not None
    assert host.process.poll() is None
    every_state_is_justified(place)


@contextmanager
def full_disk(place: Site, server: EmbeddedPostgres) -> Iterator[None]:
    """The events' table on a file system of 2 MB that is full; where none can be mounted, the server's own error."""
    folder = server.data_dir.parent / "small"
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        if os.geteuid() == 0 and _mount(folder, server.data_dir):
            try:
                connection.execute(f"create tablespace small location '{folder}/space'".encode())
                connection.execute("alter table stored_events set tablespace small")
                connection.execute("create table filler (content text) tablespace small")
                connection.execute("alter table filler alter content set storage plain")
                while _fills(connection):
                    pass
                yield
                connection.execute("drop table filler")
                connection.execute("alter table stored_events set tablespace pg_default")
                connection.execute("drop tablespace small")
            finally:
                subprocess.run(["umount", "--lazy", str(folder)], check=True)
        else:
            connection.execute(
                "create function full_disk() returns trigger language plpgsql as $$ begin "
                "raise exception 'no space left on device' using errcode = '53100'; end $$; "
                "create trigger full_disk before insert on stored_events for each row execute function full_disk()"
            )
            yield
            connection.execute("drop trigger full_disk on stored_events")


def _mount(folder: Path, like: Path) -> bool:
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=False).returncode:
        return False
    space = folder / "space"
    space.mkdir(mode=0o700)
    shutil.chown(space, like.stat().st_uid, like.stat().st_gid)
    folder.chmod(0o711)
    return True


def _fills(connection: psycopg.Connection) -> bool:
    try:
        connection.execute("insert into filler values (repeat('x', 7000))")
    except psycopg.errors.DiskFull:
        return False
    return True


@pytest.mark.proves("B002", "B031", "B106")
def test_a_full_disk_takes_nothing_new_and_work_goes_on_once_there_is_space(
    place: Site, durable_server: EmbeddedPostgres
) -> None:
    host = place.host("one", append_ms=2_000)
    host.start()
    run_id = host.begin("SLEEP 4\nTEXT done", "before")
    numbers = iter(range(10_000))
    with full_disk(place, durable_server):

        def full() -> bool:
            try:
                host.submit("run_status", {"run_id": run_id}, f"fill-{next(numbers)}")
            except CallFailed as error:
                return bool(error.error["retryable"]) and host.readiness()[0] == 503
            return False

        until(full, 60)
        sent = place.hermes.received("start")
        told = refused(host, "during")
        assert (told.status, told.error["effect"], told.error["retryable"]) == (503, "none", True)
        assert place.hermes.received("start") == sent
        assert host.process is not None
        assert host.process.poll() is None
    until(host.ready, 60)
    assert host.run_in(run_id, "completed")["end"]["known"]
    assert host.submit("run_start", {"body": {"input": "TEXT x"}}, "during")["action_result"]["status"] == "completed"
    nothing_was_sent_twice(place)
    every_state_is_justified(place)


@pytest.mark.proves("B065")
def test_views_go_on_at_their_place_after_the_database_was_away(place: Site, durable_server: EmbeddedPostgres) -> None:
    host = place.host("one")
    host.start()
    host.run_in(host.begin("TEXT before", "before"), "completed")
    for number in range(3):
        durable_server.stop()
        until(lambda: host.readiness()[0] == 503, 30)
        durable_server.start()
        until(host.ready, 60)
        host.run_in(host.begin("TEXT after", f"after-{number}"), "completed")
    answer = host.api().get("/views/runs").body
    assert answer["total_size"] == 4
    with psycopg.connect(place.dsn) as connection:
        newest = connection.execute("select max(notification_id) from stored_events").fetchone()
        live = connection.execute("select count(*) from view_places where live").fetchone()
    assert newest is not None
    assert live is not None
    assert answer["as_of"]["position"] <= newest[0]
    assert live[0] >= 2
