"""A backup that is restored into a new folder gives the same host again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from adapters.postgres import EmbeddedPostgres
from adapters.postgres_folders import wheel
from tests.pg import fresh_database, state_folder
from tests.process.site import HostProcess, Site, found

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(150)]
UNKNOWN_CODE = "connector.hermes_agent.outcome_unknown"
GIVEN = {name: {"body": {"input": f"TEXT {name}"}} for name in ("done", "doubt")}


def program(name: str) -> str:
    """A program of the embedded server."""
    return str(wheel()[0] / "pginstall" / "bin" / name)


def worked(place: Site, host: HostProcess) -> dict[str, Any]:
    """A finished run, an unknown start and a waiting approval; what is told of them."""
    host.run_in(host.begin("TEXT done", "done"), "completed")
    place.hermes.fault(kind="drop", route="start", carried_out=True)
    doubt = host.submit("run_start", GIVEN["doubt"], "doubt")["action_result"]
    assert doubt["error"]["code"] == UNKNOWN_CODE
    run_id = host.begin("ASK rm -rf /srv/x", "asking")
    given = {"run_id": run_id, "choice": "once", "reviewed": host.asked(run_id)}
    pending = host.submit("run_approval", given, "choice")["action_result"]
    return {"doubt": doubt["action_id"], "run": run_id, "approval": pending["output"]["approval_id"]}


def told(host: HostProcess, ids: dict[str, Any]) -> dict[str, Any]:
    """The Actions, the finished runs and the approvals, without the place of the journal at which they were read."""
    actions = found(lambda: _listed(host))
    return {
        "actions": sorted((one["action_id"], one["state"]) for one in actions),
        "results": {one["action_id"]: host.result(one["action_id"]) for one in actions},
        "approval": host.api().get(f"/aip/v1/approvals/{ids['approval']}").body["approval_record_view"]["request"],
    }


def _listed(host: HostProcess) -> list[dict[str, Any]] | None:
    """The four Actions, once the list has reached them."""
    actions: list[dict[str, Any]] = host.api().get("/aip/v1/actions").body["action_list"]["actions"]
    return actions if len(actions) == 4 else None


def goes_on(place: Site, host: HostProcess, ids: dict[str, Any], before: dict[str, Any]) -> None:
    """The restored host tells the same, answers the same keys without a send, and has its runs in hand."""
    assert told(host, ids) == before
    sent = place.hermes.received("start")
    done = host.submit("run_start", GIVEN["done"], "done")["action_result"]
    assert done["output"]["idempotent_replay"] is True
    doubt = host.submit("run_start", GIVEN["doubt"], "doubt")["action_result"]
    assert (doubt["action_id"], doubt["status"]) == (ids["doubt"], "requires_human")
    assert place.hermes.received("start") == sent
    host.decide(ids["approval"])
    choice = host.answered(ids["approval"].removeprefix("appr_"))
    assert (choice["status"], choice["error"]["code"]) == ("failed", "approval.not_pending")  # events were missed
    assert place.hermes.received("approval") == 0
    host.submit("run_stop", {"run_id": ids["run"]}, "stop")
    assert host.run_in(ids["run"], "cancelled")["end"]["known"]


@pytest.mark.proves("B095", "B105", "B128", "A131")
def test_a_dump_and_the_key_files_restore_a_host(place: Site, durable_server: EmbeddedPostgres, tmp_path: Path) -> None:
    host = place.host("one")
    host.start()
    ids = worked(place, host)
    before = told(host, ids)
    dump = tmp_path / "journal.dump"
    subprocess.run([program("pg_dump"), "--format=custom", f"--file={dump}", f"--dbname={place.dsn}"], check=True)
    host.kill()
    again = fresh_database(durable_server)
    subprocess.run([program("pg_restore"), "--exit-on-error", f"--dbname={again}", str(dump)], check=True)
    shutil.copytree(place.folder / "state", place.folder / "restored")
    restored = place.host("one", state="restored", dsn_file=place.through(again, "restored-dsn"))
    restored.start()
    goes_on(place, restored, ids, before)
    restored.terminate()


@pytest.mark.proves("B105", "B128")
def test_a_copy_of_the_running_server_restores_into_a_new_folder(place: Site, durable_server: EmbeddedPostgres) -> None:
    host = place.host("one")
    host.start()
    ids = worked(place, host)
    before = told(host, ids)
    parts = conninfo_to_dict(place.dsn)
    with state_folder() as fresh:
        fresh.mkdir(mode=0o711)
        copy = fresh / durable_server.data_dir.name
        command = [program("pg_basebackup"), f"--pgdata={copy}", "--checkpoint=fast", "--wal-method=stream"]
        command += [f"--host={parts['host']}", f"--port={parts['port']}", f"--username={parts['user']}"]
        subprocess.run(command, check=True)
        host.kill()
        if os.geteuid() == 0:
            owner = durable_server.data_dir.stat()
            for path in (copy, *copy.rglob("*")):
                os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
        with EmbeddedPostgres(fresh, database=str(parts["dbname"])) as server:
            shutil.copytree(place.folder / "state", place.folder / "restored")
            restored = place.host("one", state="restored", dsn_file=place.through(server.dsn, "restored-dsn"))
            restored.start()
            goes_on(place, restored, ids, before)
            restored.terminate()


def test_a_dump_without_data_keys_restores_a_history_whose_content_is_erased(
    place: Site, durable_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    host = place.host("one")
    host.start()
    run_id = host.begin("TEXT private", "private")
    host.run_in(run_id, "completed")
    host.kill()
    dump = tmp_path / "journal.dump"
    command = [program("pg_dump"), "--format=custom", "--exclude-table-data=data_keys", f"--file={dump}"]
    subprocess.run([*command, f"--dbname={place.dsn}"], check=True)
    again = fresh_database(durable_server)
    subprocess.run([program("pg_restore"), "--exit-on-error", f"--dbname={again}", str(dump)], check=True)
    with psycopg.connect(again) as connection:
        assert connection.execute("select count(*) from data_keys").fetchone() == (0,)
    restored = place.host("two", dsn_file=place.through(again, "without-keys"))
    restored.start()
    view = restored.run_in(run_id, "completed")
    assert view["end"]["known"]
    assert "private.erased" in str(view)
    restored.terminate()
