"""What each broken or hostile answer to a mutation is told as: the sent mark, the failure, and what it proves."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

import anyio
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from adapters.hermes import HermesEndpoint, HermesLimits
from domain.events import Target
from domain.provider import (
    Exchange,
    Failure,
    Outgoing,
    StreamEnd,
    Verdict,
    judge_start,
)
from domain.requests import (
    health_request,
    start_request,
)
from tests.contract.hermes_calls import (
    ACCEPTED,
    BROKEN,
    SMALL,
    START,
    TRUSTED,
    chunk,
    closed_port,
    endpoint,
    quick,
    sent_to,
    silent,
)
from tests.faults.http_peer import Connection, Script, answer, http_peer, replying

pytestmark = pytest.mark.anyio

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
