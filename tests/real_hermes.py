"""Launcher of the real Hermes Agent 0.19.0: its own environment, its own home, its gateway on a loopback port.

The environment is made once per machine from ``requirements/hermes.lock`` in a folder below the user's cache folder;
a file lock lets two launchers start at once.  Nothing outside loopback is reached: every other address is sent to a
proxy that refuses at once, so a start never waits for a network.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

_LOCK = Path(__file__).parents[1] / "requirements" / "hermes.lock"
_BOOT = """
import asyncio, json, sys
from gateway.platforms.api_server import APIServerAdapter
times = json.loads(sys.argv[1])
APIServerAdapter._RUN_STREAM_TTL = times["stream_retention"]
APIServerAdapter._RUN_STATUS_TTL = times["status_retention"]
async def sweep(self):
    while True:
        await asyncio.sleep(times["sweep_every"])
        self._sweep_orphaned_runs_once()
APIServerAdapter._sweep_orphaned_runs = sweep
from gateway.run import start_gateway
sys.exit(0 if asyncio.run(start_gateway()) else 1)
"""
MEASURED_TIMES = {"stream_retention": 300.0, "status_retention": 3600.0, "sweep_every": 60.0}
_REFUSING_PROXY = "http://127.0.0.1:9"
_START_LIMIT_SECONDS = 90


def hermes_python() -> Path:
    """The interpreter of an environment that holds exactly the locked packages; the first call installs them."""
    digest = hashlib.sha256(_LOCK.read_bytes() + sys.version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hermes-reconciler"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"hermes-agent-{digest}"
    with _locked(cache / f"hermes-agent-{digest}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
            install: list[str | Path] = [
                folder / "bin" / "python",
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
            subprocess.run([*install, "--no-deps", "--require-hashes", "-r", _LOCK], check=True, capture_output=True)
            (folder / "complete").touch()
    return folder / "bin" / "python"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RealHermes:
    """One home of the real agent and the gateway process that serves it.

    ``model_url`` is an OpenAI-compatible endpoint (``ScriptedModel.base_url``).  ``times`` shortens retention of run
    state and streams, in seconds (keys of ``MEASURED_TIMES``).
    """

    key = "real-hermes-agent-key-0019"

    def __init__(
        self,
        home: Path,
        model_url: str,
        *,
        approval_timeout: int = 60,
        max_concurrent_runs: int = 10,
        times: dict[str, float] | None = None,
    ) -> None:
        self.home = home
        self._port = _free_port()
        self.base_url = f"http://127.0.0.1:{self._port}"
        self.headers = {"Authorization": f"Bearer {self.key}"}
        self._times = MEASURED_TIMES | (times or {})
        self._process: subprocess.Popen[bytes] | None = None
        model = {"provider": "custom", "default": "scripted", "base_url": model_url, "api_key": "scripted-model"}
        settings: dict[str, Any] = {
            "model": model | {"context_length": 200_000},
            "approvals": {"mode": "manual", "timeout": approval_timeout},
            "gateway": {"api_server": {"max_concurrent_runs": max_concurrent_runs}},
        }
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.yaml").write_text(json.dumps(settings))

    @property
    def pid(self) -> int:
        """Process id of the running gateway."""
        return self._running().pid

    def start(self) -> None:
        """Start the gateway and wait until its health answers; RuntimeError with its output when it ends instead."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "HERMES_HOME": str(self.home),
            "LANG": "C.UTF-8",
            "API_SERVER_ENABLED": "true",
            "API_SERVER_KEY": self.key,
            "API_SERVER_HOST": "127.0.0.1",
            "API_SERVER_PORT": str(self._port),
            "HTTP_PROXY": _REFUSING_PROXY,
            "HTTPS_PROXY": _REFUSING_PROXY,
            "NO_PROXY": "127.0.0.1,localhost",
        }
        with (self.home / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                [hermes_python(), "-c", _BOOT, json.dumps(self._times)],
                env=environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _START_LIMIT_SECONDS
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError("Hermes Agent did not start:\n" + (self.home / "output.log").read_text()[-4000:])
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to the gateway process alone; what its tools started goes on."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, and wait for the end, which may take half a minute while work goes on."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kill the gateway and start another one on the same home and port."""
        self.kill()
        self.start()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("not started")
        return self._process

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(number)
            process.wait()

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.base_url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
