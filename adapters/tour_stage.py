"""What the tour plays on: a practice Hermes and a host as real child processes, which it starts and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from adapters.client import Api, CallFailed, segment
from adapters.clock import SystemClock
from adapters.credentials import bearer_key, write_secret
from domain.errors import HostError

START_S = 60.0
END_S = 20.0
LOOK_S = 0.05
ENDPOINT = "practice"
_Seen = TypeVar("_Seen")
_PAUSE = threading.Event()

_CONFIG = """\
[public]
port = 0

[operational]
port = 0

[state]
dir = "state"

[host]
lease_ttl_ms = 5000
heartbeat_ms = 500

[logging]
level = "WARNING"

[[endpoints]]
id = "practice"
base_url = "{origin}"
api_key_file = "hermes-key"
display_name = "Practice Hermes"
approvals_mode = "manual"
"""


def until(look: Callable[[], _Seen | None], what: str, seconds: float = START_S) -> _Seen:
    """Look again and again until there is something. HostError ``connector_host.not_ready`` says what never came."""
    clock = SystemClock()
    give_up = clock.monotonic() + seconds
    while (seen := look()) is None:
        if clock.monotonic() > give_up:
            raise HostError("connector_host.not_ready", f"Waited {seconds:.0f} s in vain for {what}.")
        _PAUSE.wait(LOOK_S)
    return seen


class Stage:
    """The folder, the processes and the two principals. Leaving the block ends every process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.clock = SystemClock()
        self._hermes: subprocess.Popen[bytes] | None = None
        self._host: subprocess.Popen[bytes] | None = None
        self._origin = ""
        self.public = self.operational = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._host, self._hermes):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    # ---- the practice Hermes -----------------------------------------------------------------------------------------

    def start_hermes(self) -> int:
        """Start it, at the address of its earlier life if it had one; its process id."""
        key, address = self.folder / "hermes-key", self.folder / "hermes-address"
        if not key.exists():
            write_secret(key, self.clock.entropy(24).hex().encode(), self.clock.entropy)
        address.unlink(missing_ok=True)
        port = self._origin.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "adapters.practice_hermes", "--port", port, "--key-file", str(key)]
        command += ["--state-file", str(self.folder / "hermes-state.jsonl"), "--address-file", str(address)]
        self._hermes = self._spawn(command, "hermes.log", subprocess.DEVNULL)
        until(lambda: address.exists() or None, "the practice Hermes")
        self._origin = address.read_text("utf-8").strip()
        return self._hermes.pid

    def kill_hermes(self) -> None:
        """SIGKILL."""
        if self._hermes is not None:
            self._hermes.kill()
            self._hermes.wait()

    def ledger(self) -> dict[str, Any]:
        """The practice Hermes's own count of what reached it and what it did."""
        return self._provider().get("/practice/ledger").body

    def fault(self, **fault: Any) -> None:
        """Let the next request of a route go wrong."""
        self._provider().post("/practice/faults", {"add": [fault]})

    def _provider(self) -> Api:
        return Api(self._origin, bearer_key(self.folder / "hermes-key"), wait_s=10)

    # ---- the host ----------------------------------------------------------------------------------------------------

    def start_host(self) -> int:
        """Start it and wait until it is ready; its process id."""
        config = self.folder / "hermes-reconciler.toml"
        config.write_text(_CONFIG.format(origin=self._origin), "utf-8")
        command = [sys.executable, "-m", "adapters.cli", "serve", "--config", str(config), "--json"]
        self._host = self._spawn(command, "host.log", subprocess.PIPE)
        told = self._first_told(self._host)
        self.public, self.operational = told["public"], told["operational"]
        until(lambda: self.ready() or None, "a ready host")
        return self._host.pid

    def _first_told(self, process: subprocess.Popen[bytes]) -> dict[str, str]:
        """Where it listens, as it tells when it has started; the rest of what it tells is read and dropped."""
        output = process.stdout
        if output is None:
            raise RuntimeError("the host's output is not connected")
        for line in output:
            told = json.loads(line) if line.startswith(b"{") else {}
            if "ready" in told:
                threading.Thread(target=output.read, daemon=True).start()
                return dict(told["ready"])
        log = (self.folder / "host.log").read_text("utf-8", "replace")[-2000:]
        raise HostError("connector_host.not_ready", f"The host ended while it started: {log}")

    def ready(self) -> bool:
        """Whether the host takes new work now, by a probe of its database and of Hermes."""
        try:
            return Api(self.operational, None, wait_s=10).get("/ready").status == 200
        except CallFailed:
            return False

    def kill_host(self) -> None:
        """SIGKILL: no drain, no goodbye."""
        if self._host is not None:
            os.kill(self._host.pid, signal.SIGKILL)
            self._host.wait()

    @property
    def admin(self) -> Api:
        """Who asks."""
        return Api(self.public, bearer_key(self.folder / "state" / "admin-token"))

    @property
    def approver(self) -> Api:
        """Who decides."""
        return Api(self.public, bearer_key(self.folder / "state" / "approver-token"))

    def _spawn(self, command: list[str], log: str, out: int) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as errors:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def submit(self, operation: str, given: dict[str, Any], key: str) -> dict[str, Any]:
        """Submit one Action as the admin; its ``action_result``."""
        body = {"capability_id": f"cap:hermes_agent:{ENDPOINT}:{operation}", "input": given}
        told = self.admin.post("/aip/v1/actions", body, key=key).body
        result: dict[str, Any] = told["action_result"]
        return result

    def run(self, run_id: str) -> dict[str, Any]:
        """The view of a run; empty while the view has not reached it."""
        try:
            return self.admin.get(f"/views/runs/{segment(run_id)}").body
        except CallFailed as error:
            if error.status != 404:
                raise
            return {}

    def run_in(self, run_id: str, *states: str) -> dict[str, Any]:
        """The view of a run once it is in one of these states."""

        def look() -> dict[str, Any] | None:
            view = self.run(run_id)
            return view if view.get("state") in states else None

        return until(look, f"the run to be {' or '.join(states)}")

    def asked(self, run_id: str) -> list[dict[str, Any]]:
        """The provider's requests that wait for a choice, once there are any."""
        return until(lambda: self.run(run_id).get("pending_approvals") or None, "the provider to ask")

    def decided(self, approval_id: str) -> dict[str, Any]:
        """Approve as the approver, and the Action's settled result."""
        body = {"decision": "approved", "reason": "tour"}
        self.approver.post(f"/aip/v1/approvals/{segment(approval_id)}/decision", body)
        return self.result(approval_id.removeprefix("appr_"))

    def result(self, action_id: str) -> dict[str, Any]:
        """The result of an Action once it is neither pending nor missing."""

        def look() -> dict[str, Any] | None:
            try:
                told = self.admin.get(f"/aip/v1/actions/{segment(action_id)}/result").body["action_result"]
            except CallFailed as error:
                if error.code != "action.result_not_ready":
                    raise
                return None
            return None if told["status"] == "pending_approval" else dict(told)

        return until(look, "a result")
