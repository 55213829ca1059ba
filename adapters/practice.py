"""What a host without configuration has: two principals with tokens of their own, and a practice Hermes to talk to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio

from adapters.credentials import Secret, read_secret, write_secret
from adapters.principals import Entry, import_token, make_token
from adapters.settings import Endpoint
from domain.errors import HostError

TENANT = "default"
START_S = 20.0
END_S = 5.0

ADMIN_SCOPES = ("*",)
APPROVER_SCOPES = ("action:read:any", "approval:read:any", "approval:write", "data:sensitive:read")


def default_principals(state: Path, entropy: Callable[[int], bytes]) -> tuple[Entry, ...]:
    """``admin`` and ``approver`` of the tenant ``default``; their tokens are kept in 0600 files of the state folder."""
    return (
        _principal(state / "admin-token", "admin", ADMIN_SCOPES, ("operator",), entropy),
        _principal(state / "approver-token", "approver", APPROVER_SCOPES, ("approver",), entropy),
    )


def _principal(
    file: Path, name: str, scopes: tuple[str, ...], roles: tuple[str, ...], entropy: Callable[[int], bytes]
) -> Entry:
    token, _ = make_token(entropy, id=name, kind="human", tenant=TENANT, scopes=scopes, roles=roles)
    write_secret(file, token.reveal().encode(), entropy)  # keeps the token of an earlier start
    kept = Secret(read_secret(file).decode().strip())
    return import_token(kept, id=name, kind="human", tenant=TENANT, scopes=scopes, roles=roles)


class PracticeProcess:
    """A practice Hermes in a process of its own, ended with this one."""

    def __init__(self, state: Path, entropy: Callable[[int], bytes]) -> None:
        self._folder = state / "practice"
        self._entropy = entropy
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def key_file(self) -> Path:
        """Where its key is."""
        return self._folder / "key"

    async def start(self) -> Endpoint:
        """Start it and wait until it listens; the endpoint to be admitted."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_secret(self.key_file, self._entropy(24).hex().encode(), self._entropy)
        address = self._folder / "address"
        address.unlink(missing_ok=True)
        command = [sys.executable, "-m", "adapters.practice_hermes", "--port", "0", "--key-file", str(self.key_file)]
        command += ["--state-file", str(self._folder / "state.jsonl"), "--address-file", str(address)]
        command += ["--end-with-input"]  # the pipe closes with this process, however that ends
        self._process = await anyio.to_thread.run_sync(
            lambda: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        )
        with anyio.move_on_after(START_S):
            while self._process.poll() is None:
                if address.exists() and (origin := address.read_text("utf-8").strip()):
                    return Endpoint(
                        id="practice",
                        base_url=origin,
                        api_key_file=self.key_file,
                        display_name="Practice Hermes",
                        approvals_mode="manual",
                    )
                await anyio.sleep(0.02)
        self.stop()
        raise HostError("connector_host.not_ready", "The practice Hermes did not start.")

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def stop(self) -> None:
        """End it."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
