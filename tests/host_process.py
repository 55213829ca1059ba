"""A host as its users start it: `serve` in a process of its own, and commands as processes beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "adapters.cli")
PATIENCE_S = 60.0


class Ran:
    """What one command printed and how it ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self) -> Any:
        """Its standard output as JSON."""
        return json.loads(self.out)


def run(*words: str, environ: dict[str, str] | None = None, cwd: Path = ROOT, wait_s: float = PATIENCE_S) -> Ran:
    """One command, with nothing of this process's settings in its environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HERMES_RECONCILER_")}
    clean |= {"PYTHONPATH": str(ROOT)} | (environ or {})
    done = subprocess.run(
        [*COMMAND, *words],
        env=clean,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )
    return Ran(done)


class HostProcess:
    """`serve` in ``folder``, in front of one endpoint or, without ``origin``, of its own practice Hermes."""

    def __init__(
        self, folder: Path, origin: str = "", key: str = "", *, endpoint_id: str = "practice", more: str = ""
    ) -> None:
        self.folder, self.endpoint_id = folder, endpoint_id
        self.state = folder / "state"
        self.config = folder / "hermes-reconciler.toml"
        self.told: list[dict[str, Any]] = []
        self.public = self.operational = ""
        self._process: subprocess.Popen[str] | None = None
        folder.chmod(0o711)
        text = '[public]\nport = 0\n[operational]\nport = 0\n[state]\ndir = "state"\n'
        text += '[host]\nlease_ttl_ms = 5000\nheartbeat_ms = 500\n[logging]\nlevel = "INFO"\n'
        if origin:
            key_file = folder / "endpoint-key"
            key_file.touch(mode=0o600)
            key_file.write_text(key)
            text += f'[[endpoints]]\nid = "{endpoint_id}"\nbase_url = "{origin}"\napi_key_file = "endpoint-key"\n'
        self.config.write_text(more + text)

    @property
    def log(self) -> str:
        """What it wrote to standard error."""
        return (self.folder / "host.log").read_text()

    @property
    def to(self) -> tuple[str, ...]:
        """Options by which a command finds this host and its tokens."""
        return ("--url", self.public, "--config", str(self.config))

    def command(self, *words: str, wait_s: float = PATIENCE_S) -> Ran:
        """One command that speaks to this host."""
        return run(*words, *self.to, wait_s=wait_s)

    def start(self) -> None:
        """Start it and wait until it tells that it is ready."""
        with (self.folder / "host.log").open("a") as errors:
            self._process = subprocess.Popen(
                [*COMMAND, "serve", "--config", str(self.config), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.told.append(json.loads(line))
                if "ready" in self.told[-1]:
                    break
        assert any("ready" in told for told in self.told), self.log[-2000:]
        self.public, self.operational = (self.told[-1]["ready"][name] for name in ("public", "operational"))
        self._rest = threading.Thread(target=self._read_on, args=(self._process.stdout,), daemon=True)
        self._rest.start()

    def _read_on(self, output: Any) -> None:
        with output:
            for line in output:
                if line.startswith("{"):
                    self.told.append(json.loads(line))

    def send(self, number: signal.Signals) -> None:
        """Send a signal and go on."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.send(number)
        assert self._process is not None
        code = self._process.wait(PATIENCE_S)
        self._rest.join(PATIENCE_S)
        return code

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.end()
