"""The policy gate: who may let one mutation go, on which evidence, and for how long."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from domain import approval as approvals
from domain.action import decide_approval
from domain.approval import Approval, TenantPolicy, check_policy
from domain.errors import CallerError
from domain.events import ActionSettled, ApprovalDecided, ApprovalRequested
from domain.values import Actor, Operation
from tests.builders import (
    APPROVER,
    POLICY,
    REQUESTER,
    action,
    awaiting,
    claim_again,
    denied,
    granted,
    moment,
    not_sent,
    wished,
)

GOVERNED = pytest.mark.parametrize("operation", [Operation.RUN_APPROVAL, Operation.RUN_STOP])
MINUTES = 60


def waiting() -> Approval:
    known = action(awaiting()).approval
    assert known is not None
    return known


def decide(approval: Approval | None = None, actor: Actor = APPROVER, **members: Any) -> ApprovalDecided:
    given: dict[str, Any] = {
        "granted": True,
        "reason": "reviewed",
        "decision_id": "dec_1",
        "at": moment(10),
        "policy": POLICY,
    } | members
    policy = given.pop("policy")
    return approvals.decide(approval or waiting(), policy, actor, REQUESTER.id, **given)


def refusal(**members: Any) -> str:
    with pytest.raises(CallerError) as caught:
        decide(**members)
    return caught.value.code


@pytest.mark.proves("A105")
@GOVERNED
def test_the_request_keeps_reason_input_snapshot_and_policy_decision_as_evidence(operation: Operation) -> None:
    (asked,) = approvals.request(
        POLICY,
        operation,
        approval_id="apr_1",
        decision_id="dec_1",
        reason="stops a run",
        input_digest="d" * 64,
        at=moment(),
    )
    assert isinstance(asked, ApprovalRequested)
    assert (asked.reason, asked.input_digest, asked.policy_decision) == ("stops a run", "d" * 64, "person_required")
    assert (asked.policy_hash, asked.approver_roles) == (POLICY.hash, ("approver",))
    assert approvals.EVIDENCE == ("reason", "input_snapshot", "policy_decision")


@pytest.mark.proves("A106")
def test_a_waiting_approval_can_be_decided_for_15_minutes_and_no_longer() -> None:
    assert waiting().usable_until == moment(15 * MINUTES)
    assert decide(at=moment(15 * MINUTES - 0.001)).granted is True
    assert refusal(at=moment(15 * MINUTES)) == "policy.approval_expired"


@pytest.mark.proves("A106")
def test_a_granted_approval_can_be_used_for_15_minutes_from_its_request_and_no_longer() -> None:
    history = granted(at=14 * MINUTES + 30)
    assert len(action(claim_again(history, at=15 * MINUTES - 0.001)).attempts) == 1
    with pytest.raises(CallerError) as caught:
        claim_again(history, at=15 * MINUTES)
    assert caught.value.code == "policy.approval_expired"


def test_a_grant_names_who_decided_why_and_under_which_policy() -> None:
    decided = decide()
    assert (decided.by, decided.by_kind, decided.reason) == (APPROVER.id, "person", "reviewed")
    assert (decided.approval_id, decided.decision_id, decided.policy_hash) == ("apr_1", "dec_1", POLICY.hash)
    assert (decided.granted, decided.by_policy) == (True, False)


@pytest.mark.parametrize(
    "actor",
    [
        msgspec.structs.replace(APPROVER, scopes=()),
        msgspec.structs.replace(APPROVER, scopes=("action:write",)),
        msgspec.structs.replace(APPROVER, roles=()),
        msgspec.structs.replace(APPROVER, roles=("reader",)),
    ],
)
def test_scope_and_role_are_both_needed(actor: Actor) -> None:
    assert refusal(actor=actor) == "policy.approver_unauthorized"


def test_the_requester_may_not_decide_unless_the_policy_says_so() -> None:
    assert refusal(actor=REQUESTER) == "policy.separation_of_duties.requester"
    alone = TenantPolicy(id="acme", allow_self_approval=True)
    approval = action(awaiting(policy=alone)).approval
    assert decide(approval, REQUESTER, policy=alone).by == REQUESTER.id


@pytest.mark.proves("A105")
@pytest.mark.parametrize("reason", ["", "  ", "\n"])
@pytest.mark.parametrize("granted", [True, False])
def test_a_decision_without_a_reason_is_refused(reason: str, granted: bool) -> None:
    assert refusal(reason=reason, granted=granted) == "policy.reason_required"


@pytest.mark.parametrize("history", [granted(), denied()])
def test_an_approval_is_decided_once(history: Any) -> None:
    assert refusal(approval=action(history).approval) == "policy.approval_not_pending"


def test_an_expired_approval_is_decided_no_more() -> None:
    over = approvals.expire(waiting(), at=moment(15 * MINUTES))
    approval = action((*awaiting(), over)).approval
    assert approval is not None
    assert approval.status == "expired"
    assert refusal(approval=approval) == "policy.approval_not_pending"


def test_a_decision_holds_only_under_the_policy_for_which_it_was_asked() -> None:
    changed = TenantPolicy(id="acme", resolve_all=True)
    assert changed.hash != POLICY.hash
    assert refusal(policy=changed) == "policy.approval_not_pending"


def test_an_action_without_approval_has_nothing_to_decide() -> None:
    with pytest.raises(CallerError) as caught:
        approvals.decide(None, POLICY, APPROVER, REQUESTER.id, granted=True, reason="r", decision_id="d", at=moment())
    assert caught.value.code == "policy.approval_not_pending"


@pytest.mark.proves("A095")
@GOVERNED
def test_a_denial_settles_the_action_without_effect_and_sends_nothing(operation: Operation) -> None:
    known = action(denied(operation))
    assert known.settled is not None
    assert (known.settled.status, known.settled.code) == ("failed", "policy.approval_not_granted")
    assert (known.attempts, known.effect) == ((), "none")
    with pytest.raises(CallerError):
        claim_again(denied(operation), at=20)


def test_a_grant_stores_the_decision_alone() -> None:
    events = decide_approval(
        action(awaiting()), POLICY, APPROVER, granted=True, reason="r", decision_id="dec_1", at=moment(10)
    )
    assert [type(event) for event in events] == [ApprovalDecided]
    assert not any(isinstance(event, ActionSettled) for event in events)


@pytest.mark.proves("A105")
@pytest.mark.parametrize("granted", [True, False])
def test_a_cancelled_action_waits_for_no_decision(granted: bool) -> None:
    cancelled = action(wished(awaiting()))
    assert cancelled.settled is not None
    with pytest.raises(CallerError) as caught:
        decide_approval(cancelled, POLICY, APPROVER, granted=granted, reason="r", decision_id="dec_1", at=moment(20))
    assert (caught.value.code, caught.value.details) == ("policy.approval_not_pending", {"status": "cancelled"})


def test_a_policy_may_grant_an_operation_itself_and_says_that_it_did() -> None:
    direct = TenantPolicy(id="acme", direct=("run_stop",))
    approval = action(awaiting(policy=direct)).approval
    assert approval is not None
    assert approval.decided is not None
    assert (approval.status, approval.requested.policy_decision) == ("approved", "granted_by_policy")
    assert (approval.decided.by, approval.decided.by_policy) == ("policy:acme", True)
    assert approval.usable_until == moment(15 * MINUTES)
    other = action(awaiting(Operation.RUN_APPROVAL, policy=direct)).approval
    assert other is not None
    assert other.status == "pending"


@pytest.mark.parametrize(
    ("policy", "choice", "resolve_all", "code"),
    [
        (POLICY, "once", False, ""),
        (POLICY, "deny", False, ""),
        (POLICY, "session", False, "policy.choice_denied"),
        (POLICY, "always", False, "policy.choice_denied"),
        (POLICY, "once", True, "policy.resolve_all_denied"),
        (TenantPolicy(id="acme", choices=("always",)), "always", False, ""),
        (TenantPolicy(id="acme", choices=("always",)), "once", False, "policy.choice_denied"),
        (TenantPolicy(id="acme", resolve_all=True), "once", True, ""),
        (TenantPolicy(id="acme", resolve_all=True), "always", True, "policy.choice_denied"),
    ],
)
def test_wider_choices_and_resolving_all_need_the_tenants_word(
    policy: TenantPolicy, choice: str, resolve_all: bool, code: str
) -> None:
    assert refused_by(policy, Operation.RUN_APPROVAL, choice, resolve_all) == code


def test_the_choices_of_a_policy_speak_about_choices_only() -> None:
    assert refused_by(POLICY, Operation.RUN_STOP, "", False) == ""


def refused_by(policy: TenantPolicy, operation: Operation, choice: str, resolve_all: bool) -> str:
    try:
        check_policy(policy, operation, choice, resolve_all)
    except CallerError as error:
        return error.code
    return ""


def test_one_approval_lets_one_claim_go() -> None:
    history = not_sent(Operation.RUN_STOP)
    assert action(history).attempts[0].claim.approval_id == "apr_1"
    with pytest.raises(CallerError) as caught:
        claim_again(history, at=30)
    assert caught.value.code == "policy.approval_expired"
