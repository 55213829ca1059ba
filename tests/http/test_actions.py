"""Submitting, reading and cancelling Actions over HTTP."""

from __future__ import annotations

import pytest

from domain.approval import TenantPolicy
from tests.http.stand import APPROVAL, CANARY, EVENTS, LOST, START, STATUS, STOP, Stand, deltas, sse, told

pytestmark = pytest.mark.anyio


@pytest.mark.proves("A013", "A043", "A044")
async def test_a_sync_start_answers_with_the_receipt_and_claims_no_more(host: Stand) -> None:
    answer = await host.submit()
    assert answer.status_code == 200, answer.text
    result = answer.json()["action_result"]
    assert result["status"] == "completed"
    assert answer.json()["settled"] is True
    assert result["output"]["run_id"] == "run_1"
    assert result["output"]["status"] == "started"
    action_id = result["action_id"]
    assert answer.headers["location"] == f"/aip/v1/actions/{action_id}"
    status = (await host.get(f"/aip/v1/actions/{action_id}")).json()["action_status"]
    assert status["state"] == "completed"
    assert status["capability_id"] == START
    assert status["links"]["run"] == "/views/runs/run_1"
    again = (await host.get(f"/aip/v1/actions/{action_id}/result")).json()
    assert again["action_result"] == result


async def test_an_async_start_is_acknowledged_and_its_result_is_kept(host: Stand) -> None:
    answer = await host.submit(mode="async")
    assert answer.status_code == 202
    ack = answer.json()["ack"]
    assert ack["status"] == "queued"
    path = f"/aip/v1/actions/{ack['action_id']}/result"

    async def ready() -> bool:
        return (await host.get(path)).status_code == 200

    await host.until(ready)
    assert (await host.get(path)).json()["action_result"]["output"]["run_id"] == "run_1"


async def test_a_result_that_is_not_there_yet_is_told_as_such(host: Stand) -> None:
    import anyio

    host.provider.hold = anyio.Event()
    action_id = (await host.submit(mode="async")).json()["ack"]["action_id"]
    early = await host.get(f"/aip/v1/actions/{action_id}/result")
    assert early.status_code == 409
    assert early.json()["error"]["code"] == "action.result_not_ready"
    assert early.json()["error"]["retryable"] is True
    host.provider.hold.set()


@pytest.mark.proves("A046", "A131", "A135")
async def test_a_repeated_key_answers_the_original_with_a_mark(host: Stand) -> None:
    first = (await host.submit(idempotency_key="k")).json()["action_result"]
    again = await host.submit(idempotency_key="k")
    assert again.status_code == 200
    assert again.json()["action_result"]["action_id"] == first["action_id"]
    assert again.json()["action_result"]["output"] == first["output"] | {"idempotent_replay": True}
    assert len(host.provider.sent) == 1


async def test_the_key_may_come_as_a_header_and_must_not_contradict_the_body(host: Stand) -> None:
    body = {"capability_id": START, "input": {"input": "x"}}
    one = await host.call("POST", "/aip/v1/actions", json=body, headers={"Idempotency-Key": "h"})
    two = await host.call("POST", "/aip/v1/actions", json=body | {"idempotency_key": "h"})
    assert one.json()["action_result"]["action_id"] == two.json()["action_result"]["action_id"]
    bad = await host.call(
        "POST", "/aip/v1/actions", json=body | {"idempotency_key": "i"}, headers={"Idempotency-Key": "h"}
    )
    assert bad.json()["error"]["code"] == "request.invalid"


async def test_another_request_or_principal_under_a_key_is_refused_and_learns_nothing(host: Stand) -> None:
    await host.submit(idempotency_key="k")
    other = await host.submit(idempotency_key="k", input={"input": "something else"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency.input_hash_mismatch")
    stranger = await host.submit(who="bea", idempotency_key="k")
    assert (stranger.status_code, stranger.json()["error"]["code"]) == (409, "idempotency.conflict")
    assert "details" not in stranger.json()["error"]


async def test_an_unknown_outcome_is_neither_failed_nor_completed(host: Stand) -> None:
    host.provider.answers = [LOST]
    answer = await host.submit()
    assert answer.status_code == 200
    result = answer.json()["action_result"]
    assert result["status"] == "requires_human"
    assert answer.json()["settled"] is False
    error = result["error"]
    assert error["code"] == "connector.hermes_agent.outcome_unknown"
    assert (error["retryable"], error["effect"]) == (False, "possible")
    assert error["details"]["uncertain_outcome"] is True
    assert error["details"]["cause"] == "connector.hermes_agent.transport"
    assert error["details"]["operation"] == "run_start"
    assert error["details"]["next_step"]
    status = (await host.get(f"/aip/v1/actions/{result['action_id']}")).json()["action_status"]
    assert (status["state"], status["result_status"]) == ("unknown", "requires_human")


@pytest.mark.proves("A155", "A158")
async def test_a_refusal_by_the_provider_is_a_typed_failed_result(host: Stand) -> None:
    host.provider.answers = [told(400, {"error": {"code": "invalid_request", "message": f"bad {CANARY}"}})]
    result = (await host.submit()).json()["action_result"]
    assert result["status"] == "failed"
    assert result["error"]["code"] == "connector.hermes_agent.remote_rejected"
    assert result["error"]["effect"] == "none"
    assert result["error"]["details"]["remote_status"] == 400
    assert CANARY not in str(result["error"])
    assert CANARY in str(result["output"])


async def test_a_providers_hint_to_wait_is_kept(host: Stand) -> None:
    full = {"error": {"code": "rate_limit_exceeded", "message": "full"}}
    host.provider.answers = [told(429, full, retry_after="3")]
    result = (await host.submit()).json()["action_result"]
    assert result["error"]["retry_after_ms"] == 3000


async def test_a_callback_is_refused_before_anything_is_stored(host: Stand) -> None:
    before = len(await host.log())
    answer = await host.submit(callback={"profile": "p", "target": "https://x.test"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "callback.unsupported")
    assert len(await host.log()) == before
    deliveries = await host.get("/aip/v1/callback-deliveries")
    assert deliveries.json() == {"callback_delivery_list": {"deliveries": []}}
    assert (await host.get("/aip/v1/callback-deliveries/cb:1")).status_code == 404


async def test_lists_filter_and_page_with_cursors(host: Stand) -> None:
    ids = [(await host.submit()).json()["action_result"]["action_id"] for _ in range(3)]
    await host.views.catch_up()
    first = (await host.get("/aip/v1/actions", limit=2)).json()["action_list"]
    assert first["total_size"] == 3
    rest = (await host.get("/aip/v1/actions", limit=2, cursor=first["cursor"])).json()["action_list"]
    assert {item["action_id"] for item in (*first["actions"], *rest["actions"])} == set(ids)
    assert "cursor" not in rest
    named = (await host.get("/aip/v1/actions", run_id="run_2", state="completed", endpoint_id="main")).json()
    assert [item["links"] and item["action_id"] for item in named["action_list"]["actions"]] == [ids[1]]
    none = (await host.get("/aip/v1/actions", principal_id="bea")).json()["action_list"]
    assert none == {"actions": [], "total_size": 0}
    foreign = await host.get("/aip/v1/actions", limit=2, state="failed", cursor=first["cursor"])
    assert foreign.json()["error"]["code"] == "query.invalid_cursor"


# ---- operations on a run ---------------------------------------------------------------------------------------------


@pytest.mark.proves("A014", "A059")
async def test_a_status_read_answers_the_providers_object(host: Stand) -> None:
    _, run_id = await host.started()
    result = (await host.submit(STATUS, input={"run_id": run_id})).json()["action_result"]
    assert result["status"] == "completed"
    assert result["output"]["status"] == "running"
    assert result["output"]["run_id"] == run_id


@pytest.mark.proves("A015", "A077")
async def test_run_events_answers_what_was_read_until_the_end(host: Stand) -> None:
    _, run_id = await host.started()
    result = (await host.submit(EVENTS, input={"run_id": run_id})).json()["action_result"]
    output = result["output"]
    assert result["status"] == "completed"
    assert output["text"] == "Hello world"
    assert (output["terminal"], output["truncated"]) == (True, False)
    assert [event["data"]["event"] for event in output["events"]] == ["message.delta", "message.delta", "run.completed"]
    assert [event["terminal"] for event in output["events"]] == [False, False, True]


@pytest.mark.proves("A091")
async def test_a_limit_that_is_reached_on_the_terminal_event_is_a_truncation(host: Stand) -> None:
    _, run_id = await host.started()
    result = (await host.submit(EVENTS, input={"run_id": run_id, "max_events": 3})).json()["action_result"]
    assert result["status"] == "failed"
    assert result["error"]["code"] == "connector.hermes_agent.stream_truncated"
    assert result["output"]["terminal"] is False
    assert result["output"]["truncated"] is True
    assert len(result["output"]["events"]) == 3


@pytest.mark.proves("A090")
async def test_a_stream_that_ends_before_a_terminal_event_is_incomplete_and_keeps_its_events(host: Stand) -> None:
    host.provider.frames = lambda run_id: deltas(run_id, "half", end="")
    run_id = (await host.submit()).json()["action_result"]["output"]["run_id"]
    result = (await host.submit(EVENTS, input={"run_id": run_id})).json()["action_result"]
    assert result["error"]["code"] == "connector.hermes_agent.stream_incomplete"
    assert result["error"]["details"]["run_state"] == "running"
    assert result["output"]["text"] == "half"


@pytest.mark.proves("A109", "A095", "A105", "A107")
async def test_a_stop_waits_for_a_decision_and_is_sent_once_it_is_granted(host: Stand) -> None:
    host.provider.frames = lambda run_id: deltas(run_id, "going", end="")
    run_id = (await host.submit()).json()["action_result"]["output"]["run_id"]
    asked = await host.submit(STOP, input={"run_id": run_id}, reason="enough")
    assert asked.status_code == 202
    result = asked.json()["action_result"]
    assert (result["status"], asked.json()["settled"]) == ("pending_approval", False)
    assert result["error"]["code"] == "policy.human_approval_required"
    approval_id = result["output"]["approval_id"]
    assert result["output"]["approval_request"]["reason"] == "enough"
    assert len(host.provider.sent) == 1
    record = (await host.get(f"/aip/v1/approvals/{approval_id}")).json()["approval_record_view"]
    assert record["status"] == "pending"
    assert {item["kind"] for item in record["request"]["evidence"]} >= {"input_snapshot", "policy_decision"}
    decided = await host.call(
        "POST",
        f"/aip/v1/approvals/{approval_id}/decision",
        "boss",
        json={"decision": "approved", "reason": "yes"},
    )
    assert decided.json()["approval_record_view"]["status"] == "approved"
    path = f"/aip/v1/actions/{result['action_id']}/result"

    async def settled() -> bool:
        return (await host.get(path)).json().get("settled") is True

    await host.until(settled)
    assert (await host.get(path)).json()["action_result"]["output"]["status"] == "stopping"
    assert [out.path for out in host.provider.sent][1:] == [f"/v1/runs/{run_id}/stop"]


async def test_decisions_are_refused_to_the_requester_without_a_reason_and_twice(host: Stand) -> None:
    _, run_id = await host.started()
    host.callers.people["ada"] = host.callers.people["boss"]
    approval_id = (await host.submit(STOP, input={"run_id": run_id})).json()["action_result"]["output"]["approval_id"]
    path = f"/aip/v1/approvals/{approval_id}/decision"
    own = await host.call("POST", path, "boss", json={"decision": "approved", "reason": "mine"})
    assert (own.status_code, own.json()["error"]["code"]) == (403, "policy.separation_of_duties.requester")
    empty = await host.call("POST", path, "clerk", json={"decision": "denied", "reason": " "})
    assert (empty.status_code, empty.json()["error"]["code"]) == (400, "policy.reason_required")
    denied = await host.call("POST", path, "clerk", json={"decision": "denied", "reason": "no"})
    assert denied.json()["approval_record_view"]["status"] == "denied"
    again = await host.call("POST", path, "clerk", json={"decision": "approved", "reason": "yes"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "policy.approval_not_pending")
    wrong = await host.call("POST", path, "clerk", json={"decision": "maybe", "reason": "x"})
    assert wrong.json()["error"]["code"] == "request.invalid"


@pytest.mark.proves("A096", "A098")
async def test_a_choice_is_sent_in_its_canonical_word_when_the_policy_grants_it_directly(host: Stand) -> None:
    host.policy = TenantPolicy(id="acme", direct=("run_approval",))
    ask = {"event": "approval.request", "command": "rm -r build", "choices": ["once", "session", "always", "deny"]}
    host.provider.frames = lambda run_id: [sse(ask)]
    run_id = (await host.submit()).json()["action_result"]["output"]["run_id"]

    async def pending() -> bool:
        await host.views.catch_up()
        found = await host.get(f"/views/runs/{run_id}")
        return bool(found.status_code == 200 and found.json()["pending_approvals"])

    await host.until(pending)
    digest = (await host.get(f"/views/runs/{run_id}")).json()["pending_approvals"][0]["digest"]
    answer = await host.submit(APPROVAL, input={"run_id": run_id, "choice": "approve", "reviewed": digest})
    result = answer.json()["action_result"]
    codes = (result["status"], result.get("error", {}).get("code"))
    assert codes in (("completed", None), ("failed", "approval.not_pending"))
    if result["status"] == "completed":
        assert result["output"]["choice"] == "once"
    refused = await host.submit(APPROVAL, input={"run_id": run_id, "choice": "always", "reviewed": digest})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "policy.choice_denied")
    every = {"run_id": run_id, "choice": "once", "reviewed": [digest], "all": True}
    assert (await host.submit(APPROVAL, input=every)).json()["error"]["code"] == "policy.resolve_all_denied"


# ---- cancelling ------------------------------------------------------------------------------------------------------


async def test_a_settled_start_is_not_cancelled_and_names_its_run(host: Stand) -> None:
    action_id, run_id = await host.started()
    answer = await host.call("POST", f"/aip/v1/actions/{action_id}/cancel", json={"reason": "late"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "action.already_settled")
    assert answer.json()["error"]["details"]["run_id"] == run_id


async def test_a_waiting_action_is_cancelled_without_effect(host: Stand) -> None:
    host.provider.frames = lambda run_id: deltas(run_id, "x", end="")
    run_id = (await host.submit()).json()["action_result"]["output"]["run_id"]
    action_id = (await host.submit(STOP, input={"run_id": run_id})).json()["action_result"]["action_id"]
    answer = await host.call("POST", f"/aip/v1/actions/{action_id}/cancel", json={})
    assert answer.status_code == 202
    assert answer.json()["cancel"] == {"what": "cancelled_without_effect"}
    assert answer.json()["action_status"]["state"] == "cancelled"
    result = (await host.get(f"/aip/v1/actions/{action_id}/result")).json()["action_result"]
    assert (result["status"], result["error"]["effect"]) == ("cancelled", "none")
    assert len(host.provider.sent) == 1
