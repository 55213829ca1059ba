"""Practice Hermes: one scripted provider that behaves on the wire as Hermes Agent 0.19.0 was measured to behave.

The prompt of a run is its script; the directives are listed in ``adapters.practice_script``.  Flavour ``"0.22"`` adds
durable idempotency keys, numbered and replayed events, request ids of approvals, and the interrupted state.

In process, on a server thread of its own, so any event loop may talk to it::

    async with PracticeHermes() as hermes:
        httpx.post(f"{hermes.base_url}/v1/runs", headers=hermes.headers, json={"input": "hi"})
        hermes.ledger().runs_created

As a process, which answers SIGTERM as 0.19.0 does and loses its runs with SIGKILL::

    python -m adapters.practice_hermes --port 0 --state-file state.jsonl --key-file key --address-file address

``GET /practice/ledger`` answers the provider's own counts; ``POST /practice/faults`` takes one ``FaultOrder`` as JSON.
Both need the key.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from adapters.clock import SystemClock
from adapters.practice_faults import Fault, FaultOrder, Flavour, PracticeOptions
from adapters.practice_runs import PracticeRuns
from adapters.practice_script import Ledger, PracticeRecord
from adapters.practice_wire import PracticeServer, Received
from domain.ports import Clock

__all__ = ["Fault", "FaultOrder", "Ledger", "PracticeHermes", "PracticeOptions", "Received"]
PRACTICE_KEY = "practice-hermes-key"
_MEASURED = PracticeOptions()
_SYSTEM_CLOCK = SystemClock()


class PracticeHermes:
    """A practice provider that can be started, killed, terminated and started again at the same address.

    ``state_file`` keeps ledger and sessions for a later object; without it they live as long as this object.  Times of
    the answers come from ``clock``, waiting is real.
    """

    def __init__(
        self,
        clock: Clock = _SYSTEM_CLOCK,
        *,
        key: str = PRACTICE_KEY,
        flavour: Flavour = "0.19",
        port: int = 0,
        state_file: Path | None = None,
        options: PracticeOptions = _MEASURED,
    ) -> None:
        self.key, self.flavour, self.options = key, flavour, options
        self.received: list[Received] = []  #: every request of this object's lifetime
        self._clock, self._state_file = clock, state_file
        self._record = PracticeRecord(state_file)
        self._port, self._boots = port, 0
        self._process: _Process | None = None

    @property
    def base_url(self) -> str:
        """Address without a trailing slash; valid after the first start."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def headers(self) -> dict[str, str]:
        """Header that authorises a request."""
        return {"Authorization": f"Bearer {self.key}"}

    def ledger(self) -> Ledger:
        """Copy of the provider's own counts."""
        return self._record.ledger()

    def start(self) -> None:
        """Listen; at the port of the previous start when there was one."""
        if self._process is not None:
            raise RuntimeError("already started")
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(128)
        self._port = listener.getsockname()[1]
        self._boots += 1
        runs = PracticeRuns(self._record, self.options, self.flavour, self._clock)
        self._process = _Process(listener, self._record, runs, self.key, os.getpid() + self._boots - 1, self.received)

    def kill(self) -> None:
        """End as with SIGKILL: connections break, runs are forgotten, ledger and sessions stay."""
        if self._process is not None:
            process, self._process = self._process, None
            process.end(gently=False)

    def terminate(self) -> None:
        """End as with SIGTERM: runs are cancelled on the wire (interrupted on 0.22), streams are closed."""
        if self._process is not None:
            process, self._process = self._process, None
            process.end(gently=True)

    def restart(self) -> None:
        """Kill and start again at the same address."""
        self.kill()
        self.start()

    def fault(self, *faults: Fault, **order: Any) -> None:
        """Change the behaviour: faults to add, and members of ``FaultOrder``."""
        self._running().call(lambda server: server.order(FaultOrder(add=list(faults), **order)))

    def sweep(self) -> None:
        """Drop what is older than its retention, by the clock, now."""
        self._running().call(lambda server: server.runs.sweep())

    def _running(self) -> _Process:
        if self._process is None:
            raise RuntimeError("not started")
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._record.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class _Process:
    """One life of the provider: an event loop with its server on a thread of its own."""

    def __init__(
        self,
        listener: socket.socket,
        record: PracticeRecord,
        runs: PracticeRuns,
        key: str,
        pid: int,
        received: list[Received],
    ) -> None:
        self._transports: dict[tuple[str, int], asyncio.Transport] = {}
        self._server = PracticeServer(record, runs, key, pid, self._drop, received)
        transports = self._transports

        class Connection(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                transports[transport.get_extra_info("peername")[:2]] = transport

            def connection_lost(self, exc: Exception | None) -> None:
                transports.pop(self.client or ("", 0), None)
                super().connection_lost(exc)

        config = uvicorn.Config(
            self._server,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=60,
        )
        self._uvicorn = uvicorn.Server(config)
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="practice-hermes", daemon=True)
        self._thread.start()

    def call(self, change: Callable[[PracticeServer], None]) -> None:
        """Run a change on the server's loop and wait for it."""

        async def perform() -> None:
            change(self._server)

        asyncio.run_coroutine_threadsafe(perform(), self._loop).result()

    def end(self, *, gently: bool) -> None:
        """Stop serving; gently lets streams get their last frames."""
        asyncio.run_coroutine_threadsafe(self._close(gently), self._loop).result()
        self._thread.join()

    async def _close(self, gently: bool) -> None:
        for listening in self._uvicorn.servers:
            listening.close()
        if gently:
            self._server.runs.terminate()
            await self._server.runs.read_out(1.0)
        self._server.runs.forget()
        for transport in list(self._transports.values()):
            transport.abort()
        self._uvicorn.should_exit = self._uvicorn.force_exit = True

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_end())

    async def _until_end(self) -> None:
        sweeping = asyncio.ensure_future(self._sweep())
        try:
            await self._uvicorn.serve(sockets=[self._listener])
        finally:
            sweeping.cancel()
            await asyncio.sleep(0)  # a connection that was being accepted at the end gets its transport
            for transport in list(self._transports.values()):
                transport.abort()
            await asyncio.sleep(0)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._server.runs.options.sweep_every)
            self._server.runs.sweep()

    async def _drop(self, scope: Scope) -> None:
        transport = self._transports.get(tuple(scope["client"]))
        if transport is not None:
            transport.abort()
        await asyncio.sleep(0.01)


def _key_of(path: Path) -> str:
    """The key in the file; a new one is made when there is no file."""
    if not path.exists():
        key = _SYSTEM_CLOCK.entropy(32).hex()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + "\n")
    return path.read_text().strip()


def _end_with_input() -> None:
    """End this process when whoever holds the other end of its standard input is gone, however that ended."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; prints the address, and writes it to the address file when one is named."""
    parser = argparse.ArgumentParser(prog="practice_hermes", description="Scripted practice provider on loopback.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--state-file", type=Path)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--address-file", type=Path)
    parser.add_argument("--flavour", choices=("0.19", "0.22"), default="0.19")
    parser.add_argument("--approval-timeout", type=float, default=PracticeOptions().approval_timeout)
    parser.add_argument("--max-concurrent-runs", type=int, default=PracticeOptions().max_concurrent_runs)
    parser.add_argument("--end-with-input", action="store_true", help="end when standard input is closed")
    given = parser.parse_args(arguments)
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    options = PracticeOptions(approval_timeout=given.approval_timeout, max_concurrent_runs=given.max_concurrent_runs)
    hermes = PracticeHermes(
        key=_key_of(given.key_file),
        flavour=given.flavour,
        port=given.port,
        state_file=given.state_file,
        options=options,
    )
    with hermes:
        if given.address_file is not None:
            partial = given.address_file.with_suffix(".partial")
            partial.write_text(hermes.base_url + "\n")
            partial.replace(given.address_file)
        sys.stdout.write(hermes.base_url + "\n")
        sys.stdout.flush()
        if given.end_with_input:
            threading.Thread(target=_end_with_input, daemon=True).start()
        signal.sigwait(signals)
        hermes.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
