"""What each broken, late or hostile answer is told as: the sent mark, the failure, and bounded memory."""

from __future__ import annotations

import copy
import datetime as dt
import gzip
import ipaddress
import json
import logging
import pickle
import random
import socket
import ssl
import tracemalloc
from contextlib import aclosing
from pathlib import Path

import anyio
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from adapters.hermes import BearerKey, HermesEndpoint, HermesLimits, check_origin
from adapters.practice_hermes import PracticeHermes
from adapters.sse import SseLimits
from domain.errors import HostError
from domain.events import Target
from domain.provider import (
    Comment,
    Exchange,
    Failure,
    Outgoing,
    RawFrame,
    StreamEnd,
    StreamItem,
    StreamOpened,
    Verdict,
    judge_approval,
    judge_start,
    judge_stop,
    parse_object,
    read_status,
)
from domain.requests import (
    Trusted,
    approval_request,
    check_start_input,
    events_request,
    health_request,
    start_request,
    status_request,
    stop_request,
)
from tests.faults.http_peer import Connection, Script, answer, http_peer, replying

pytestmark = pytest.mark.anyio

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
    """The exchange of one mutation with a scripted peer; the endpoint answers the next call as if nothing was."""
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


# -- nothing left: not sent ---------------------------------------------------------------------------------------


async def not_sent(origin: str, out: Outgoing = START, tls: ssl.SSLContext | None = None) -> Failure:
    hermes = endpoint(origin, tls=tls)
    try:
        seen = await hermes.send(out)
    finally:
        await hermes.close()
    assert (seen.sent, seen.status) == (False, None)
    assert judge_start(seen).verdict is Verdict.NOT_SENT
    return seen.failure


@pytest.mark.proves("A156")
async def test_a_refused_connection_proves_that_nothing_was_sent() -> None:
    assert await not_sent(f"http://127.0.0.1:{closed_port()}") is Failure.CONNECT_REFUSED


async def test_a_name_that_does_not_resolve_proves_that_nothing_was_sent() -> None:
    assert await not_sent("https://does-not-exist.invalid") is Failure.DNS


def certificate(directory: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "peer")])
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (directory / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (directory / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    return server


async def test_a_certificate_that_nobody_vouches_for_proves_that_nothing_was_sent(tmp_path: Path) -> None:
    async with http_peer(replying(ACCEPTED), tls=certificate(tmp_path)) as peer:
        assert await not_sent(peer.origin) is Failure.TLS
    trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    async with http_peer(replying(ACCEPTED), tls=certificate(tmp_path)) as peer:
        assert await not_sent(peer.origin, tls=trusting) is Failure.TLS  # another key than the trusted one


async def test_an_answer_over_tls_from_a_known_peer_is_accepted(tmp_path: Path) -> None:
    server = certificate(tmp_path)
    async with http_peer(replying(ACCEPTED), tls=server) as peer:
        hermes = endpoint(peer.origin, tls=ssl.create_default_context(cafile=str(tmp_path / "cert.pem")))
        seen = await hermes.send(START)
        await hermes.close()
    assert judge_start(seen).run_id == "run_1"


async def test_a_handshake_that_never_ends_is_not_sent() -> None:
    async with http_peer(lambda connection: connection.wait_closed()) as peer:
        origin = peer.origin.replace("http:", "https:")
        assert await not_sent(origin) is Failure.CONNECT_TIMEOUT
        assert await not_sent(origin, quick(START, 100)) is Failure.TIMEOUT


async def test_a_full_endpoint_gives_up_waiting_without_sending_and_keeps_its_places() -> None:
    released = anyio.Event()

    async def script(connection: Connection) -> None:
        await connection.read_request()
        await released.wait()
        await connection.send(ACCEPTED)

    async with http_peer(script) as peer:
        hermes = endpoint(peer.origin, HermesLimits(mutations=2, reads=1, streams=1))
        seen: list[Exchange] = []

        async def send(out: Outgoing) -> None:
            seen.append(await hermes.send(out))

        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(send, START)
            await peer.until(lambda: len(peer.heard) == 2)
            async with anyio.create_task_group() as waiting:
                for _ in range(8):
                    waiting.start_soon(send, quick(START, 50))
            assert [(one.sent, one.failure) for one in seen] == [(False, Failure.POOL_TIMEOUT)] * 8
            released.set()
        again = [await hermes.send(START) for _ in range(4)]
        await hermes.close()
    assert all(judge_start(one).verdict is Verdict.ACCEPTED for one in [*seen[8:], *again])
    assert len(peer.heard) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"headers": (("X-A", "b\r\nX-C: d"),)},
        {"headers": (("X-A", ""),)},
        {"headers": (("X-A", "\u00e4"),)},
        {"headers": (("X-A", "b" * 20_000),)},
        {"headers": (("X A", "b"),)},
        {"headers": (("authorization", "Bearer other"),)},
        {"headers": (("Origin", "http://x"),)},
        {"headers": (("Host", "elsewhere"),)},
        {"headers": (("Content-Length", "1"),)},
        {"headers": (("Transfer-Encoding", "chunked"),)},
        {"headers": (("Cookie", "a=b"),)},
        {"path": "/v1/runs HTTP/1.1\r\nX: y"},
        {"path": "/v1/runs/../x"},
        {"path": "http://elsewhere/"},
        {"path": "//elsewhere"},
        {"path": "/v1/runs?x=1"},
        {"path": "/v1/runs/\u00e4"},
        {"path": ""},
        {"method": "DELETE"},
    ],
)
async def test_a_request_that_may_not_leave_is_refused_before_connecting(change: dict[str, object]) -> None:
    async with http_peer(replying(ACCEPTED)) as peer:
        hermes = endpoint(peer.origin)
        seen = await hermes.send(msgspec.structs.replace(START, **change))
        items = [item async for item in hermes.stream(msgspec.structs.replace(START, **change))]
        await hermes.close()
    assert (seen.sent, seen.failure) == (False, Failure.BAD_REQUEST)
    assert items == [StreamEnd(reason="not_connected", exchange=seen)]
    assert peer.heard == []


async def test_without_a_key_no_protected_route_is_asked() -> None:
    async with http_peer(replying(answer("200 OK", b"{}"))) as peer:
        hermes = HermesEndpoint(Target(endpoint_id="one", origin=peer.origin), None)
        assert (await hermes.send(START)).failure is Failure.BAD_REQUEST
        assert (await hermes.read(health_request())).status == 200
        await hermes.close()
    assert len(peer.heard) == 1
    assert b"authorization" not in bytes(peer.heard[0]).lower()


async def test_a_send_that_is_cancelled_while_connecting_leaves_no_connection_and_no_lost_place() -> None:
    async with http_peer(lambda connection: connection.wait_closed()) as peer:
        hermes = endpoint(peer.origin.replace("http:", "https:"), HermesLimits(mutations=1, reads=1, streams=1))
        for _ in range(5):
            with anyio.move_on_after(0.02) as scope:
                await hermes.send(START)
            assert scope.cancelled_caught
        await peer.until(lambda: not peer.open)
        await hermes.close()
    async with http_peer(replying(ACCEPTED)) as peer:
        hermes = endpoint(peer.origin, HermesLimits(mutations=1, reads=1, streams=1))
        assert judge_start(await hermes.send(START)).verdict is Verdict.ACCEPTED
        await hermes.close()


# -- a byte may have left: ambiguous ------------------------------------------------------------------------------


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


@pytest.mark.proves("A156")
@pytest.mark.parametrize(("script", "failures"), BROKEN)
async def test_an_exchange_that_breaks_after_the_mark_is_ambiguous(script: Script, failures: set[Failure]) -> None:
    seen = await sent_to(script, quick(START))
    assert seen.failure in failures
    assert seen.sent
    assert len(seen.body) <= SMALL.body
    assert judge_start(seen).verdict is Verdict.AMBIGUOUS


async def test_a_cancelled_send_propagates_and_closes_its_connection() -> None:
    async with http_peer(silent) as peer:
        hermes = endpoint(peer.origin)
        async with anyio.create_task_group() as group:
            group.start_soon(hermes.send, START)
            await peer.until(lambda: bool(peer.heard) and b"\r\n\r\n" in peer.heard[0])
            group.cancel_scope.cancel()
        await peer.until(lambda: not peer.open)
        await hermes.close()
    assert len(peer.heard) == 1


COMPLETE = [
    ("202 Accepted", b"[1]", Verdict.AMBIGUOUS),
    ("202 Accepted", b"", Verdict.AMBIGUOUS),
    ("202 Accepted", b"<html>welcome</html>", Verdict.AMBIGUOUS),
    ("202 Accepted", b'{"status": "started"}', Verdict.AMBIGUOUS),
    ("202 Accepted", b'{"run_id": "a\\nb"}', Verdict.AMBIGUOUS),
    ("202 Accepted", b'{"a":' * 15_000 + b"1" + b"}" * 10, Verdict.AMBIGUOUS),
    ("202 Accepted", b"[" * 90_000, Verdict.AMBIGUOUS),
    ("200 OK", b'{"run_id": "run_1"}', Verdict.AMBIGUOUS),
    ("204 No Content", b"", Verdict.AMBIGUOUS),
    ("400 Bad Request", b"<html>bad</html>", Verdict.AMBIGUOUS),
    ("404 Not Found", b"404: Not Found", Verdict.AMBIGUOUS),
    ("500 Internal Server Error", b'{"error": {"message": "x", "code": null}}', Verdict.AMBIGUOUS),
    ("502 Bad Gateway", b"<html>", Verdict.AMBIGUOUS),
    ("503 Service Unavailable", b'{"error": {"message": "x", "code": "other"}}', Verdict.AMBIGUOUS),
    ("503 Service Unavailable", b'{"error": {"message": "x", "code": "gateway_draining"}}', Verdict.REFUSED),
    ("401 Unauthorized", b'{"error": {"message": "Invalid API key", "code": "invalid_api_key"}}', Verdict.REFUSED),
    ("413 Too Large", b'{"error": {"message": "x", "code": "body_too_large"}}', Verdict.REFUSED),
    ("202 Accepted", b'{"run_id": "run_1", "status": "started"}', Verdict.ACCEPTED),
]


@pytest.mark.proves("A043", "A156", "A158")
@pytest.mark.parametrize(("status", "body", "verdict"), COMPLETE)
async def test_a_complete_answer_is_accepted_or_refused_by_its_words_alone(
    status: str, body: bytes, verdict: Verdict
) -> None:
    seen = await sent_to(replying(answer(status, body)))
    assert (seen.sent, seen.failure, seen.status, seen.body) == (True, Failure.NONE, int(status[:3]), body)
    assert judge_start(seen).verdict is verdict


async def test_a_chunked_answer_is_complete() -> None:
    head = b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n"
    seen = await sent_to(replying(head + chunk(b'{"run_id":') + chunk(b'"run_1"}') + b"0\r\n\r\n"))
    assert judge_start(seen).run_id == "run_1"


async def test_an_early_refusal_of_a_large_body_is_told() -> None:
    async def script(connection: Connection) -> None:
        await connection.read_head()
        await connection.send(answer("413 Too Large", b'{"error": {"message": "x", "code": "body_too_large"}}'))
        await connection.read_request()

    out = start_request(b'"' + b"x" * 3_000_000 + b'"', session_key=None, trusted=TRUSTED)
    seen = await sent_to(script, quick(out, 10_000))
    assert (judge_start(seen).verdict, seen.status) == (Verdict.REFUSED, 413)


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_a_redirect_is_told_and_never_followed(status: str) -> None:
    async with http_peer(replying(ACCEPTED)) as elsewhere:
        location = f"{elsewhere.origin}/latest/meta-data"
        seen = await sent_to(replying(answer(status, b"", f"Location: {location}")))
        judged = judge_start(seen)
        assert (seen.location, judged.verdict) == (location, Verdict.AMBIGUOUS)
        assert judged.code == "connector.hermes_agent.redirected"
        assert elsewhere.heard == []


async def test_retry_after_is_carried() -> None:
    body = b'{"error": {"message": "Too many", "code": "rate_limit_exceeded"}}'
    judged = judge_start(await sent_to(replying(answer("429 Too Many Requests", body, "Retry-After: 7"))))
    assert (judged.verdict, judged.retry_after_ms) == (Verdict.REFUSED, 7_000)


# -- what leaves --------------------------------------------------------------------------------------------------


@pytest.mark.proves("A010", "A053", "A147")
async def test_a_mutation_leaves_as_one_request_with_a_length_and_the_endpoints_own_key() -> None:
    async with http_peer(replying(ACCEPTED)) as peer:
        hermes = endpoint(peer.origin)
        await hermes.send(START)
        await hermes.send(stop_request("a/../b %2f", TRUSTED))
        await hermes.close()
    first, second = (bytes(heard) for heard in peer.heard)
    head, _, body = first.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
    assert lines[0] == b"POST /v1/runs HTTP/1.1"
    assert body == b'{"input":"hi"}'
    assert headers[b"content-length"] == b"14"
    assert headers[b"authorization"] == f"bearer {CANARY}".encode()
    assert headers[b"host"] == peer.origin.removeprefix("http://").encode()
    assert (headers[b"accept-encoding"], headers[b"user-agent"]) == (b"identity", b"hermes-reconciler/0")
    assert (headers[b"x-aip-principal-id"], headers[b"idempotency-key"]) == (b"user:ada", b"k1")
    assert not {b"origin", b"cookie", b"transfer-encoding"} & set(headers)
    assert second.startswith(b"POST /v1/runs/a%2F..%2Fb%20%252f/stop HTTP/1.1\r\n")
    assert b"content-length: 0\r\n" in second.lower()
    assert second.endswith(b"\r\n\r\n")


async def test_cookies_proxies_and_netrc_of_the_surroundings_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login someone password something\n")
    async with (
        http_peer(replying(ACCEPTED)) as proxy,
        http_peer(replying(answer("200 OK", b"{}", "Set-Cookie: a=b; Path=/"))) as peer,
    ):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.origin)
        monkeypatch.setenv("NETRC", str(netrc))
        hermes = endpoint(peer.origin)
        for _ in range(2):
            await hermes.read(health_request())
        await hermes.close()
        assert proxy.heard == []
    assert not any(word in bytes(heard).lower() for heard in peer.heard for word in (b"cookie", b"authorization"))


async def test_surplus_bytes_of_one_answer_never_reach_another_call() -> None:
    poison = answer("200 OK", b'{"run_id": "run_1", "status": "completed"}')

    async def script(connection: Connection) -> None:
        await connection.read_request()
        await connection.send(answer("200 OK", b'{"object": "own"}', "Connection: keep-alive") + poison)
        await connection.wait_closed()

    async with http_peer(script) as peer:
        hermes = endpoint(peer.origin)
        bodies = []
        for _ in range(20):
            bodies.append((await hermes.read(status_request("run_1", TRUSTED))).body)
            bodies.append((await hermes.send(START)).body)
        await hermes.close()
    assert bodies == [b'{"object": "own"}'] * 40
    assert len(peer.heard) == 40


# -- the key ------------------------------------------------------------------------------------------------------


async def test_the_key_shows_in_no_representation_no_encoding_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = BearerKey(CANARY)
    for encode in (msgspec.json.encode, msgspec.msgpack.encode, json.dumps, pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError) as refused:
            encode(key)
        assert CANARY not in str(refused.value)
    seen = [await sent_to(script, quick(START, 100)) for script, _ in BROKEN[:8]]
    shown = [repr(key), str(key), f"{key}", repr(vars(endpoint("http://127.0.0.1:1"))), repr(seen), caplog.text]
    assert CANARY not in "".join(shown)
    assert key.reveal() == CANARY


@pytest.mark.parametrize("value", ["", " ", "a b", "a\n", "\u00e4", "a\x7f", "x" * (16 * 1024 + 1)])
def test_a_key_that_cannot_be_a_header_is_refused_without_being_shown(value: str) -> None:
    with pytest.raises(HostError) as refused:
        BearerKey(value)
    assert refused.value.code == "settings.invalid"
    assert not value.strip() or value not in str(refused.value)


@pytest.mark.parametrize(
    ("origin", "normal"),
    [
        ("https://hermes.example", "https://hermes.example"),
        ("https://Hermes.Example:8443/", "https://hermes.example:8443"),
        ("http://127.0.0.1:8642", "http://127.0.0.1:8642"),
        ("http://[::1]:8642", "http://[::1]:8642"),
        ("http://localhost", "http://localhost"),
    ],
)
def test_an_origin_has_one_normal_form(origin: str, normal: str) -> None:
    assert check_origin(origin) == normal
    assert check_origin(normal) == normal


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "hermes.example",
        "ftp://hermes.example",
        "file:///etc/passwd",
        "https://",
        "https://user:secret@hermes.example",
        "https://@hermes.example",
        "https://hermes.example/v1",
        "https://hermes.example?x=1",
        "https://hermes.example/?",
        "https://hermes.example#f",
        "https://hermes.example:99999",
        "https://hermes.example:0",
        "https://hermes.example:x",
        "https://hermes.example\\@other.example",
        "https://her mes.example",
        "https://hermes.example\r\nX: y",
        "https://hermes%2eexample",
        "https://h\u00e9rmes.example",
        "http://hermes.example",
        "http://169.254.169.254",
        "http://127.0.0.1.example",
        "http://0.0.0.0",
        "http://[::ffff:169.254.169.254]",
    ],
)
def test_what_is_no_safe_origin_is_refused(origin: str) -> None:
    with pytest.raises(HostError) as refused:
        check_origin(origin)
    assert refused.value.code == "settings.invalid"
    assert "secret" not in str(refused.value)


def test_plain_http_off_this_machine_is_possible_on_demand_only() -> None:
    assert check_origin("http://hermes.internal:80", allow_http=True) == "http://hermes.internal:80"


# -- streams ------------------------------------------------------------------------------------------------------


@pytest.mark.proves("A075", "A084", "A085")
async def test_a_stream_gives_its_opening_its_frames_its_comments_and_one_end() -> None:
    body = [b": keepalive\n\n", b"id: 0\nda", b'ta: {"event": "run.completed"}\n\n', b": stream closed\n\n"]
    items = await streamed(replying(SSE_HEAD + b"".join(chunk(part) for part in body) + b"0\r\n\r\n"))
    assert items == [
        StreamOpened(),
        Comment("keepalive"),
        RawFrame(raw=b'id: 0\ndata: {"event": "run.completed"}\n\n', id="0", data='{"event": "run.completed"}'),
        Comment("stream closed"),
        StreamEnd(reason="closed"),
    ]


async def sse_silent(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(SSE_HEAD + chunk(b"data: 1\n\n"))
    await connection.wait_closed()


async def sse_endless_line(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(SSE_HEAD)
    while True:
        await connection.send(chunk(b"x" * 1_000))


async def sse_endless_frame(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(SSE_HEAD)
    while True:
        await connection.send(chunk(b"data: x\n" * 100))


async def sse_endless_comments(connection: Connection) -> None:
    await connection.read_request()
    await connection.send(SSE_HEAD)
    while True:
        await connection.send(chunk(b": x\n\n" * 100))


@pytest.mark.proves("A090", "A157")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (half(SSE_HEAD + chunk(b"data: 1\n\n")), "cut"),
        (replying(SSE_HEAD + chunk(b"data: 1\n\n")), "cut"),
        (replying(SSE_HEAD + chunk(b"data: 1\n\ndata: 2\n") + b"0\r\n\r\n"), "cut"),
        (replying(SSE_HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n"), "closed"),
        (replying(SSE_HEAD + chunk(b"data: 1\n\n") + b"nonsense\r\n"), "cut"),
        (sse_silent, "idle"),
    ],
)
async def test_a_stream_that_ends_early_keeps_its_whole_frames_and_names_its_end(script: Script, reason: str) -> None:
    items = await streamed(script, idle_s=0.3)
    assert [item.data for item in items if isinstance(item, RawFrame)] == ["1"]
    assert items[-1] == StreamEnd(reason=reason)
    assert sum(isinstance(item, StreamEnd) for item in items) == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (sse_endless_line, "line_too_large"),
        (sse_endless_frame, "frame_too_large"),
        (sse_endless_comments, "stream_too_large"),
    ],
)
async def test_an_endless_stream_is_bounded(script: Script, reason: str) -> None:
    assert (await streamed(script))[-1] == StreamEnd(reason=reason)


@pytest.mark.proves("A022")
async def test_a_stream_outlives_the_deadline_of_its_opening_as_long_as_bytes_come() -> None:
    async def script(connection: Connection) -> None:
        await connection.read_request()
        await connection.send(SSE_HEAD)
        for _ in range(6):
            await anyio.sleep(0.1)
            await connection.send(chunk(b": keepalive\n\n"))
        await connection.send(b"0\r\n\r\n")

    async with http_peer(script) as peer:
        hermes = endpoint(peer.origin)
        items = [item async for item in hermes.stream(quick(events_request("run_1", None, TRUSTED), 200), idle_s=5)]
        await hermes.close()
    assert items == [StreamOpened(), *[Comment("keepalive")] * 6, StreamEnd(reason="closed")]


@pytest.mark.parametrize(
    "data",
    [
        answer("404 Not Found", b'{"error": {"message": "Run not found", "code": "run_not_found"}}'),
        answer("200 OK", b"{}"),
        answer("200 OK", b"<html>", content_type="text/html"),
        answer("200 OK", b"data: 1\n\n", "Content-Encoding: gzip", content_type="text/event-stream"),
        answer("302 Found", b"", "Location: http://elsewhere/", content_type="text/event-stream"),
    ],
)
async def test_an_answer_that_is_no_event_stream_is_a_refusal_with_its_exchange(data: bytes) -> None:
    (end,) = await streamed(replying(data))
    assert isinstance(end, StreamEnd)
    assert end.reason == "refused"
    assert end.exchange is not None
    assert end.exchange.status == int(data[9:12])


@pytest.mark.parametrize("script", [close_after_request, reset_after_request, half(b"HTTP/1.1 200")])
async def test_a_stream_that_never_opened_says_so(script: Script) -> None:
    (end,) = await streamed(script)
    assert isinstance(end, StreamEnd)
    assert end.reason == "not_connected"
    assert end.exchange is not None
    assert end.exchange.failure is Failure.READ_ERROR


async def test_a_reader_that_leaves_closes_the_connection_and_frees_its_place() -> None:
    async with http_peer(sse_silent) as peer:
        hermes = endpoint(peer.origin, HermesLimits(mutations=1, reads=1, streams=1))
        for _ in range(3):
            async with aclosing(hermes.stream(events_request("run_1", None, TRUSTED))) as items:
                assert isinstance(await anext(items), StreamOpened)
            with anyio.move_on_after(0.05):
                async with aclosing(hermes.stream(events_request("run_1", None, TRUSTED))) as items:
                    async for _ in items:
                        pass
        await peer.until(lambda: not peer.open)
        await hermes.close()
    assert len(peer.heard) == 6


# -- many hostile answers -----------------------------------------------------------------------------------------


def hostile(chance: random.Random) -> bytes:
    """One answer with something wrong in it, from a plausible one."""
    data = bytearray(
        chance.choice(
            [
                ACCEPTED,
                answer("200 OK", b'{"error": "\\u0000"}'),
                answer("404 Not Found", b"x"),
                SSE_HEAD + chunk(b'data: {"event": "run.completed"}\n\n') + b"0\r\n\r\n",
            ]
        )
    )
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[place] = chance.randrange(256)
            case 1:
                del data[place : place + chance.randint(1, 20)]
            case 2:
                data[place:place] = chance.randbytes(chance.randint(1, 30))
            case _:
                data[place:place] = data[: chance.randint(1, len(data))]
        data = data or bytearray(b"x")
    return bytes(data)


async def test_no_malformed_answer_raises_or_counts_as_something_else() -> None:
    chance = random.Random(20)
    answers = [hostile(chance) for _ in range(300)]
    left = list(answers)

    async def script(connection: Connection) -> None:
        await connection.read_request()
        await connection.send(left.pop())

    events = quick(events_request("run_1", None, TRUSTED), 2_000)
    async with http_peer(script) as peer:
        hermes = endpoint(peer.origin)
        for number in range(len(answers)):
            if number % 2:
                items = [item async for item in hermes.stream(events, idle_s=2)]
                assert isinstance(items[-1], StreamEnd)
            else:
                seen = await hermes.send(quick(START, 2_000))
                assert seen.sent
                assert seen.complete or judge_start(seen).verdict is Verdict.AMBIGUOUS
        await hermes.close()
    assert left == []


async def test_memory_stays_near_the_bound_whatever_is_sent() -> None:
    tracemalloc.start()
    try:
        for script in (endless_body, endless_headers, endless_provisional):
            await sent_to(script, quick(START))
        for script in (sse_endless_line, sse_endless_frame, sse_endless_comments):
            await streamed(script)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 1024 * 1024


# -- a provider that works ----------------------------------------------------------------------------------------


@pytest.mark.proves("A013", "A043", "A097", "A102", "A111", "A162")
async def test_the_five_operations_work_with_the_practice_provider() -> None:
    with PracticeHermes() as practice:
        hermes = HermesEndpoint(Target(endpoint_id="one", origin=practice.base_url), BearerKey(practice.key))
        body = check_start_input({"input": "ASK rm -rf /tmp/x\nTEXT done"}, default_session_id="own-1")
        started = judge_start(await hermes.send(start_request(body.content, session_key=None, trusted=TRUSTED)))
        run_id = started.run_id
        names = []
        async with aclosing(hermes.stream(events_request(run_id, None, TRUSTED))) as items:
            async for item in items:
                event = (parse_object(item.data.encode()) or {}) if isinstance(item, RawFrame) else {}
                names.append(event.get("event", type(item).__name__))
                if names[-1] == "approval.request":
                    approved = await hermes.send(approval_request(run_id, "once", False, None, TRUSTED))
        status = read_status(await hermes.read(status_request(run_id, TRUSTED)), run_id)

        second = check_start_input({"input": "SLEEP 30\nTEXT never"})
        other = judge_start(await hermes.send(start_request(second.content, session_key=None, trusted=TRUSTED)))
        stopped = judge_stop(await hermes.send(stop_request(other.run_id, TRUSTED)), other.run_id)
        await hermes.close()
    judged = judge_approval(approved, run_id)
    assert (started.verdict, started.state) == (Verdict.ACCEPTED, "started")
    assert (judged.verdict, judged.choice, judged.resolved) == (Verdict.ACCEPTED, "once", 1)
    assert (status.state, status.session_id) == ("completed", "own-1")
    assert names[0] == "StreamOpened"
    assert names[-3:] == ["run.completed", "Comment", "StreamEnd"]
    assert (stopped.verdict, stopped.state) == (Verdict.ACCEPTED, "stopping")
