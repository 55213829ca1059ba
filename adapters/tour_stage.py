"""What the tour plays on: a practice Hermes and a host as real child processes, which it starts and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from adapters.client import Api, CallFailed
from adapters.clock import SystemClock
from adapters.conversation import Conversation, until
from adapters.credentials import bearer_key, write_secret
from domain.errors import HostError

START_S = 60.0
END_S = 20.0
ENDPOINT = "practice"

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
        until(lambda: address.exists() or None, "the practice Hermes", START_S)
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
        until(lambda: self.ready() or None, "a ready host", START_S)
        return self._host.pid

    def _first_told(self, process: subprocess.Popen[bytes]) -> dict[str, str]:
        """Where it listens, as it tells when it has started; the rest of what it tells is read and dropped."""
        output = process.stdout
        if output is None:
            raise RuntimeError("the host's output is not connected")
        for line in output:
            told = json.loads(line) if line.startswith(b"{") else {}
            if "ready" in told:
                threading.Thread(target=_drop, args=(output,), daemon=True).start()
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

    def talk(self) -> Conversation:
        """The two principals and the host as it listens now."""
        return Conversation(asker=self.admin, approver=self.approver, endpoint_id=ENDPOINT, wait_s=START_S)


def _drop(output: IO[bytes]) -> None:
    with output:
        output.read()
