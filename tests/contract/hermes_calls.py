"""Calls of the endpoint adapter to scripted peers, and the scripts that break an exchange after its mark."""

from __future__ import annotations

import gzip
import socket
import ssl

import anyio
import msgspec

from adapters.hermes import BearerKey, HermesEndpoint, HermesLimits
from adapters.sse import SseLimits
from domain.events import Target
from domain.provider import (
    Exchange,
    Failure,
    Outgoing,
    StreamItem,
)
from domain.requests import (
    Trusted,
    events_request,
    start_request,
)
from tests.faults.http_peer import Connection, Script, answer, http_peer, replying

CANARY = "canary-5f1d0c77-key"
TRUSTED = Trusted(principal="user:ada", tenant="tenant-a", issuer="issuer", trace_id="t1", idempotency_key="k1")
ACCEPTED = answer("202 Accepted", b'{"run_id": "run_1", "status": "started"}')
START = start_request(b'{"input":"hi"}', session_key=None, trusted=TRUSTED)
SMALL = HermesLimits(body=100_000, connect_s=0.5, sse=SseLimits(line=2_000, frame=3_000, stream=20_000))
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def endpoint(origin: str, limits: HermesLimits = SMALL, tls: ssl.SSLContext | None = None) -> HermesEndpoint:
    return HermesEndpoint(
        Target(endpoint_id="one", origin=origin), BearerKey(CANARY), limits=limits, tls=tls, agent="hermes-reconciler/0"
    )


def quick(out: Outgoing, timeout_ms: int = 300) -> Outgoing:
    return msgspec.structs.replace(out, timeout_ms=timeout_ms)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def sent_to(script: Script, out: Outgoing = START) -> Exchange:
    """The exchange of one mutation with a scripted peer."""
    async with http_peer(script) as peer:
        hermes = endpoint(peer.origin)
        try:
            return await hermes.send(out)
        finally:
            await hermes.close()


async def streamed(script: Script, idle_s: float = 5) -> list[StreamItem]:
    async with http_peer(script) as peer:
        hermes = endpoint(peer.origin)
        try:
            return [item async for item in hermes.stream(quick(events_request("run_1", None, TRUSTED), 2_000), idle_s)]
        finally:
            await hermes.close()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def reset_after_accept(connection: Connection) -> None:
    await connection.reset()


async def close_after_accept(connection: Connection) -> None:
    del connection


async def reset_after_request(connection: Connection) -> None:
    await connection.read_request()
    await connection.reset()


async def close_after_head(connection: Connection) -> None:
    await connection.read_head()


async def close_after_request(connection: Connection) -> None:
    await connection.read_request()


async def silent(connection: Connection) -> None:
    await connection.wait_closed()


def half(data: bytes) -> Script:
    async def script(connection: Connection) -> None:
        await connection.read_request()
        await connection.send(data)
        await connection.reset()

    return script


async def dripping(connection: Connection) -> None:
    await connection.read_request()
    for byte in ACCEPTED:
        await connection.send(bytes([byte]))
        await anyio.sleep(0.02)


async def dripping_headers(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(b"HTTP/1.1 202 Accepted\r\n")
    while True:
        await connection.send(b"X: y\r\n")
        await anyio.sleep(0.01)


async def endless_headers(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(b"HTTP/1.1 202 Accepted\r\n")
    while True:
        await connection.send(b"X-Padding: " + b"y" * 8_000 + b"\r\n")


async def endless_provisional(connection: Connection) -> None:
    await connection.read_request()
    while True:
        await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")


async def endless_body(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await connection.send(chunk(b"x" * 16_000))


BROKEN = [
    (reset_after_accept, {Failure.READ_ERROR, Failure.WRITE_ERROR}),
    (close_after_accept, {Failure.READ_ERROR, Failure.WRITE_ERROR}),
    (reset_after_request, {Failure.READ_ERROR}),
    (close_after_head, {Failure.READ_ERROR}),
    (close_after_request, {Failure.READ_ERROR}),
    (silent, {Failure.TIMEOUT}),
    (dripping, {Failure.TIMEOUT}),
    (dripping_headers, {Failure.TIMEOUT}),
    (endless_headers, {Failure.PROTOCOL}),
    (endless_provisional, {Failure.TIMEOUT}),
    (endless_body, {Failure.TOO_LARGE}),
    (half(ACCEPTED[:20]), {Failure.READ_ERROR}),
    (half(ACCEPTED[:-10]), {Failure.READ_ERROR}),
    (replying(ACCEPTED[:-10]), {Failure.READ_ERROR}),
    (replying(b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"), {Failure.READ_ERROR}),
    (replying(b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}"), {Failure.PROTOCOL}),
    (replying(b'HTTP/1.1 202 Accepted\r\n\r\n{"run_id": "run_1"}'), {Failure.PROTOCOL}),
    (replying(b"HTTP/1.1 202 Accepted\r\nContent-Length: -1\r\n\r\n{}"), {Failure.PROTOCOL}),
    (replying(b"HTTP/1.1 202 Accepted\r\nContent-Length: " + b"9" * 18 + b"\r\n\r\n{}"), {Failure.TOO_LARGE}),
    (replying(b"HTTP/1.1 202 Accepted\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n{}"), {Failure.PROTOCOL}),
    (replying(b"HTTP/1.1 202 A\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), {Failure.PROTOCOL}),
    (replying(b"SSH-2.0-OpenSSH_9.9\r\n\r\n"), {Failure.PROTOCOL}),
    (replying(b"\x00\x01\x02"), {Failure.READ_ERROR, Failure.PROTOCOL}),
    (replying(answer("202 Accepted", b"x" * 100_001)), {Failure.TOO_LARGE}),
    (
        replying(answer("202 Accepted", gzip.compress(b"0" * 1_000_000), "Content-Encoding: gzip")),
        {Failure.DECODING},
    ),
]
