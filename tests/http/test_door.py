"""What the door refuses before any handler is asked, and in which words."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from adapters import http_wire
from adapters.http import PublicApp
from adapters.http_ports import HttpPorts
from adapters.http_route import Answer, Call, Route
from adapters.http_routes import ROUTES
from domain.errors import TABLE, CallerError, HostError, NotNow
from domain.events import RequestRefused
from tests.http.stand import CANARY, START, STOP, Stand

pytestmark = pytest.mark.anyio


def code(answer: Any) -> tuple[int, str]:
    """Status and code of a refusal, after a look at its shape."""
    error = answer.json()["error"]
    assert set(error) >= {"code", "message", "category", "retryable", "effect"}
    assert answer.status_code == TABLE[error["code"]].status
    return answer.status_code, error["code"]


async def test_unknown_routes_and_methods_answer_in_the_one_shape(host: Stand) -> None:
    assert code(await host.get("/nothing")) == (404, "request.route_not_found")
    assert code(await host.get("/aip/v1/actions/")) == (404, "request.route_not_found")
    assert code(await host.get("/aip/v1/actions/%ff")) == (404, "request.route_not_found")
    wrong = await host.call("DELETE", "/aip/v1/actions")
    assert code(wrong) == (405, "request.method_not_allowed")
    assert wrong.headers["allow"] == "GET, POST"


@pytest.mark.proves("B025")
async def test_operational_routes_are_absent_on_the_public_listener(host: Stand) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert code(await host.get(path)) == (404, "request.route_not_found")


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer nobody", "Basic ada", "ada", "Bearer  "])
async def test_without_a_valid_token_nothing_is_answered(host: Stand, header: str) -> None:
    headers = {"Authorization": header} if header else {}
    answer = await host.client.get("/aip/v1/actions", headers=headers)
    assert code(answer) == (401, "auth.unverified_actor")
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_principal_without_the_scope_is_refused_on_every_route_that_needs_one(host: Stand) -> None:
    for route in ROUTES:
        path = route.path.replace("{action_id}", "a").replace("{approval_id}", "appr_a")
        path = path.replace("{run_id}", "r").replace("{delivery_id}", "d")
        answer = await host.call(route.method, path, "weak", json={} if route.body else None)
        expected = (403, "auth.not_authorized") if route.scopes else (200, None)
        assert (answer.status_code, answer.json().get("error", {}).get("code")) == expected, path


# ---- bodies ----------------------------------------------------------------------------------------------------------

BROKEN = {
    "empty": b"",
    "not json": b"{",
    "not an object": b"[1]",
    "text": b'"x"',
    "not utf-8": b'{"capability_id":"\xff"}',
    "utf-16": '{"capability_id":"x"}'.encode("utf-16"),
    "nan": b'{"input":{"x":NaN}}',
    "infinity": b'{"input":{"x":-Infinity}}',
    "overflowing number": b'{"input":{"x":1e999}}',
    "endless integer": b'{"input":{"x":' + b"9" * 5000 + b"}}",
    "repeated name": b'{"mode":"sync","mode":"async"}',
    "repeated name inside": b'{"input":{"a":1,"a":2}}',
    "deep": b'{"input":' + b"[" * 100 + b"]" * 100 + b"}",
    "very deep": b"[" * 200_000,
    "half a pair": b'{"input":{"x":"\\ud800"}}',
    "nul outside the input": b'{"reason":"\\u0000"}',
    "trailing": b"{} {}",
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_body_that_is_no_plain_json_object_is_malformed(host: Stand, kind: str) -> None:
    answer = await host.call("POST", "/aip/v1/actions", content=BROKEN[kind])
    assert code(answer) == (400, "request.malformed")
    assert answer.json()["error"]["details"]["problem"]
    assert host.provider.sent == []


@pytest.mark.parametrize(
    "members",
    [
        {"surprise": 1},
        {"mode": "later"},
        {"mode": f"{CANARY}"},
        {"input": "text"},
        {"input": None},
        {"capability_id": 7},
        {"timeout_ms": "soon"},
        {"timeout_ms": 1.5},
        {"idempotency_key": 1},
        {"callback": "x"},
    ],
)
async def test_members_of_wrong_name_or_type_are_refused_without_their_value(
    host: Stand, members: dict[str, Any]
) -> None:
    answer = await host.submit(**members)
    assert code(answer) == (400, "request.invalid")
    assert answer.json()["error"]["details"]["path"].startswith("$")
    assert CANARY not in answer.text


async def test_unknown_members_pass_inside_input_metadata_and_memory_context(host: Stand) -> None:
    more = {"metadata": {"a": {"b": 1}}, "memory_context": {"x": [1]}, "input": {"input": "x", "odd": {"y": 1}}}
    assert (await host.submit(**more)).status_code == 200


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_no_bytes_make_the_reader_fail_in_another_way(body: bytes) -> None:
    refused = ""
    try:
        json.dumps(http_wire.read_object(body), ensure_ascii=False).encode()
    except CallerError as error:
        refused = error.code
    assert refused in ("", "request.malformed")


async def test_a_body_may_be_as_large_as_its_route_takes(host: Stand) -> None:
    large = await host.submit(input={"input": "x" * 9_900_000})
    assert large.status_code == 200
    too_large = await host.submit(input={"input": "x" * 11_600_000})
    assert code(too_large) == (413, "request.too_large")
    over = await host.submit(input={"input": "x" * 10_100_000})
    assert code(over) == (413, "request.too_large")
    small = await host.call("POST", "/aip/v1/actions/a/cancel", content=b" " * (4 * 2**20 + 1))
    assert code(small) == (413, "request.too_large")


async def test_a_chunked_body_is_bounded_while_it_is_read(host: Stand) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 65536

    answer = await host.call("POST", "/aip/v1/actions/a/cancel", content=endless())
    assert code(answer) == (413, "request.too_large")
    assert sent < 80


async def test_a_body_that_does_not_come_in_time_is_given_up() -> None:
    async def receive() -> Any:
        await anyio.sleep_forever()

    request = Request({"type": "http", "method": "POST", "headers": [], "path": "/"}, receive)
    with pytest.raises(CallerError) as refused:
        await http_wire.read_body(request, 100, seconds=0.02)
    assert refused.value.code == "request.timeout"


# ---- queries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=1001", "limit=x", "limit=1&limit=2", "limit=-1", "limit=1.5", "unknown=1", "since=yesterday",
        "since=2026-01-01T00:00:00", "state=%00", "state=%ff", "state=" + "x" * 600, "x" * 17_000,
    ],
)  # fmt: skip
async def test_a_wrong_query_is_refused(host: Stand, query: str) -> None:
    assert code(await host.get(f"/aip/v1/actions?{query}")) == (400, "request.invalid")


@pytest.mark.parametrize(
    "cursor",
    ["x", "aev_cursor_0_none_0_" + "0" * 24, "run_1", "chunk:3", "42", "offset:10", "list_cursor_MQ_" + "0" * 24],
)
@pytest.mark.parametrize("path", ["/aip/v1/actions", "/aip/v1/approvals", "/aip/v1/audit/events", "/views/runs",
                                  "/views/needs-person", "/aip/v1/callback-deliveries"])  # fmt: skip
async def test_what_is_no_cursor_of_this_list_is_refused(host: Stand, path: str, cursor: str) -> None:
    assert code(await host.get(path, cursor=cursor)) == (400, "query.invalid_cursor")


# ---- faults, counts and the audit ------------------------------------------------------------------------------------


def faulty(host: Stand, fault: Exception) -> PublicApp:
    """The door before a route whose handler meets a fault."""

    async def fails(ports: HttpPorts, call: Call) -> Answer:
        raise fault

    return PublicApp(
        host.ports, (Route(method="GET", path="/fails", summary="x", handler=fails, answers={200: dict}, counted=True),)
    )


async def test_an_unforeseen_fault_tells_a_trace_id_and_nothing_else(
    host: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    app = faulty(host, ValueError(CANARY))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host.test") as client:
        answer = await client.get("/fails", headers={"Authorization": "Bearer ada"})
    assert code(answer) == (500, "internal.fault")
    trace_id = answer.json()["error"]["details"]["trace_id"]
    assert trace_id.startswith("trace_")
    assert CANARY not in answer.text
    (line,) = [record for record in caplog.records if record.message == "http.fault"]
    assert line.trace_id == trace_id  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fault", [NotNow(code) for code in ("storage.unavailable", "storage.unknown", "lease.expired")]
)
async def test_a_fault_that_has_a_code_keeps_it(host: Stand, fault: HostError) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(faulty(host, fault)), base_url="http://host.test"
    ) as client:
        answer = await client.get("/fails", headers={"Authorization": "Bearer ada"})
    assert code(answer) == (503, fault.code)
    assert answer.json()["error"]["retryable"] is True


@pytest.mark.proves("B114", "B115", "B116")
async def test_backpressure_is_told_with_its_hint(host: Stand) -> None:
    host.gates.draining = True
    answer = await host.submit(idempotency_key="k")
    assert code(answer) == (503, "connector_host.not_ready")
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["effect"] == "none"
    assert (await host.get("/aip/v1/actions")).status_code == 200
    host.gates.draining = False
    assert (await host.submit(idempotency_key="k")).status_code == 200


async def test_submissions_and_their_refusals_are_counted(host: Stand) -> None:
    await host.submit()
    await host.submit(who="weak")
    await host.call("POST", "/aip/v1/actions", content=b"{")
    await host.get("/aip/v1/actions")
    assert (host.counters.requests_total, host.counters.rejected_total) == (3, 2)


async def test_refused_mutations_are_stored_before_they_are_answered(host: Stand) -> None:
    action_id, run_id = await host.started()
    await host.submit(who="weak")
    await host.call("POST", f"/aip/v1/actions/{action_id}/cancel", "bea", json={})
    await host.call("POST", f"/aip/v1/actions/{action_id}/cancel", "zoe", json={})
    await host.submit(STOP, who="bea", input={"run_id": run_id})
    await host.get(f"/aip/v1/actions/{action_id}", "bea")
    await host.submit(START, input={"bad": 1})
    found = [
        (item.history.split("/")[0], item.event.by, item.event.code, item.event.subject)
        for item in await host.log()
        if isinstance(item.event, RequestRefused)
    ]
    assert found == [
        ("acme", "weak", "auth.not_authorized", ""),
        ("acme", "bea", "action.not_found", action_id),
        ("other", "zoe", "action.not_found", action_id),
        ("acme", "bea", "action.not_found", ""),
    ]
