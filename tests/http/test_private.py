"""Who sees private content: masked without the scope, opened with it, told as erased after its key is gone."""

from __future__ import annotations

from typing import Any

import pytest

from domain.provider import Exchange, RawFrame
from tests.http.stand import CANARY, EVENTS, STATUS, STOP, Stand, deltas, sse, told

pytestmark = pytest.mark.anyio
HIDDEN = {"redacted": True}
ERASED = {"redacted": True, "code": "private.erased"}
SECRET = "s3cr3tTokenOfTheRun"


async def story(host: Stand, who: str = "ada") -> dict[str, str]:
    """A run whose input, frames, status, output and approval detail all hold the canary."""
    command = f"curl -H 'Authorization: Bearer {SECRET}' https://x.test/{CANARY}"
    ask = {"event": "approval.request", "command": command, "choices": ["once", "deny"]}
    tool = {"event": "tool.started", "tool": "shell", "preview": f"psql postgres://u:{SECRET}@db/{CANARY}"}
    host.provider.frames = lambda run_id: [
        sse(ask),
        sse(tool),
        *deltas(run_id, f"text {CANARY}", f" password={SECRET}"),
    ]
    host.provider.status = {"status": "completed", "output": f"{CANARY} token={SECRET}", "usage": {"total_tokens": 1}}
    action_id, run_id = await host.started(who)
    reading = (await host.submit(EVENTS, who, input={"run_id": run_id})).json()["action_result"]["action_id"]
    status = (await host.submit(STATUS, who, input={"run_id": run_id})).json()["action_result"]["action_id"]
    return {"action": action_id, "run": run_id, "reading": reading, "status": status}


def surfaces(ids: dict[str, str]) -> list[str]:
    """Every route that tells something of this story."""
    actions = [f"/aip/v1/actions/{ids[name]}" for name in ("action", "reading", "status")]
    return [
        *(f"{path}{more}" for path in actions for more in ("", "/result", "/events", "/chunks")),
        f"/aip/v1/actions/{ids['reading']}/events?follow=true",
        f"/views/runs/{ids['run']}",
        f"/views/runs/{ids['run']}/events?limit=1000",
        f"/views/actions/{ids['action']}",
        "/aip/v1/actions",
        "/aip/v1/approvals",
        "/aip/v1/audit/events?limit=1000",
        "/views/runs",
        "/views/recovery",
        "/views/needs-person",
    ]


@pytest.mark.proves("A031", "A032")
async def test_without_the_scope_no_surface_tells_private_content(host: Stand) -> None:
    ids = await story(host, "bea")
    for path in surfaces(ids):
        answer = await host.call("GET", path, "bea")
        assert answer.status_code == 200, path
        assert CANARY not in answer.text, path
        assert SECRET not in answer.text, path


async def test_with_the_scope_content_is_told_and_credentials_in_it_are_not(host: Stand) -> None:
    ids = await story(host)
    shown = 0
    for path in surfaces(ids):
        answer = await host.call("GET", path)
        shown += CANARY in answer.text
        assert SECRET not in answer.text, path
    assert shown >= 8
    reading = (await host.get(f"/aip/v1/actions/{ids['reading']}/result")).json()["action_result"]
    assert CANARY in reading["output"]["text"]
    run = (await host.get(f"/views/runs/{ids['run']}")).json()
    assert CANARY in str(run["result"])


async def test_a_mask_says_what_is_there_without_showing_it(host: Stand) -> None:
    ids = await story(host, "bea")
    result = (await host.get(f"/aip/v1/actions/{ids['action']}/result", "bea")).json()["action_result"]
    assert result["output"]["run_id"] == ids["run"]
    assert result["output"]["redacted"] is True
    reading = (await host.get(f"/aip/v1/actions/{ids['reading']}/result", "bea")).json()["action_result"]["output"]
    assert reading["text"] == HIDDEN
    assert [event["event"] for event in reading["events"]] == [
        "approval.request", "tool.started", "message.delta", "message.delta", "run.completed",
    ]  # fmt: skip
    assert all(event["data"] == HIDDEN for event in reading["events"])
    events = (await host.get(f"/aip/v1/actions/{ids['action']}/events", "bea")).json()["action_events"]["events"]
    assert events[0]["data"]["input"] == HIDDEN


async def test_an_approval_shows_the_input_it_is_for_to_those_who_may_see_it(host: Stand) -> None:
    _, run_id = await host.started()
    waiting = await host.submit(STOP, input={"run_id": run_id, "note": CANARY})
    path = f"/aip/v1/approvals/{waiting.json()['action_result']['output']['approval_id']}"
    payload = (await host.get(path)).json()["approval_record_view"]["evidence_payload"]
    assert payload["input"] == {"run_id": run_id, "note": CANARY}
    clerk = await host.call("POST", f"{path}/decision", "clerk", json={"decision": "denied", "reason": "no"})
    assert clerk.json()["approval_record_view"]["evidence_payload"]["input"] == HIDDEN
    assert CANARY not in clerk.text


async def test_erased_content_is_told_as_erased_and_the_rest_of_the_answer_stands(host: Stand) -> None:
    ids = await story(host)
    month = host.clock.now().strftime("%Y-%m")
    assert await host.vault.forget("acme", "ada", month) == 1
    for path in surfaces(ids):
        answer = await host.call("GET", path)
        assert answer.status_code == 200, path
        assert CANARY not in answer.text
    events = (await host.get(f"/aip/v1/actions/{ids['action']}/events")).json()["action_events"]["events"]
    assert events[0]["data"]["input"] == ERASED
    run = (await host.get(f"/views/runs/{ids['run']}")).json()
    assert run["state"] == "completed"
    assert run["result"] == ERASED
    reading = (await host.get(f"/aip/v1/actions/{ids['reading']}/result")).json()["action_result"]["output"]
    assert [event["event"] for event in reading["events"]][-1] == "run.completed"


async def test_a_providers_error_text_stands_in_the_output_masked_and_never_in_the_error(host: Stand) -> None:
    body: dict[str, Any] = {"error": {"code": "bad", "message": f"{CANARY} api_key={SECRET}"}}
    host.provider.answers = [told(400, body), told(400, body)]
    ada = await host.submit()
    assert CANARY in str(ada.json()["action_result"]["output"])
    bea = await host.submit(who="bea")
    assert CANARY not in bea.text
    assert SECRET not in ada.text + bea.text
    assert CANARY not in str(ada.json()["action_result"]["error"])


@pytest.mark.proves("A031")
async def test_nothing_private_is_logged(host: Stand, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    ids = await story(host)
    for path in surfaces(ids):
        await host.call("GET", path)
    await host.submit(input={"bad": CANARY})
    await host.call("POST", "/aip/v1/actions", content=f'{{"{CANARY}'.encode())
    lines = [record for record in caplog.records if not record.name.startswith("httpx")]
    text = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in lines)
    assert CANARY not in text
    assert SECRET not in text


HOSTILE = [
    '{"event":"message.delta","delta":"\\ud800 half"}',
    '{"event":"message.delta","\\udfff":1}',
    '{"event":"message.delta","delta":"\\u0000"}',
    '{"event":"x","n":NaN,"i":-Infinity,"big":' + "9" * 400 + "}",
    '{"event":"x","deep":' + "[" * 300 + "]" * 300 + "}",
    '{"event":"x","deeper":' + "[" * 100_000,
    "\u2028\x85 not json",
    "",
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
async def test_whatever_a_provider_writes_every_surface_answers(host: Stand, data: str) -> None:
    frame = RawFrame(raw=f"data: {data}\n\n".encode(), data=data)
    host.provider.frames = lambda run_id: [frame, *deltas(run_id, "end")]
    _, run_id = await host.started()
    body = (
        b'{"object":"hermes.run","run_id":"'
        + run_id.encode()
        + b'","status":"running","output":'
        + (b'"\\ud800"' if not data else b"[" * 200 + b"]" * 200)
        + b"}"
    )
    host.provider.read = lambda out: answer_of(body)  # type: ignore[assignment,method-assign]
    reading = (await host.submit(EVENTS, input={"run_id": run_id})).json()["action_result"]
    status = (await host.submit(STATUS, input={"run_id": run_id})).json()["action_result"]
    ids = {
        "action": reading["action_id"],
        "run": run_id,
        "reading": reading["action_id"],
        "status": status["action_id"],
    }
    assert len(reading["output"]["events"]) == 3
    for path in surfaces(ids):
        answer = await host.call("GET", path)
        assert answer.status_code == 200, path
        assert "internal.fault" not in answer.text


async def answer_of(body: bytes) -> Exchange:
    """A complete answer with this body."""
    return Exchange(sent=True, status=200, content_type="application/json", body=body)
