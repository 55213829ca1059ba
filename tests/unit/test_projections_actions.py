"""Actions as they are told: status, result, lists and approvals, also when the outcome is not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain import action as actions
from domain.action import State
from domain.errors import HostError
from domain.events import ApprovalExpired, CancelWished, EvidenceFound
from domain.history import Recorded
from domain.values import Effect, Mode, Operation
from projections import FACTS_FIRST, FACTS_LAST, folded
from projections.actions import (
    ACTIONS,
    ActionRow,
    action_list,
    action_result,
    action_status,
    sealed_input,
    sealed_output,
)
from projections.approvals import approval_list, approval_record_view
from tests.recorded import POLICY, Log


def row_of(log: Log, action_id: str = "act_1") -> ActionRow:
    row = folded(ACTIONS, [event for event in log.recorded() if event.history.endswith(f"/{action_id}")])
    assert row is not None
    return row


def unknown_start() -> Log:
    log = Log()
    log.accept("act_1", correlation_id="corr-1")
    log.claim("act_1")
    log.lose("act_1")
    return log


@pytest.mark.proves("A044")
def test_an_unknown_outcome_is_told_as_requiring_a_person_and_never_as_an_end() -> None:
    row = row_of(unknown_start())
    status = action_status(row)
    assert (status["state"], status["result_status"]) == ("unknown", "requires_human")
    assert "completed_at" not in status
    result = action_result(row)
    assert (result["status"], result["settled"]) == ("requires_human", False)
    error = result["error"]
    assert error["code"] == "connector.hermes_agent.outcome_unknown"
    assert error["retryable"] is False
    assert error["effect"] == "possible"
    assert error["details"] | {"next_step": ""} == {
        "uncertain_outcome": True,
        "operation": "run_start",
        "attempt_id": "att_act_1_1",
        "cause": "connector.hermes_agent.transport",
        "evidence": ["acme/act/act_1:2", "acme/act/act_1:3"],
        "next_step": "",
    }
    assert "not sent again" in error["details"]["next_step"]


def test_a_later_receipt_replaces_the_provisional_answer() -> None:
    log = unknown_start()
    log.receive("act_1", "run_1")
    log.settle("act_1", details={"run_id": "run_1"})
    row = row_of(log)
    result = action_result(row, {"run_id": "run_1"})
    assert (result["status"], result["settled"], result["output"]) == ("completed", True, {"run_id": "run_1"})
    assert "error" not in result
    assert [need.met_at is not None for need in row.needs] == [True]


def _queued(log: Log) -> None:
    log.accept("act_1", mode=Mode.ASYNC)


def _awaiting(log: Log) -> None:
    log.accept("act_1", Operation.RUN_STOP, run_id="run_1")
    log.ask_person("act_1", Operation.RUN_STOP)


def _claimed(log: Log) -> None:
    log.accept("act_1")
    log.claim("act_1")


def _cancelling(log: Log) -> None:
    _claimed(log)
    log.act("act_1", CancelWished(at=log.tick(), by="alice", reason="no more"))


def _refused(log: Log) -> None:
    _claimed(log)
    log.refuse("act_1")
    log.settle("act_1", "failed", "connector.hermes_agent.remote_rejected", details={"remote_status": 400, "cause": ""})


def _expired(log: Log) -> None:
    log.accept("act_1")
    log.settle("act_1", "expired", "action.expired")


@pytest.mark.parametrize(
    ("happens", "state", "status", "effect"),
    [
        (_queued, "queued", None, "none"),
        (_awaiting, "pending_approval", "pending_approval", "none"),
        (_claimed, "running", None, "possible"),
        (_cancelling, "cancelling", None, "possible"),
        (_refused, "failed", "failed", "none"),
        (_expired, "expired", "failed", "none"),
    ],
)
def test_each_state_has_its_words(happens: Callable[[Log], None], state: str, status: str | None, effect: str) -> None:
    log = Log()
    happens(log)
    row = row_of(log)
    told = action_status(row)
    assert told["state"] == state
    assert told.get("result_status") == status
    assert row.action.effect == Effect(effect)
    if status is None:
        with pytest.raises(HostError) as caught:
            action_result(row)
        assert caught.value.code == "action.result_not_ready"
    else:
        assert action_result(row)["status"] == status


def test_a_refusal_is_failed_with_its_code_and_never_retryable_for_a_mutation() -> None:
    log = Log()
    _claimed(log)
    log.refuse("act_1")
    log.settle(
        "act_1",
        "failed",
        "connector.hermes_agent.remote_temporary",
        retry_after_ms=1000,
        details={"remote_status": 429, "provider_code": ""},
    )
    error = action_result(row_of(log))["error"]
    assert (error["retryable"], error["effect"], error["retry_after_ms"]) == (False, "none", 1000)
    assert error["details"] == {"operation": "run_start", "remote_status": 429}


def test_evidence_that_proves_nothing_leaves_the_outcome_unknown() -> None:
    log = unknown_start()
    log.act(
        "act_1",
        EvidenceFound(at=log.tick(), attempt_id="att_act_1_1", proves="nothing", source="status", reference="run:1"),
    )
    assert row_of(log).state == "unknown"


def test_a_list_holds_statuses_its_size_and_a_cursor_only_if_something_follows() -> None:
    row = row_of(unknown_start())
    assert action_list([row], 7, "abc") == {"actions": [action_status(row)], "total_size": 7, "cursor": "abc"}
    assert "cursor" not in action_list([row], 1, "")


def test_rows_carry_input_and_output_sealed_and_no_other_private_content() -> None:
    log = unknown_start()
    log.receive("act_1", "run_1")
    log.settle("act_1")
    row = row_of(log)
    asked, answered = sealed_input(row), sealed_output(row)
    assert asked is not None
    assert answered is not None
    assert (asked.version, answered.version) == (1, 5)
    receipt = row.action.attempts[0].accepted
    assert receipt is not None
    assert getattr(receipt.answer, "box", None) == ""


def test_of_many_facts_the_first_and_the_last_are_kept_and_the_rest_is_counted() -> None:
    log = Log()
    log.accept("act_1")
    for _ in range(200):
        log.act("act_1", CancelWished(at=log.tick(), by="alice", reason="again"))
    row = row_of(log)
    assert len(row.facts) == FACTS_FIRST + FACTS_LAST
    assert row.facts_left_out == 201 - FACTS_FIRST - FACTS_LAST
    assert row.facts[0].evidence == "acme/act/act_1:1"
    assert row.facts[-1].evidence == "acme/act/act_1:201"


# ---- approvals ----


@pytest.mark.proves("A107", "A109")
def test_an_approval_is_told_with_its_request_its_evidence_and_its_decision() -> None:
    log = Log()
    log.accept("act_1", Operation.RUN_APPROVAL, run_id="run_1", choice="once", reviewed=("d" * 64,))
    log.ask_person("act_1", Operation.RUN_APPROVAL)
    waiting = approval_record_view(row_of(log), {"run_id": "run_1"})
    assert waiting["status"] == "pending"
    assert "decision" not in waiting
    assert waiting["request"]["id"] == "apr_act_1"
    assert [proof["kind"] for proof in waiting["request"]["evidence"]] == ["input_snapshot", "policy_decision"]
    assert waiting["request"]["choice"] == "once"
    assert waiting["evidence_payload"]["input"] == {"run_id": "run_1"}
    assert waiting["action_status"]["state"] == "pending_approval"
    log.decide("act_1")
    granted = approval_record_view(row_of(log))
    assert granted["status"] == "approved"
    assert granted["decision"]["approver"]["id"] == "bob"
    assert granted["decision"]["policy_hash"] == POLICY.hash
    assert "evidence_payload" not in granted
    assert approval_list([row_of(log)], 1, "")["approvals"] == [granted]


def test_a_denied_and_an_expired_approval_are_told_as_such() -> None:
    for granted, status in ((False, "denied"), (True, "expired")):
        log = Log()
        log.accept("act_1", Operation.RUN_STOP, run_id="run_1")
        log.ask_person("act_1", Operation.RUN_STOP)
        log.decide("act_1", granted)
        if granted:
            log.act("act_1", ApprovalExpired(at=log.tick(), approval_id="apr_act_1"))
        assert approval_record_view(row_of(log))["status"] == status


def test_an_action_that_needed_no_approval_has_no_record() -> None:
    with pytest.raises(HostError) as caught:
        approval_record_view(row_of(unknown_start()))
    assert caught.value.code == "action.not_found"


# ---- laws ----

STEPS = ("claim", "lose", "receive", "refuse", "settle", "cancel", "late")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=12))
def test_after_every_prefix_the_row_holds_exactly_what_the_domain_replays(steps: list[str]) -> None:
    log = Log()
    log.accept("act_1")
    for step in steps:
        match step:
            case "claim":
                log.claim("act_1")
            case "lose":
                log.lose("act_1")
            case "receive" | "late":
                log.receive("act_1", "run_1")
            case "refuse":
                log.refuse("act_1")
            case "settle":
                log.settle("act_1")
            case _:
                log.act("act_1", CancelWished(at=log.tick(), by="alice", reason=""))
    events: list[Recorded] = log.recorded()
    row: ActionRow | None = None
    for number, recorded in enumerate(events, 1):
        row = ACTIONS.fold(row, recorded)
        action = actions.replay(events[:number])
        assert row.state == actions.told_state(action)
        assert row.action.effect == action.effect
        assert row.action.version == action.version == number
        assert row.position == recorded.position
        assert (row.reason == "") == (action.state is State.SETTLED)
        assert (bool(row.open_needs)) == (row.state == "unknown")
