"""What leaves for an endpoint: one request with a length, its own key, and nothing from the surroundings."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path

import msgspec
import pytest

from adapters.hermes import BearerKey, check_origin
from domain.errors import HostError
from domain.requests import (
    health_request,
    status_request,
    stop_request,
)
from tests.contract.hermes_calls import (
    ACCEPTED,
    BROKEN,
    CANARY,
    START,
    TRUSTED,
    endpoint,
    quick,
    sent_to,
)
from tests.faults.http_peer import Connection, answer, http_peer, replying

pytestmark = pytest.mark.anyio


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
