"""HTTP to one Hermes endpoint: each exchange is told as it was seen, with the mark that a byte may have left.

What an answer proves is judged elsewhere; here nothing is repeated, followed, decompressed or taken from the
environment. Every call has a connection of its own, so no peer can leave bytes behind for the next caller, and one
total deadline, since the client library's time-outs restart with every byte. An exception's class proves almost
nothing; only the library's trace event from just before the first write is the mark.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from adapters.sse import MIB, SseLimits, SseSplitter
from domain.errors import HostError
from domain.events import Target
from domain.provider import Exchange, Failure, Outgoing, StreamEnd, StreamItem, StreamOpened

KEY_LIMIT = 16 * 1024
HEADER_LIMIT = 16 * 1024
ERROR_BODY_LIMIT = 64 * 1024
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
SENT_MARK = "http11.send_request_headers.started"
CONNECTED = "connection.connect_tcp.complete"
# Headers that this adapter alone writes, and headers that no call ever has.
OWN_HEADERS = frozenset(
    {
        "authorization",
        "connection",
        "content-length",
        "cookie",
        "expect",
        "host",
        "origin",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "accept-encoding",
    }
)

_PATH = re.compile(r"/[A-Za-z0-9._~%/-]*\Z")
_NAME = re.compile(r"[A-Za-z0-9-]{1,64}\Z")
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\Z")
_KEY = re.compile(r"[\x21-\x7e]+\Z")


class BearerKey:
    """An endpoint's key: it prints as ``***``, cannot be encoded or copied, and only ``reveal`` gives it.

    HostError ``settings.invalid`` unless it is visible ASCII without spaces, at most 16 KiB (AIP 11.4).
    """

    __slots__ = ("_reveal",)

    def __init__(self, value: str) -> None:
        if len(value) > KEY_LIMIT or not _KEY.match(value):
            raise HostError("settings.invalid", "An endpoint's key must be visible ASCII without spaces.")
        self._reveal: Callable[[], str] = lambda: value

    def reveal(self) -> str:
        """The key itself, for the Authorization header."""
        return self._reveal()

    def __repr__(self) -> str:
        return "BearerKey(***)"

    def __reduce__(self) -> str:
        raise TypeError("a key cannot be encoded")


class HermesLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one endpoint's calls: places by kind, bytes of one answer's body, seconds to connect, stream bounds."""

    mutations: int = 16
    reads: int = 16
    streams: int = 256
    body: int = 16 * MIB
    connect_s: float = 10.0
    sse: SseLimits = SseLimits()


def check_origin(origin: str, *, allow_http: bool = False) -> str:
    """The normal form of an endpoint's origin (AIP 11.4), or HostError ``settings.invalid``.

    An origin has a scheme, a host and perhaps a port, nothing else. Plain http is for loopback, or on demand.
    """
    try:
        parts = urlsplit(origin)
        host, port = parts.hostname or "", parts.port
        httpx.URL(origin)
    except (ValueError, httpx.InvalidURL):
        raise HostError("settings.invalid", "An endpoint's origin is not a URL.") from None
    plain = parts.scheme in ("http", "https") and host and parts.path in ("", "/") and port != 0
    if not plain or any(mark in origin for mark in "@?#\\%") or not _VALUE.match(origin) or " " in origin:
        raise HostError("settings.invalid", "An endpoint's origin is http(s)://host[:port] and nothing else.")
    if parts.scheme == "http" and host not in LOOPBACK and not allow_http:
        raise HostError("settings.invalid", "An endpoint off this machine needs https.")
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + (f":{port}" if port is not None else "")


class _Closable(Protocol):
    async def aclose(self) -> None: ...


class _Call:
    """One request under way: its mark, and the answer as far as it came."""

    def __init__(self) -> None:
        self.sent = False
        self.response: httpx.Response | None = None
        self.body = bytearray()
        self._connection: _Closable | None = None

    async def trace(self, event: str, info: dict[str, Any]) -> None:
        if event == SENT_MARK:
            self.sent = True
        elif event == CONNECTED:
            self._connection = info["return_value"]

    async def close(self) -> None:
        """Close what is open. The library forgets a connection whose TLS handshake is cancelled."""
        with anyio.CancelScope(shield=True):
            if self.response is not None:
                await self.response.aclose()
            if self._connection is not None:
                await self._connection.aclose()

    def exchange(self, failure: Failure = Failure.NONE) -> Exchange:
        seen = self.response
        if seen is None:
            return Exchange(sent=self.sent, failure=failure)
        return Exchange(
            sent=self.sent,
            failure=failure,
            status=seen.status_code,
            content_type=seen.headers.get("content-type", "")[:256],
            retry_after=seen.headers.get("retry-after", "")[:64],
            location=seen.headers.get("location", "")[:2_000],
            body=bytes(self.body),
        )


class HermesEndpoint:
    """The provider port for one admitted endpoint. It never raises for what the network or the provider does.

    Cancelling a call closes its connection and propagates; whoever sends a mutation shields it.
    """

    def __init__(
        self,
        target: Target,
        key: BearerKey | None,
        *,
        limits: HermesLimits | None = None,
        allow_http: bool = False,
        tls: ssl.SSLContext | None = None,
        agent: str = "hermes-reconciler",
    ) -> None:
        self.target = target
        self._origin = httpx.URL(check_origin(target.origin, allow_http=allow_http))
        self._key = key
        self._limits = limits or HermesLimits()
        self._agent = agent
        # One place per connection: a request that waits inside the library's pool loses its slot when cancelled.
        self._mutations = anyio.Semaphore(self._limits.mutations)
        self._reads = anyio.Semaphore(self._limits.reads)
        self._streams = anyio.Semaphore(self._limits.streams)
        places = self._limits.mutations + self._limits.reads + self._limits.streams
        self._transport = httpx.AsyncHTTPTransport(
            verify=tls or httpx.create_ssl_context(trust_env=False),
            trust_env=False,
            retries=0,
            limits=httpx.Limits(max_connections=places, max_keepalive_connections=0),
        )

    async def close(self) -> None:
        """Close every connection."""
        with anyio.CancelScope(shield=True):
            await self._transport.aclose()

    async def send(self, out: Outgoing) -> Exchange:
        """Send one mutation, once, within its total deadline."""
        return await self._perform(out, self._mutations)

    async def read(self, out: Outgoing) -> Exchange:
        """Perform one read within its total deadline. Reads never take the places of mutations."""
        return await self._perform(out, self._reads)

    async def stream(self, out: Outgoing, idle_s: float = 75) -> AsyncGenerator[StreamItem, None]:
        """Open one event stream. ``StreamEnd`` is always the last item; close the generator to leave earlier.

        The request's deadline bounds the wait for the headers; after that only ``idle_s`` seconds without a byte end
        the stream, or a bound of ``SseLimits``.
        """
        call = _Call()
        deadline = anyio.current_time() + out.timeout_ms / 1000
        request = self._request(out, call)
        if request is None:
            yield _not_connected(call, Failure.BAD_REQUEST)
            return
        async with _place(self._streams, deadline) as free:
            if not free:
                yield _not_connected(call, Failure.POOL_TIMEOUT)
                return
            try:
                failure = await self._open(call, request, deadline)
                if call.response is None:
                    yield _not_connected(call, failure)
                    return
                if call.response.status_code != 200 or not _is_event_stream(call.response):
                    failure = await self._receive(call, deadline, ERROR_BODY_LIMIT)
                    yield StreamEnd(reason="refused", exchange=call.exchange(failure))
                    return
                yield StreamOpened()
                async with aclosing(self._follow(call.response, idle_s)) as items:
                    async for item in items:
                        yield item
            finally:
                await call.close()

    async def _perform(self, out: Outgoing, places: anyio.Semaphore) -> Exchange:
        call = _Call()
        deadline = anyio.current_time() + out.timeout_ms / 1000
        request = self._request(out, call)
        if request is None:
            return call.exchange(Failure.BAD_REQUEST)
        async with _place(places, deadline) as free:
            if not free:
                return call.exchange(Failure.POOL_TIMEOUT)
            try:
                failure = await self._open(call, request, deadline)
                if call.response is not None:
                    failure = await self._receive(call, deadline, self._limits.body)
            finally:
                await call.close()
        return call.exchange(failure)

    def _request(self, out: Outgoing, call: _Call) -> httpx.Request | None:
        """The request, or ``None`` if it may not leave: everything is checked before connecting."""
        headers = [
            ("User-Agent", self._agent),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        for name, value in out.headers:
            if not _NAME.match(name) or name.lower() in OWN_HEADERS or len(value) > HEADER_LIMIT:
                return None
            if not _VALUE.match(value):
                return None
            headers.append((name, value))
        odd = any(part in ("", ".", "..") for part in out.path[1:].split("/"))
        if out.method not in ("GET", "POST") or not _PATH.match(out.path) or odd:
            return None
        if out.authenticated:
            if self._key is None:
                return None
            headers.append(("Authorization", f"Bearer {self._key.reveal()}"))
        timeout = httpx.Timeout(None, connect=self._limits.connect_s).as_dict()
        return httpx.Request(
            out.method,
            self._origin,
            headers=headers,
            content=out.body,
            extensions={"timeout": timeout, "trace": call.trace, "target": out.path.encode()},
        )

    async def _open(self, call: _Call, request: httpx.Request, deadline: float) -> Failure:
        """Send the request and wait for the answer's headers."""
        with anyio.CancelScope(deadline=deadline) as scope:
            try:
                call.response = await self._transport.handle_async_request(request)
            except (httpx.TransportError, httpx.InvalidURL, OSError, ValueError) as error:
                return _failure(error, sent=call.sent)
        return Failure.TIMEOUT if scope.cancelled_caught else Failure.NONE

    async def _receive(self, call: _Call, deadline: float, limit: int) -> Failure:
        """Read the body up to the bound. An answer whose end only the connection tells is not complete."""
        response = call.response
        assert response is not None
        if not _is_identity(response):
            return Failure.DECODING
        declared = response.headers.get("content-length", "0")
        if len(declared) > 12 or int(declared) > limit:
            return Failure.TOO_LARGE
        with anyio.CancelScope(deadline=deadline) as scope:
            try:
                async with aclosing(_chunks(response)) as chunks:
                    async for chunk in chunks:
                        room = limit - len(call.body)
                        call.body += chunk[:room]
                        if len(chunk) > room:
                            return Failure.TOO_LARGE
            except (httpx.TransportError, OSError, ValueError) as error:
                return _failure(error, sent=True)
        if scope.cancelled_caught:
            return Failure.TIMEOUT
        return Failure.NONE if _is_delimited(response) else Failure.PROTOCOL

    async def _follow(self, response: httpx.Response, idle_s: float) -> AsyncGenerator[StreamItem, None]:
        splitter = SseSplitter(self._limits.sse)
        reason = ""
        async with aclosing(_chunks(response)) as chunks:
            while not reason:
                chunk: bytes | None = None
                with anyio.CancelScope(deadline=anyio.current_time() + idle_s) as scope:
                    try:
                        chunk = await anext(chunks, None)
                    except (httpx.TransportError, OSError, ValueError):
                        reason = "cut"
                if scope.cancelled_caught:
                    reason = "idle"
                if chunk is not None:
                    for item in splitter.feed(chunk):
                        yield item
                    reason = splitter.fault
                    continue
                items, rest = splitter.close()
                for item in items:
                    yield item
                reason = reason or ("cut" if rest else "closed")
        yield StreamEnd(reason=reason)


@asynccontextmanager
async def _place(places: anyio.Semaphore, deadline: float) -> AsyncIterator[bool]:
    """One of the places, or false if none came free in time."""
    free = False
    with anyio.CancelScope(deadline=deadline):
        await places.acquire()
        free = True
    try:
        yield free
    finally:
        if free:
            places.release()


async def _chunks(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The body's bytes as they come, without the client library's decoding."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:
        yield chunk


def _not_connected(call: _Call, failure: Failure) -> StreamEnd:
    return StreamEnd(reason="not_connected", exchange=call.exchange(failure))


def _is_event_stream(response: httpx.Response) -> bool:
    media: str = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media == "text/event-stream" and _is_identity(response)


def _is_identity(response: httpx.Response) -> bool:
    coding: str = response.headers.get("content-encoding", "identity")
    return coding.strip().lower() == "identity"


def _is_delimited(response: httpx.Response) -> bool:
    return "content-length" in response.headers or "chunked" in response.headers.get("transfer-encoding", "").lower()


def _failure(error: Exception, *, sent: bool) -> Failure:
    match error:
        case httpx.ConnectTimeout():
            return Failure.CONNECT_TIMEOUT
        case httpx.PoolTimeout():
            return Failure.POOL_TIMEOUT
        case httpx.ConnectError():
            return _connect_failure(error)
        case httpx.TimeoutException():
            return Failure.TIMEOUT
        case httpx.WriteError():
            return Failure.WRITE_ERROR
        case httpx.RemoteProtocolError():
            text = str(error)
            gone = text.startswith(("Server disconnected", "peer closed connection"))
            return Failure.READ_ERROR if gone else Failure.PROTOCOL
        case httpx.NetworkError() | OSError():
            return Failure.READ_ERROR
        case _:
            return Failure.PROTOCOL if sent else Failure.BAD_REQUEST


def _connect_failure(error: BaseException) -> Failure:
    """DNS or TLS if one of the causes says so; else no connection came about."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        cause = left.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        if isinstance(cause, ssl.SSLError):
            return Failure.TLS
        if isinstance(cause, socket.gaierror):
            return Failure.DNS
        if isinstance(cause, BaseExceptionGroup):
            left += cause.exceptions
        left += (cause.__cause__, cause.__context__)
    return Failure.CONNECT_REFUSED
