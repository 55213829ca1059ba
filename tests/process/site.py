"""Real processes on one shared database: hosts that are started, killed and started again, and a counting Hermes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from adapters.client import Api, CallFailed, segment
from adapters.clock import SystemClock
from adapters.codec import decode
from adapters.command import Stored
from adapters.credentials import Secret, bearer_key, write_secret
from adapters.postgres import EmbeddedPostgres
from domain.history import Recorded
from tests.pg import fresh_database, shared_server, state_folder, until

CLOCK = SystemClock()
START_S = 60.0
_Found = TypeVar("_Found")

CONFIG = """\
[public]
port = 0
[operational]
port = 0
[state]
dir = "{state}"
[postgres]
dsn_file = "{dsn_file}"
[policy]
file = "policy.toml"
[host]
replica = "{replica}"
lease_ttl_ms = {ttl_ms}
heartbeat_ms = {heartbeat_ms}
drain_timeout_ms = {drain_ms}
[limits]
append_deadline_ms = {append_ms}
[logging]
level = "{level}"
{more}
[[endpoints]]
id = "practice"
base_url = "{origin}"
api_key_file = "hermes-key"
approvals_mode = "manual"
run_deadline_ms = {run_deadline_ms}
"""
DEFAULTS: dict[str, Any] = {
    "state": "state",
    "ttl_ms": 4_000,
    "heartbeat_ms": 500,
    "drain_ms": 10_000,
    "append_ms": 4_000,
    "level": "WARNING",
    "more": "",
    "run_deadline_ms": 900_000,
}


def found(look: Callable[[], _Found | None], limit_s: float = START_S) -> _Found:
    """What `look` gives once it is not None."""
    seen: list[_Found] = []

    def one() -> bool:
        value = look()
        if value is not None:
            seen.append(value)
        return bool(seen)

    until(one, limit_s)
    return seen[0]


class HermesProcess:
    """A practice Hermes whose ledger and sessions survive its death."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.origin = folder, ""
        self.state_file = folder / "hermes-state.jsonl"
        self.process: subprocess.Popen[bytes] | None = None
        write_secret(folder / "hermes-key", CLOCK.entropy(24).hex().encode(), CLOCK.entropy)

    def start(self, *more: str) -> None:
        """Start it, at its earlier address if it had one."""
        address = self.folder / "hermes-address"
        address.unlink(missing_ok=True)
        command = [sys.executable, "-m", "adapters.practice_hermes", "--port", self.origin.rpartition(":")[2] or "0"]
        command += ["--key-file", str(self.folder / "hermes-key"), "--state-file", str(self.state_file)]
        command += ["--address-file", str(address), "--max-concurrent-runs", "0", *more]
        with (self.folder / "hermes.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(address.exists, START_S)
        self.origin = address.read_text("utf-8").strip()

    def kill(self) -> None:
        """SIGKILL: its runs are gone."""
        end(self.process, signal.SIGKILL)

    @property
    def _api(self) -> Api:
        return Api(self.origin, bearer_key(self.folder / "hermes-key"), wait_s=10)

    def ledger(self) -> dict[str, Any]:
        """Its own count of what reached it and what it did."""
        return self._api.get("/practice/ledger").body

    def received(self, route: str) -> int:
        """Requests of one route, refused ones included."""
        return int(self.ledger()["requests"].get(route, 0))

    def fault(self, **fault: Any) -> None:
        """Let requests of a route go wrong."""
        self._api.post("/practice/faults", {"add": [fault]})

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        self._api.post("/practice/faults", {"clear": True})

    def sessions_started(self) -> list[str]:
        """The conversation of each run that began to work, in order; ours are named after their Actions."""
        facts = [json.loads(line) for line in self.state_file.read_bytes().splitlines()]
        return [fact["session_id"] for fact in facts if fact["kind"] == "session"]


class HostProcess:
    """One host; it keeps its settings over its lives."""

    def __init__(self, folder: Path, origin: str, replica: str, **settings: Any) -> None:
        self.folder, self.replica = folder, replica
        values = DEFAULTS | {"dsn_file": "dsn"} | settings
        self.state = folder / values["state"]
        self.config = folder / f"{replica}.toml"
        self.config.write_text(CONFIG.format(origin=origin, replica=replica, **values), "utf-8")
        self.process: subprocess.Popen[bytes] | None = None
        self.public = self.operational = ""
        self._lives = 0

    @property
    def out(self) -> Path:
        """What this life tells on its standard output."""
        return self.folder / f"{self.replica}-{self._lives}.out"

    @property
    def err(self) -> Path:
        """The log of this life."""
        return self.folder / f"{self.replica}-{self._lives}.err"

    def spawn(self) -> None:
        """Start it and return at once."""
        self._lives += 1
        command = [sys.executable, "-m", "adapters.cli", "serve", "--config", str(self.config), "--json"]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def listening(self) -> bool:
        """Whether it has told where it listens; fails if it ended instead."""
        for line in self.out.read_bytes().splitlines(keepends=True):
            if line.startswith(b'{"ready"') and line.endswith(b"\n"):
                told = json.loads(line)["ready"]
                self.public, self.operational = told["public"], told["operational"]
                return True
        assert self.process is not None
        assert self.process.poll() is None, (self.out.read_bytes() + self.err.read_bytes())[-2000:].decode(
            errors="replace"
        )
        return False

    def start(self) -> None:
        """Start it and wait until it takes work."""
        self.spawn()
        until(self.listening, START_S)
        until(self.ready, START_S)

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Status and body of the readiness route; 0 where nobody answers."""
        try:
            told = Api(self.operational, None, wait_s=10).get("/ready")
        except CallFailed as error:
            return error.status, error.error
        return told.status, told.body

    def ready(self) -> bool:
        """Whether it takes new work."""
        return self.readiness()[0] == 200

    def kill(self) -> None:
        """SIGKILL."""
        end(self.process, signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM; its exit code."""
        return end(self.process, signal.SIGTERM)

    def api(self, token: str = "admin", wait_s: float = 30.0) -> Api:
        """Calls of one of its principals."""
        return Api(self.public, bearer_key(self.state / f"{token}-token"), wait_s=wait_s)

    def caller(self, token: str, wait_s: float = 30.0) -> Api:
        """Calls with this token."""
        return Api(self.public, Secret(token), wait_s=wait_s)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def submit(self, operation: str, given: dict[str, Any], key: str, **more: Any) -> dict[str, Any]:
        """Submit an Action; the whole answer. CallFailed as the client has it."""
        body = {"capability_id": f"cap:hermes_agent:practice:{operation}", "input": given} | more
        return self.api().post("/aip/v1/actions", body, key=key).body

    def begin(self, prompt: str, key: str) -> str:
        """Start a run; its handle."""
        return str(self.submit("run_start", {"body": {"input": prompt}}, key)["action_result"]["output"]["run_id"])

    def run(self, run_id: str) -> dict[str, Any]:
        """The view of a run, empty while it has not reached it."""
        try:
            return self.api().get(f"/views/runs/{segment(run_id)}").body
        except CallFailed as error:
            if error.status not in (404, 503):
                raise
            return {}

    def run_in(self, run_id: str, *states: str) -> dict[str, Any]:
        """The view of a run once it is in one of these states."""

        def look() -> dict[str, Any] | None:
            view = self.run(run_id)
            return view if view.get("state") in states else None

        return found(look)

    def asked(self, run_id: str) -> str:
        """The digest of the request that a run waits with, once it does."""
        pending = found(lambda: self.run(run_id).get("pending_approvals") or None)
        return str(pending[0]["digest"])

    def result(self, action_id: str) -> dict[str, Any]:
        """The result of an Action as it is told now; its error object where there is none yet."""
        try:
            told: dict[str, Any] = self.api().get(f"/aip/v1/actions/{segment(action_id)}/result").body["action_result"]
        except CallFailed as error:
            return {"status": "", "error": error.error}
        return told

    def answered(self, action_id: str) -> dict[str, Any]:
        """The result of an Action once it has one."""

        def look() -> dict[str, Any] | None:
            told = self.result(action_id)
            return told if told["status"] not in ("", "pending_approval") else None

        return found(look)

    def decide(self, approval_id: str) -> None:
        """Approve as the second principal."""
        path = f"/aip/v1/approvals/{segment(approval_id)}/decision"
        self.api("approver").post(path, {"decision": "approved", "reason": "reviewed"})


class Site:
    """A folder with a database, a practice Hermes and hosts that share settings, keys and principals."""

    def __init__(self, folder: Path, server: EmbeddedPostgres) -> None:
        self.folder, self.server = folder, server
        self.dsn = fresh_database(server)
        write_secret(folder / "dsn", self.dsn.encode(), CLOCK.entropy)
        policy = folder / "policy.toml"
        policy.write_text('[[tenants]]\nid = "default"\ndirect = ["run_stop"]\n', "utf-8")
        policy.chmod(0o600)
        self.hermes = HermesProcess(folder)
        self.hosts: list[HostProcess] = []

    def host(self, replica: str, **settings: Any) -> HostProcess:
        """A host that is not started yet."""
        host = HostProcess(self.folder, self.hermes.origin, replica, **settings)
        self.hosts.append(host)
        return host

    def through(self, dsn: str, name: str) -> str:
        """A file with another way to the database, to be a host's `dsn_file`."""
        write_secret(self.folder / name, dsn.encode(), CLOCK.entropy)
        return name

    def events(self) -> list[Recorded]:
        """Everything stored, in commit order."""
        query = "select originator_id, originator_version, topic, state, notification_id from stored_events order by 5"
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute(query).fetchall()
        return [
            decode(Stored(history=row[0], version=row[1], topic=row[2], state=bytes(row[3]), position=row[4]))
            for row in rows
        ]

    def close(self) -> None:
        """End every process that this site started."""
        for host in self.hosts:
            end(host.process, signal.SIGKILL)
        end(self.hermes.process, signal.SIGKILL)


def end(process: subprocess.Popen[bytes] | None, number: int) -> int:
    """Send a signal to a process that lives and wait for its end; its exit code."""
    if process is None:
        return 0
    if process.poll() is None:
        os.kill(process.pid, number)
    return process.wait(60)


@contextmanager
def site(server: EmbeddedPostgres) -> Iterator[Site]:
    """A site with a running practice Hermes."""
    with state_folder() as folder:
        folder.mkdir(mode=0o711)
        opened = Site(folder, server)
        try:
            opened.hermes.start()
            yield opened
        finally:
            opened.close()
            name = conninfo_to_dict(opened.dsn)["dbname"]
            if server.running:
                with psycopg.connect(make_conninfo(server.dsn), autocommit=True) as connection:
                    connection.execute(f'drop database if exists "{name}" with (force)'.encode())


@pytest.fixture(scope="module")
def durable_server() -> Iterator[EmbeddedPostgres]:
    """A server that writes through to the disk."""
    with shared_server(fsync=True) as server:
        yield server


@pytest.fixture
def place(durable_server: EmbeddedPostgres) -> Iterator[Site]:
    """A site with a running practice Hermes."""
    with site(durable_server) as opened:
        yield opened
