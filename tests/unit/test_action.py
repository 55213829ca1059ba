"""An Action from acceptance to its one settlement: given events, when a command, then events."""

from __future__ import annotations

from datetime import datetime

import msgspec
import pytest

from domain import action as actions
from domain.action import NEXT, Action, State, evolve, settle_closed, settle_received, told_state, wish_cancel
from domain.approval import TenantPolicy
from domain.errors import TABLE, CallerError
from domain.events import (
    TOPICS,
    ActionSettled,
    AttemptAccepted,
    AttemptClaimed,
    AttemptClosed,
    AttemptUnknown,
    CancelWished,
    Event,
    EvidenceFound,
    OwnerChanged,
)
from domain.provider import Failure
from domain.values import Effect, Fence, Operation
from tests.builders import (
    AT,
    OTHER,
    OWNER,
    POLICY,
    PREFIX,
    REQUESTER,
    RUN,
    TARGET,
    History,
    accepted,
    action,
    answer,
    awaiting,
    broken,
    claim_again,
    claimed,
    denied,
    error_body,
    granted,
    in_doubt,
    moment,
    not_sent,
    ready,
    receipt_of,
    received,
    refused,
    result,
    settled,
    wished,
)

MUTATIONS = (Operation.RUN_START, Operation.RUN_APPROVAL, Operation.RUN_STOP)
EACH_MUTATION = pytest.mark.parametrize("operation", MUTATIONS)


def claim(history: History, owner: Fence = OWNER, *, lease_valid: bool = True, at: float = 20) -> AttemptClaimed:
    return actions.claim(
        action(history),
        owner,
        TARGET,
        attempt_id="att_9",
        lease_valid=lease_valid,
        policy_hash=POLICY.hash,
        at=moment(at),
    )


def refusal(history: History, owner: Fence = OWNER, *, lease_valid: bool = True, at: float = 20) -> str:
    with pytest.raises(CallerError) as caught:
        claim(history, owner, lease_valid=lease_valid, at=at)
    return caught.value.code


# ---- claims ----------------------------------------------------------------------------------------------------------


@EACH_MUTATION
def test_a_claim_names_what_it_will_send_where_and_for_whom(operation: Operation) -> None:
    made = claim(ready(operation))
    request = action(ready(operation)).request
    assert (made.number, made.operation, made.target, made.owner) == (1, operation, TARGET, OWNER)
    assert (made.request_digest, made.key, made.run_id) == (request.request_digest, "key-1", request.run_id)
    assert made.approval_id == ("" if operation is Operation.RUN_START else "apr_1")


@pytest.mark.parametrize("operation", [Operation.RUN_STATUS, Operation.RUN_EVENTS])
def test_a_read_is_never_claimed(operation: Operation) -> None:
    assert refusal(accepted(operation)) == "action.already_settled"


@pytest.mark.proves("A142")
@EACH_MUTATION
@pytest.mark.parametrize("story", [claimed, in_doubt, received, settled])
def test_what_may_have_been_sent_is_not_claimed_again(operation: Operation, story: object) -> None:
    assert callable(story)
    assert refusal(story(operation)) == "action.already_settled"


@pytest.mark.proves("A142", "A134")
def test_an_unknown_that_a_late_refusal_closed_is_still_not_claimed_again() -> None:
    history = result(in_doubt(), answer(429, error_body("rate_limit_exceeded")), at=30)
    assert action(history).state is State.CLOSED
    assert refusal(history, at=40) == "action.already_settled"


@pytest.mark.parametrize("story", [refused, not_sent])
def test_an_attempt_that_proved_to_be_without_effect_may_be_followed_by_another(story: object) -> None:
    assert callable(story)
    assert claim(story(), at=30).number == 2


def test_only_the_owner_with_a_valid_lease_claims() -> None:
    assert refusal(ready(), OTHER) == "host.owned_elsewhere"
    assert refusal(ready(), Fence(OWNER.replica, OWNER.sequence + 1)) == "host.owned_elsewhere"
    assert refusal(ready(), lease_valid=False) == "host.owned_elsewhere"
    taken = (*ready(), OwnerChanged(at=AT, owner=OTHER, previous=OWNER))
    assert refusal(taken, OWNER) == "host.owned_elsewhere"
    assert claim(taken, OTHER).owner == OTHER


@pytest.mark.proves("A054")
def test_an_endpoint_bound_to_another_tenant_is_refused_before_anything_is_claimed() -> None:
    target = msgspec.structs.replace(TARGET, tenant_binding="other")
    with pytest.raises(CallerError) as caught:
        actions.claim(
            action(ready()), OWNER, target, attempt_id="att_1", lease_valid=True, policy_hash=POLICY.hash, at=moment(1)
        )
    assert caught.value.code == PREFIX + "tenant_mismatch"
    own = msgspec.structs.replace(TARGET, tenant_binding="acme")
    assert (
        actions.claim(
            action(ready()), OWNER, own, attempt_id="att_1", lease_valid=True, policy_hash=POLICY.hash, at=moment(1)
        ).number
        == 1
    )


def test_nothing_is_claimed_from_the_deadline_on() -> None:
    assert claim(ready(), at=59.999).number == 1
    assert refusal(ready(), at=60) == "action.expired"


def test_a_persons_grant_counts_the_deadline_anew_and_a_policys_does_not() -> None:
    assert action(granted(at=300)).deadline == moment(360)
    direct = TenantPolicy(id="acme", direct=("run_stop",))
    assert action(awaiting(policy=direct)).deadline == moment(60)


@pytest.mark.proves("A109", "A007", "A008")
@pytest.mark.parametrize("operation", [Operation.RUN_APPROVAL, Operation.RUN_STOP])
def test_a_governed_mutation_waits_for_its_decision(operation: Operation) -> None:
    waiting = action(awaiting(operation))
    assert (waiting.state, told_state(waiting)) == (State.AWAITING, "pending_approval")
    assert refusal(awaiting(operation)) == "action.already_settled"
    assert claim(granted(operation)).approval_id == "apr_1"


@pytest.mark.proves("A095", "A096")
@pytest.mark.parametrize("choice", ["once", "deny", "session", "always"])
def test_a_grant_leaves_the_accepted_choice_as_it_is(choice: str) -> None:
    known = action(granted(Operation.RUN_APPROVAL, choice=choice))
    assert known.state is State.READY
    assert known.request.choice == choice
    assert claim(granted(Operation.RUN_APPROVAL, choice=choice)).request_digest == known.request.request_digest


# ---- results and settlements -----------------------------------------------------------------------------------------


@pytest.mark.proves("A013")
def test_a_start_settles_by_its_receipt_and_says_nothing_about_the_run() -> None:
    made = settle_received(action(received()), at=moment(22))
    assert (made.status, made.effect, made.code) == ("completed", Effect.CONFIRMED, "")
    assert made.details == {"attempts": 1, "run_id": RUN, "status": "started"}
    assert made.evidence == ("attempt:att_1",)


@pytest.mark.proves("A102")
def test_a_choice_settles_with_run_choice_and_count() -> None:
    made = settle_received(action(received(Operation.RUN_APPROVAL)), at=moment(22))
    assert made.details == {"attempts": 1, "run_id": RUN, "choice": "once", "resolved": 1}


@pytest.mark.proves("A111", "A112")
def test_a_stop_settles_with_the_word_stopping_and_not_as_cancelled() -> None:
    made = settle_received(action(received(Operation.RUN_STOP)), at=moment(22))
    assert (made.status, made.details["status"]) == ("completed", "stopping")


@pytest.mark.proves("A152", "A158", "A159")
@EACH_MUTATION
@pytest.mark.parametrize(
    ("status", "word", "code"),
    [
        (400, "invalid", "remote_rejected"),
        (401, "invalid_api_key", "authentication"),
        (404, "run_not_found", "run_not_found"),
        (409, "approval_not_pending", "approval_not_pending"),
        (429, "rate_limit_exceeded", "remote_refused_temporarily"),
    ],
)
def test_a_refusal_settles_as_failed_without_effect_and_never_as_retryable(
    operation: Operation, status: int, word: str, code: str
) -> None:
    known = action(refused(operation, status=status, code=word))
    made = settle_closed(known, at=moment(22))
    assert (made.status, made.effect, made.code) == ("failed", Effect.NONE, PREFIX + code)
    assert TABLE[made.code].retryable is False
    assert (made.details["remote_status"], made.details["provider_code"], made.details["sent"]) == (status, word, True)
    assert (made.details["endpoint_id"], made.details["credential_revision"]) == ("main", "7")
    assert made.retry_after_ms == 1_000


def test_what_was_never_sent_settles_as_such() -> None:
    made = settle_closed(action(not_sent()), at=moment(22))
    assert (made.status, made.code, made.details["sent"]) == ("failed", PREFIX + "not_sent", False)
    assert (made.details["cause"], made.effect) == ("connect_refused", Effect.NONE)


@pytest.mark.parametrize("history", [accepted(), claimed(), in_doubt()])
def test_without_a_result_there_is_no_settlement(history: History) -> None:
    for settle in (settle_received, settle_closed):
        with pytest.raises(CallerError) as caught:
            settle(action(history), at=moment(22))
        assert caught.value.code == "action.result_not_ready"


def test_evidence_settles_an_unknown_stop_with_its_source() -> None:
    found = EvidenceFound(
        at=moment(30), attempt_id="att_1", proves="applied", source="run.cancelled", reference="run:7"
    )
    known = action((*in_doubt(Operation.RUN_STOP), found))
    assert (known.state, known.effect) == (State.RECEIVED, Effect.CONFIRMED)
    made = settle_received(known, at=moment(31))
    assert made.details == {"attempts": 1, "run_id": RUN, "proved_by": "run.cancelled"}
    assert made.output is None


@EACH_MUTATION
def test_evidence_that_proves_nothing_leaves_an_unknown_unknown(operation: Operation) -> None:
    found = EvidenceFound(at=moment(30), attempt_id="att_1", proves="nothing", source="session", reference="x")
    known = action((*in_doubt(operation), found))
    assert (known.state, known.effect) == (State.UNKNOWN, Effect.POSSIBLE)


@pytest.mark.proves("A136")
def test_the_handle_of_a_start_is_that_of_its_receipt_also_if_that_came_late() -> None:
    assert actions.started_run(action(in_doubt())) == ""
    late = result(in_doubt(), receipt_of(Operation.RUN_START), at=40)
    assert actions.started_run(action(late)) == RUN
    assert action(late).state is State.RECEIVED


SETTLED = [settled(), settled(Operation.RUN_STOP), denied(), wished(accepted())]
LATE: list[Event] = [
    *result(claimed(), receipt_of(Operation.RUN_START))[-1:],
    *refused()[-1:],
    *in_doubt()[-1:],
    EvidenceFound(at=moment(50), attempt_id="att_1", proves="applied", source="s", reference="r"),
    ActionSettled(at=moment(50), status="failed", effect=Effect.NONE),
    CancelWished(at=moment(50), by="user:ada", reason=""),
    OwnerChanged(at=moment(50), owner=OTHER, previous=OWNER),
]


@pytest.mark.parametrize("history", SETTLED)
@pytest.mark.parametrize("event", LATE, ids=lambda event: type(event).__name__)
def test_a_settled_action_never_changes_its_answer(history: History, event: Event) -> None:
    before, after = action(history), action((*history, event))
    assert (after.state, after.settled, after.effect) == (before.state, before.settled, before.effect)
    assert after.version == before.version + 1


# ---- cancellation ----------------------------------------------------------------------------------------------------

NOTHING_SENT = ("cancelled", "action.cancelled", Effect.NONE)
CANCELLATION: list[tuple[str, History, tuple[str, str, Effect] | str]] = [
    ("start ready", accepted(), NOTHING_SENT),
    ("start claimed", claimed(), "wish"),
    ("start unknown", in_doubt(), "wish"),
    ("start received", received(), "wish"),
    ("start refused", refused(), NOTHING_SENT),
    ("start not sent", not_sent(), NOTHING_SENT),
    ("start settled", settled(), "refused"),
    ("status ready", accepted(Operation.RUN_STATUS), NOTHING_SENT),
    ("events ready", accepted(Operation.RUN_EVENTS), NOTHING_SENT),
    *(
        (f"{operation.value} {name}", story(operation), then)
        for operation in (Operation.RUN_APPROVAL, Operation.RUN_STOP)
        for name, story, then in (
            ("awaiting", awaiting, NOTHING_SENT),
            ("granted", granted, NOTHING_SENT),
            ("claimed", claimed, "wish"),
            ("unknown", in_doubt, "wish"),
            ("received", received, "wish"),
            ("refused", refused, NOTHING_SENT),
            ("denied", denied, "refused"),
            ("settled", settled, "refused"),
        )
    ),
]


@pytest.mark.proves("A117")
@pytest.mark.parametrize(("name", "history", "then"), CANCELLATION, ids=[row[0] for row in CANCELLATION])
def test_a_cancellation_settles_what_was_not_sent_and_is_kept_as_a_wish_otherwise(
    name: str, history: History, then: tuple[str, str, Effect] | str
) -> None:
    if then == "refused":
        with pytest.raises(CallerError) as caught:
            wish_cancel(action(history), REQUESTER, "why", at=moment(50))
        assert caught.value.code == "action.already_settled"
        return
    events = wish_cancel(action(history), REQUESTER, "why", at=moment(50))
    assert isinstance(events[0], CancelWished)
    assert (events[0].by, events[0].reason) == (REQUESTER.id, "why")
    if then == "wish":
        assert len(events) == 1
        assert action((*history, *events)).state is action(history).state
    else:
        (settlement,) = events[1:]
        assert isinstance(settlement, ActionSettled)
        assert (settlement.status, settlement.code, settlement.effect) == then


def test_every_state_has_a_row_of_the_cancellation_table() -> None:
    assert {action(history).state for _, history, _ in CANCELLATION} == set(State) - {State.NEW}


def test_a_settled_start_that_somebody_cancels_names_the_run_to_be_stopped() -> None:
    with pytest.raises(CallerError) as caught:
        wish_cancel(action(settled()), REQUESTER, "", at=moment(50))
    assert caught.value.details == {"run_id": RUN}
    with pytest.raises(CallerError) as caught:
        wish_cancel(action(denied()), REQUESTER, "", at=moment(50))
    assert caught.value.details == {}


def test_a_second_wish_adds_nothing() -> None:
    assert wish_cancel(action(wished(claimed())), REQUESTER, "again", at=moment(60)) == ()


@pytest.mark.parametrize(
    ("history", "word"),
    [
        (accepted(), "queued"),
        (accepted(Operation.RUN_STATUS), "running"),
        (accepted(Operation.RUN_EVENTS), "running"),
        (awaiting(), "pending_approval"),
        (granted(), "queued"),
        (claimed(), "running"),
        (wished(claimed()), "cancelling"),
        (in_doubt(), "unknown"),
        (wished(in_doubt()), "unknown"),
        (received(), "running"),
        (refused(), "queued"),
        (settled(), "completed"),
        (denied(), "failed"),
        (wished(accepted()), "cancelled"),
    ],
)
def test_the_word_for_callers(history: History, word: str) -> None:
    assert told_state(action(history)) == word


# ---- the table -------------------------------------------------------------------------------------------------------

STATES: dict[State, Action] = {
    State.NEW: Action(),
    State.AWAITING: action(awaiting()),
    State.READY: action(accepted()),
    State.CLAIMED: action(claimed()),
    State.CLOSED: action(refused()),
    State.UNKNOWN: action(in_doubt()),
    State.RECEIVED: action(received()),
    State.SETTLED: action(settled()),
}
SAMPLES: dict[type[Event], Event] = {
    type(event): event
    for event in (
        *LATE,
        *awaiting(),
        *granted()[-1:],
        *claimed()[-1:],
    )
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_an_event_that_the_table_does_not_name_changes_no_state(state: State, kind: type[Event]) -> None:
    assert STATES[state].state is state
    after = evolve(STATES[state], SAMPLES[kind], 99)
    assert after.state is NEXT.get((state, kind), state)
    assert after.version == 99


def test_the_samples_hold_every_event_of_the_table() -> None:
    assert {kind for _, kind in NEXT} <= set(SAMPLES) <= set(TOPICS.values())


def test_nothing_leads_out_of_a_settlement_and_a_claim_comes_only_before_any_doubt() -> None:
    assert not [row for row in NEXT if row[0] is State.SETTLED]
    assert {state for state, kind in NEXT if kind is AttemptClaimed} == {State.READY, State.CLOSED}
    assert {state for (state, kind), then in NEXT.items() if then is State.UNKNOWN} == {State.CLAIMED}


def test_events_of_runs_and_streams_are_none_of_an_actions() -> None:
    assert not {kind.topic.split(".")[0] for _, kind in NEXT} - {"action", "attempt"}


def test_the_action_tells_when_it_last_changed() -> None:
    assert action(accepted()).updated_at == AT
    assert action(settled()).updated_at == moment(22)
    assert isinstance(action(in_doubt()).updated_at, datetime)


def test_the_latest_attempt_counts_and_all_are_kept() -> None:
    history = result(
        (
            *refused(),
            actions.claim(
                action(refused()),
                OWNER,
                TARGET,
                attempt_id="att_2",
                lease_valid=True,
                policy_hash=POLICY.hash,
                at=moment(23),
            ),
        ),
        broken(Failure.READ_ERROR),
        at=24,
    )
    known = action(history)
    assert [item.claim.number for item in known.attempts] == [1, 2]
    assert (known.state, known.effect) == (State.UNKNOWN, Effect.POSSIBLE)
    kinds = [AttemptClaimed, AttemptClosed, AttemptClaimed, AttemptUnknown]
    assert [type(event) for event in history[1:]] == kinds
    assert AttemptAccepted not in kinds


@pytest.mark.proves("A142")
@pytest.mark.parametrize("event", [refused(at=30)[-1], in_doubt(at=30)[-1], received(at=30)[-1], LATE[3]])
def test_what_comes_late_about_an_earlier_attempt_does_not_move_the_one_that_is_in_flight(event: Event) -> None:
    history = claim_again(refused(), at=25)
    before, after = action(history), action((*history, event))
    assert (after.state, after.attempts[1]) == (before.state, before.attempts[1])
    assert refusal((*history, event), at=31) == "action.already_settled"


@pytest.mark.parametrize(
    ("history", "waiting"),
    [
        (accepted(Operation.RUN_STATUS), True),
        (accepted(Operation.RUN_EVENTS), True),
        (wished(accepted(Operation.RUN_EVENTS)), False),
        (accepted(), False),
        (in_doubt(), False),
    ],
)
def test_a_waiting_read_is_a_read_that_is_not_settled(history: History, waiting: bool) -> None:
    assert actions.is_waiting_read(action(history)) is waiting
    assert not actions.is_waiting_read(Action())


@pytest.mark.proves("A105")
def test_an_approval_granted_under_another_policy_releases_nothing() -> None:
    changed = msgspec.structs.replace(POLICY, choices=("once", "deny", "session"))
    with pytest.raises(CallerError) as refused_claim:
        actions.claim(
            action(granted(Operation.RUN_STOP)),
            OWNER,
            TARGET,
            attempt_id="att_1",
            lease_valid=True,
            policy_hash=changed.hash,
            at=moment(20),
        )
    assert refused_claim.value.code == "policy.approval_not_granted"


def test_an_approval_that_nobody_decided_is_revoked_when_its_action_ends() -> None:
    waiting = action(awaiting(Operation.RUN_STOP))
    assert waiting.approval is not None
    assert waiting.approval.status == "pending"
    ended = waiting
    for event in wish_cancel(waiting, REQUESTER, "not needed", at=moment(5)):
        ended = evolve(ended, event, ended.version + 1)
    assert ended.approval is not None
    assert ended.approval.status == "revoked"
