"""Serving an application on a listener inside the host's own task group.

The server installs no signal handlers and writes no access log. A connection that does not bring the head of a request
in time is closed; what is not HTTP is answered in the one error shape. Cancelling ends the listener within seconds.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import anyio
import msgspec
import uvicorn
from anyio.abc import TaskStatus
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from domain.errors import CallerError

HEAD_S = 10.0
GRACE_S = 3
CONNECTIONS = 2048
BACKLOG = 1024


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for the head of each request, counted from its first byte or from the connection.

    A body that is still sent after its answer is read and dropped for no longer than that.
    """

    head_s = HEAD_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection: its first head is awaited from now on."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Bytes: either a head is complete by now, or it is still awaited."""
        super().data_received(data)
        if self._at_work:
            self._forget_deadline()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of the connection."""
        self._forget_deadline()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """After a response an idle connection is the keep-alive timer's business."""
        super().on_response_complete()
        self._forget_deadline()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the server's own words
        """What is not HTTP, in the error shape of every answer."""
        self._refuse(CallerError("request.malformed", "This is not an HTTP/1.1 request."))

    @property
    def _at_work(self) -> bool:
        """Whether a request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle  # there is none before the first head
        return cycle is not None and not cycle.response_complete

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_s, self._head_is_late)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self._deadline = None
        if not self._at_work:
            self._refuse(CallerError("request.timeout"))

    def _refuse(self, error: CallerError) -> None:
        """Answer without the server's own machine, which may be in no state to answer, and close."""
        if self.transport.is_closing():
            return
        if not self._at_work:
            body = msgspec.json.encode({"error": error.body()})
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


@runtime_checkable
class HasFeeds(Protocol):
    """An application with answers that do not end by themselves."""

    def end_feeds(self) -> None:
        """End them."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.taken = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell that connections are taken."""
        await super().startup(sockets)
        self.taken.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the host's business."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket's address, taken before anything is served. OSError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
    except OSError:
        listening.close()
        raise
    return listening


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    tls: tuple[Path, Path] | None = None,
    protocol: type[PatientProtocol] = PatientProtocol,
    *,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled. ``task_status`` is told the bound port once connections are taken.

    ``tls`` is (certificate chain, key). Raises OSError for an address that cannot be bound.
    """
    listening = bind(host, port)
    more: dict[str, Any] = {} if tls is None else {"ssl_certfile": str(tls[0]), "ssl_keyfile": str(tls[1])}
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GRACE_S,
        **more,
    )
    server = _Server(config)
    served: object = app

    async def run() -> None:
        with anyio.CancelScope(shield=True):
            await server.serve(sockets=[listening])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        try:
            await server.taken.wait()
            task_status.started(listening.getsockname()[1])
            await anyio.sleep_forever()
        finally:
            if isinstance(served, HasFeeds):
                served.end_feeds()
            server.should_exit = True
