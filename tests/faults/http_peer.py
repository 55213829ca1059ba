"""A peer on a raw socket that answers HTTP exactly as a script says: half, wrong, never, or with a reset."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSListener

GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


class Peer:
    """Where the peer listens, what each connection said so far in order of arrival, and how many are open."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.heard: list[bytearray] = []
        self.open = 0
        self._changed = anyio.Event()

    def note(self) -> None:
        """Something was heard, opened or closed."""
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], bool], seconds: float = 5) -> None:
        """Wait for a condition on this peer; TimeoutError if it does not come true."""
        with anyio.fail_after(seconds):
            while not condition():
                await self._changed.wait()


class Connection:
    """One accepted connection, in the hands of a script."""

    def __init__(self, peer: Peer, stream: ByteStream) -> None:
        self._peer = peer
        self._stream = stream
        self.heard = bytearray()
        peer.heard.append(self.heard)

    async def _hear(self) -> None:
        self.heard += await self._stream.receive()
        self._peer.note()

    async def read_head(self) -> bytes:
        """Wait for the end of the request's header block."""
        while b"\r\n\r\n" not in self.heard:
            await self._hear()
        return bytes(self.heard.partition(b"\r\n\r\n")[0])

    async def read_request(self) -> bytes:
        """Wait for the complete request; gives its body."""
        head = await self.read_head()
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        while len(body := bytes(self.heard).partition(b"\r\n\r\n")[2]) < length:
            await self._hear()
        return body

    async def wait_closed(self) -> None:
        """Wait until the client has gone."""
        while True:
            await self._hear()

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)

    async def reset(self) -> None:
        """Close with RST instead of FIN."""
        raw = self._stream.extra(SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self._stream.aclose()


Script = Callable[[Connection], Awaitable[None]]


@asynccontextmanager
async def http_peer(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """Serve each connection by the script, then close it; everything ends with the block."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    peer = Peer(f"{'https' if tls else 'http'}://127.0.0.1:{port}")

    async def serve(stream: ByteStream) -> None:
        peer.open += 1
        peer.note()
        try:
            with suppress(*GONE):
                async with stream:
                    await script(Connection(peer, stream))
        finally:
            peer.open -= 1
            peer.note()

    async with listener, anyio.create_task_group() as group:
        secure = TLSListener(listener, tls, standard_compatible=False) if tls else listener
        group.start_soon(secure.serve, serve)
        try:
            yield peer
        finally:
            group.cancel_scope.cancel()


def answer(status: str, body: bytes, *headers: str, content_type: str = "application/json") -> bytes:
    """A complete, length-delimited answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def replying(data: bytes) -> Script:
    """Read the request, send these bytes, close."""

    async def script(connection: Connection) -> None:
        await connection.read_request()
        await connection.send(data)

    return script
