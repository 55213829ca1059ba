"""The listener on a real socket: its port, its deadlines, its words, and its end."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import SocketStream
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from adapters import http_server
from adapters.clock import SystemClock
from adapters.http_server import PatientProtocol, bind, serve
from tests.http.stand import CANARY, Stand

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def served(host: Stand, tls: tuple[Path, Path] | None = None) -> AsyncIterator[int]:
    """The public application on an ephemeral port."""
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(serve, host.app, "127.0.0.1", 0, tls)
        try:
            yield port
        finally:
            tasks.cancel_scope.cancel()


async def answered(stream: SocketStream, seconds: float = 5) -> bytes:
    """What comes until the other side closes."""
    whole = b""
    with anyio.move_on_after(seconds):
        try:
            while True:
                whole += await stream.receive()
        except anyio.EndOfStream:
            return whole
    raise AssertionError(f"not closed after {whole!r}")


async def test_requests_and_feeds_pass_over_a_real_socket(host: Stand) -> None:
    async with served(host) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        headers = {"Authorization": "Bearer ada", "Idempotency-Key": "k"}
        body = {"capability_id": "cap:hermes_agent:main:run_start", "input": {"input": CANARY}}
        answer = await client.post("/aip/v1/actions", json=body, headers=headers)
        assert answer.status_code == 200
        assert "server" not in answer.headers
        action_id = answer.json()["action_result"]["action_id"]
        async with client.stream("GET", f"/aip/v1/actions/{action_id}/events?follow=true", headers=headers) as feed:
            text = "".join([part async for part in feed.aiter_text()])
        assert text.endswith(f'data: {{"terminal":true,"action_id":"{action_id}"}}\n\n')
        large = await client.post("/aip/v1/actions", content=b"x" * (12 * 2**20), headers=headers)
        assert large.json()["error"]["code"] == "request.too_large"


async def test_cancelling_ends_feeds_in_good_order_and_at_once(host: Stand, caplog: pytest.LogCaptureFixture) -> None:
    clock = SystemClock()
    host.provider.hold = anyio.Event()
    action_id = (await host.submit(mode="async")).json()["ack"]["action_id"]
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(serve, host.app, "127.0.0.1", 0)
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            target = f"/aip/v1/actions/{action_id}/events?follow=true"
            await stream.send(f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ada\r\n\r\n".encode())
            assert b"200 OK" in await stream.receive()
            began = clock.monotonic()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                rest = await answered(stream)
    assert rest.endswith(b"0\r\n\r\n")
    assert clock.monotonic() - began < http_server.GRACE_S
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    with pytest.raises(OSError, match="connect"):
        await anyio.connect_tcp("127.0.0.1", port)
    host.provider.hold.set()


async def test_an_address_that_is_taken_is_an_error_and_not_another_port() -> None:
    taken = bind("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])
    taken.close()


async def test_what_is_not_http_is_refused_in_the_one_shape(host: Stand) -> None:
    async with served(host) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = (await answered(stream)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "request.malformed"


async def sent_for_ever(stream: SocketStream) -> None:
    """Bytes without end."""
    while True:
        await stream.send(b"x" * 1000)
        await anyio.sleep(0.01)


class Impatient(PatientProtocol):
    """The same protocol with a deadline that a test can wait for."""

    head_s = 0.1


@pytest.mark.parametrize("sent", [b"", b"GET /aip/v1/man", b"GET / HTTP/1.1\r\nHost: x\r\nX-"])
async def test_a_head_that_does_not_come_in_time_ends_the_connection(host: Stand, sent: bytes) -> None:
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(serve, host.app, "127.0.0.1", 0, None, Impatient)
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            if sent:
                await stream.send(sent)
            answer = await answered(stream)
        assert answer.startswith(b"HTTP/1.1 408 ")
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET /aip/v1/manifest HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ada\r\n\r\n")
            first = await stream.receive()
            assert b"200 OK" in first
        tasks.cancel_scope.cancel()


async def test_a_body_that_never_ends_is_dropped_only_for_a_while_after_its_answer(host: Stand) -> None:
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(serve, host.app, "127.0.0.1", 0, None, Impatient)
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"POST /aip/v1/actions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
            assert b" 401 " in await stream.receive()
            with pytest.raises(anyio.BrokenResourceError), anyio.fail_after(5):
                await sent_for_ever(stream)
        tasks.cancel_scope.cancel()


async def test_tls_serves_the_same(host: Stand, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = SystemClock().now()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now.replace(year=now.year - 1))
        .not_valid_after(now.replace(year=now.year + 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.create_default_context(cafile=str(cert_file))
    async with (
        served(host, (cert_file, key_file)) as port,
        httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=context, trust_env=False) as client,
    ):
        answer = await client.get("/aip/v1/manifest", headers={"Authorization": "Bearer ada"})
    assert answer.status_code == 200
