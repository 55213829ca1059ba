"""The one next step, for every state that an Action or a run can be in."""

from __future__ import annotations

from typing import Any

import pytest

from domain import approval as approvals
from domain.action import State
from domain.errors import PREFIX
from domain.events import (
    ActionSettled,
    ApprovalExpired,
    AttemptClosed,
    AttemptUnknown,
    ChoiceAnswered,
    EvidenceFound,
    StopAnswered,
    StopClaimed,
)
from domain.reconciler import (
    BACKOFF_MS,
    Facts,
    Hold,
    Record,
    Step,
    WaitUntil,
    answers_run,
    evidence,
    next_step,
)
from domain.stream import RunStream
from domain.values import Effect, Mode, Operation
from tests.builders import (
    ASK,
    OTHER,
    OWNER,
    REPLAYING,
    History,
    accepted,
    action,
    answer,
    asking,
    awaiting,
    bound,
    claim_again,
    claimed,
    closed,
    decided,
    denied,
    ended,
    error_body,
    frame,
    granted,
    in_doubt,
    missing,
    moment,
    not_sent,
    received,
    refused,
    result,
    run,
    seen,
    settled,
    stopped,
    stored,
    stream,
    subscribed,
    wished,
)

APPROVAL, STOP, START = Operation.RUN_APPROVAL, Operation.RUN_STOP, Operation.RUN_START
STATUS, EVENTS = Operation.RUN_STATUS, Operation.RUN_EVENTS
LATER = 30.0


def step_of(history: History, at: float = LATER, **facts: Any) -> Step:
    known = action(history)
    given: dict[str, Any] = {"action": known, "owner": OWNER}
    if known.request.run_id:
        given |= {"run": run(bound()), "stream": stream(stored(subscribed(at=11), asking(at=11)))}
    return next_step(Facts(**(given | facts)), at=moment(at))


def settlement(step: Step) -> ActionSettled:
    assert isinstance(step, Record)
    last = step.events[-1]
    assert isinstance(last, ActionSettled)
    return last


def word(step: Step) -> str:
    return f"{type(step).__name__} {getattr(step, 'why', '')}".strip()


ASYNC = {"mode": Mode.ASYNC, "deadline": moment(600), "timeout_ms": 600_000}

STEPS: list[tuple[str, History, str]] = [
    ("start accepted", accepted(), "Claim"),
    ("start accepted too late", accepted(deadline=moment(LATER)), "Record deadline_passed"),
    ("start claimed", claimed(), "Record sender_lost"),
    ("start unknown", in_doubt(), "Hold outcome_unknown"),
    ("start received", received(), "Record receipt_stored"),
    ("start refused", refused(), "Record attempt_closed"),
    ("start not sent", not_sent(), "Record attempt_closed"),
    ("start refused for now, async", refused(**ASYNC, at=29.5), "WaitUntil provider_refused_for_now"),
    ("start refused for now, async, later", refused(**ASYNC), "Claim"),
    ("start not sent, async", not_sent(**ASYNC), "Claim"),
    ("start refused for good, async", refused(status=400, code="bad", **ASYNC), "Record attempt_closed"),
    ("start settled", settled(), "Finished settled"),
    ("start cancelled", wished(accepted()), "Finished settled"),
    ("start wished", wished(in_doubt(), at=25), "Hold outcome_unknown"),
    ("status accepted", accepted(STATUS), "ReadStatus"),
    ("status too late", accepted(STATUS, deadline=moment(LATER)), "Record deadline_passed"),
    ("events accepted", accepted(EVENTS), "WaitUntil following"),
    *(
        (f"{operation.value} {name}", story(operation), then)
        for operation in (APPROVAL, STOP)
        for name, story, then in (
            ("waits for a person", awaiting, "WaitUntil awaiting_approval"),
            ("granted", granted, "Claim"),
            ("denied", denied, "Finished settled"),
            ("claimed", claimed, "Record sender_lost"),
            ("unknown", in_doubt, "Hold outcome_unknown"),
            ("received", received, "Record receipt_stored"),
            ("refused", refused, "Record attempt_closed"),
            ("not sent", not_sent, "Record attempt_closed"),
            ("settled", settled, "Finished settled"),
        )
    ),
]


@pytest.mark.parametrize(("name", "history", "then"), STEPS, ids=[row[0] for row in STEPS])
def test_every_state_has_one_next_step(name: str, history: History, then: str) -> None:
    assert word(step_of(history)) == then


def test_every_reachable_state_has_a_row() -> None:
    found = {(action(history).request.operation, action(history).state) for _, history, _ in STEPS}
    sendable = {State.READY, State.CLAIMED, State.CLOSED, State.UNKNOWN, State.RECEIVED, State.SETTLED}
    assert found == {
        *((START, state) for state in sendable),
        *((operation, state) for operation in (APPROVAL, STOP) for state in sendable | {State.AWAITING}),
        (STATUS, State.READY),
        (EVENTS, State.READY),
    }


@pytest.mark.parametrize(("name", "history", "then"), STEPS, ids=[row[0] for row in STEPS])
def test_whoever_is_not_the_owner_does_nothing(name: str, history: History, then: str) -> None:
    expected = then if then.startswith("Finished") else "Hold owned_elsewhere"
    assert word(step_of(history, owner=OTHER)) == expected


# ---- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [START, APPROVAL, STOP])
def test_a_claim_is_left_alone_while_this_process_performs_it(operation: Operation) -> None:
    assert word(step_of(claimed(operation), in_flight=frozenset({"att_1"}))) == "Hold in_flight"


@pytest.mark.proves("A142")
@pytest.mark.parametrize("operation", [START, APPROVAL, STOP])
def test_a_claim_that_nobody_performs_becomes_unknown_and_is_not_sent(operation: Operation) -> None:
    step = step_of(claimed(operation), in_flight=frozenset({"att_7"}))
    assert isinstance(step, Record)
    (event,) = step.events
    assert isinstance(event, AttemptUnknown)
    after = action((*claimed(operation), event))
    assert (after.state, after.effect) == (State.UNKNOWN, Effect.POSSIBLE)


def test_a_claim_that_this_process_knows_it_did_not_send_is_closed() -> None:
    step = step_of(claimed(), unsent=frozenset({"att_1"}))
    assert isinstance(step, Record)
    (event,) = step.events
    assert isinstance(event, AttemptClosed)
    assert (event.sent, step.why) == (False, "claimed_but_not_sent")


def test_an_endpoint_that_is_not_configured_holds_the_claim_back_until_the_deadline() -> None:
    step = step_of(accepted(), admitted=False)
    assert step == WaitUntil(at=moment(60), why="endpoint_not_admitted")
    assert word(step_of(not_sent(**ASYNC), admitted=False)) == "WaitUntil endpoint_not_admitted"


@pytest.mark.proves("A149")
@pytest.mark.parametrize(
    ("history", "status", "code"),
    [
        (accepted(), "expired", "action.expired"),
        (accepted(STATUS), "failed", PREFIX + "deadline_exceeded"),
    ],
)
def test_a_deadline_that_passed_before_anything_was_sent_settles_without_effect(
    history: History, status: str, code: str
) -> None:
    made = settlement(step_of(history, at=60))
    assert (made.status, made.code, made.effect) == (status, code, Effect.NONE)


# ---- approvals -------------------------------------------------------------------------------------------------------


@pytest.mark.proves("A106", "A109")
@pytest.mark.parametrize("operation", [APPROVAL, STOP])
def test_a_mutation_that_nobody_decides_ends_after_15_minutes_with_nothing_sent(operation: Operation) -> None:
    assert step_of(awaiting(operation)) == WaitUntil(at=moment(900), why="awaiting_approval")
    step = step_of(awaiting(operation), at=900)
    assert isinstance(step, Record)
    assert [type(event) for event in step.events] == [ApprovalExpired, ActionSettled]
    assert settlement(step).code == "policy.approval_expired"
    after = action((*awaiting(operation), *step.events))
    assert after.approval is not None
    assert (after.approval.status, after.attempts, after.effect) == ("expired", (), Effect.NONE)


@pytest.mark.proves("A106")
def test_a_grant_that_is_used_too_late_lets_nothing_go() -> None:
    late = granted(STOP, at=890)
    assert word(step_of(late, at=899.9)) == "Claim"
    assert settlement(step_of(late, at=900)).code == "policy.approval_expired"


def test_a_policys_own_grant_leads_straight_to_the_claim() -> None:
    direct = approvals.TenantPolicy(id="acme", direct=("run_stop",))
    assert word(step_of(awaiting(STOP, policy=direct))) == "Claim"


@pytest.mark.proves("A095")
@pytest.mark.parametrize("choice", ["once", "deny"])
def test_a_denied_action_leads_to_no_claim_whatever_its_choice(choice: str) -> None:
    history = denied(APPROVAL, choice=choice)
    assert word(step_of(history)) == "Finished settled"
    assert action(history).attempts == ()


# ---- refused before the claim ----------------------------------------------------------------------------------------

TWO = stream(stored(subscribed(at=11), asking(ASK, at=11), asking("a2", at=11)))


@pytest.mark.proves("A094", "A100", "A108", "A137")
@pytest.mark.parametrize(
    ("operation", "facts", "members", "code"),
    [
        (STOP, {"run": run(ended(bound()))}, {}, "run.already_terminal"),
        (STOP, {"run": None}, {}, "action.not_found"),
        (APPROVAL, {"run": None}, {}, "action.not_found"),
        (APPROVAL, {"run": run(ended(bound()))}, {}, "run.already_terminal"),
        (APPROVAL, {"run": run(stopped(bound()))}, {}, "approval.after_stop"),
        (APPROVAL, {"run": run(decided(bound(), (1,), "unknown"))}, {}, "approval.already_decided"),
        (APPROVAL, {"stream": None}, {}, "approval.not_pending"),
        (APPROVAL, {"stream": TWO}, {"reviewed": ("a2",)}, "approval.not_oldest"),
        (APPROVAL, {"stream": TWO}, {"resolve_all": True}, "approval.review_required"),
        (APPROVAL, {}, {"reviewed": ()}, "approval.review_required"),
        (APPROVAL, {"approval_timeout_ms": 5_000}, {}, "approval.provider_timeout"),
        (APPROVAL, {}, {"choice": "all"}, "approval.choice_not_offered"),
    ],
)
def test_what_must_not_be_sent_settles_without_effect_and_without_a_claim(
    operation: Operation, facts: dict[str, Any], members: dict[str, Any], code: str
) -> None:
    step = step_of(granted(operation, **members), **facts)
    made = settlement(step)
    assert (made.status, made.code, made.effect, word(step)) == (
        "failed",
        code,
        Effect.NONE,
        "Record refused_before_sending",
    )


# ---- further attempts of a start -------------------------------------------------------------------------------------


@pytest.mark.proves("A155")
def test_a_refused_start_pauses_longer_each_time_and_never_past_its_deadline() -> None:
    history, at = accepted(**ASYNC), 10.0
    for pause in (*BACKOFF_MS, BACKOFF_MS[-1]):
        history = result(claim_again(history, at), answer(429, error_body("rate_limit_exceeded")), at)
        due = moment(at + pause / 1000)
        assert step_of(history, at) == WaitUntil(at=due, why="provider_refused_for_now")
        at += pause / 1000
        assert word(step_of(history, at)) == "Claim"
    assert word(step_of(history, 600)) == "Record no_time_for_another_attempt"
    assert all(attempt.effect is Effect.NONE for attempt in action(history).attempts)


@pytest.mark.proves("A155")
def test_the_providers_hint_prolongs_the_pause() -> None:
    assert step_of(refused(**ASYNC, retry_after="20")) == WaitUntil(at=moment(41), why="provider_refused_for_now")
    assert settlement(step_of(refused(**ASYNC, retry_after="999"))).retry_after_ms == 999_000


@pytest.mark.proves("A142", "A155")
def test_a_start_in_doubt_that_a_late_refusal_closed_is_not_started_again() -> None:
    history = result(in_doubt(**ASYNC), answer(429, error_body("rate_limit_exceeded")), at=25)
    assert word(step_of(history)) == "Record attempt_closed"


@pytest.mark.proves("A117")
def test_a_cancel_that_came_during_a_refused_sending_permits_no_further_attempt() -> None:
    history = result(wished(claimed(**ASYNC), at=20.5), answer(429, error_body("rate_limit_exceeded")))
    made = settlement(step_of(history))
    assert (made.status, made.code, made.effect) == ("cancelled", "action.cancelled", Effect.NONE)


@pytest.mark.parametrize("operation", [APPROVAL, STOP])
@pytest.mark.parametrize("story", [refused, not_sent])
def test_a_choice_or_stop_is_attempted_once(operation: Operation, story: Any) -> None:
    assert word(step_of(story(operation))) == "Record attempt_closed"


# ---- unknown outcomes ------------------------------------------------------------------------------------------------

DOUBT = decided(bound(), (1,), "unknown")
ANSWERED = stored(subscribed(at=11), asking(at=11), frame("approval.responded", 22, choice="once", resolved=1))


@pytest.mark.proves("A136", "A142")
@pytest.mark.parametrize("at", [LATER, 3_600, 10**7])
@pytest.mark.parametrize("operation", [START, APPROVAL, STOP])
def test_no_passing_time_turns_an_unknown_outcome_into_anything_else(operation: Operation, at: float) -> None:
    assert step_of(in_doubt(operation), at) == Hold(why="outcome_unknown")


@pytest.mark.proves("A137")
def test_the_providers_own_frame_about_our_choice_proves_that_it_was_applied() -> None:
    step = step_of(in_doubt(APPROVAL), run=run(DOUBT), stream=stream(ANSWERED))
    assert isinstance(step, Record)
    (found,) = step.events
    assert isinstance(found, EvidenceFound)
    assert (found.attempt_id, found.proves, found.source, found.reference) == (
        "att_1",
        "applied",
        "approval.responded",
        "stream:2",
    )
    assert action((*in_doubt(APPROVAL), found)).state is State.RECEIVED


@pytest.mark.proves("A137")
@pytest.mark.parametrize(
    ("run_history", "frames"),
    [
        (DOUBT, stored(subscribed(at=11), asking(at=11))),
        (DOUBT, stored(subscribed(at=11), asking(at=11), frame("approval.responded", 22, choice="deny", resolved=1))),
        (DOUBT, stored(subscribed(at=11), asking(at=11), frame("tool.completed", 22))),
        (decided(bound(), (2,), "unknown"), ANSWERED),
        (bound(), ANSWERED),
        (ended(DOUBT, "completed"), closed(stored(subscribed(at=11), asking(at=11)))),
    ],
)
def test_nothing_else_proves_what_became_of_a_choice(run_history: History, frames: History) -> None:
    assert word(step_of(in_doubt(APPROVAL), run=run(run_history), stream=stream(frames))) == "Hold outcome_unknown"


@pytest.mark.proves("A138")
@pytest.mark.parametrize(
    "history",
    [
        stopped(bound(), "unknown"),
        seen(stopped(bound(), "unknown"), "stopping"),
        missing(stopped(bound(), "unknown")),
        ended(stopped(bound(), "unknown"), "completed"),
        ended(stopped(bound(), "unknown"), "failed"),
    ],
)
def test_neither_stopping_nor_absence_nor_another_end_proves_a_stop(history: History) -> None:
    assert word(step_of(in_doubt(STOP), run=run(history))) == "Hold outcome_unknown"


@pytest.mark.proves("A138")
@pytest.mark.parametrize(
    ("verdict", "proved"), [("accepted", False), ("unknown", False), ("", False), ("refused", True)]
)
def test_a_cancelled_run_proves_a_stop_only_if_no_other_stop_may_have_reached_it(verdict: str, proved: bool) -> None:
    other = StopClaimed(at=moment(3), action_id="act_2", attempt_id="att_2")
    answer = StopAnswered(at=moment(4), action_id="act_2", attempt_id="att_2", verdict=verdict)
    others = (other, answer) if verdict else (other,)
    history = ended((*stopped(bound(), "unknown"), *others), "cancelled")
    assert isinstance(step_of(in_doubt(STOP), run=run(history)), Record) is proved


def test_evidence_needs_an_attempt_and_a_run() -> None:
    for facts in (
        Facts(action=action(granted(STOP)), owner=OWNER, run=run(bound())),
        Facts(action=action(in_doubt(STOP)), owner=OWNER),
        Facts(action=action(in_doubt()), owner=OWNER, run=run(ended(bound(), "cancelled"))),
    ):
        assert evidence(facts, at=moment(LATER)) is None


# ---- what an attempt means for its run -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "verdict", "code"),
    [
        (received, "accepted", ""),
        (in_doubt, "unknown", PREFIX + "transport"),
        (refused, "refused", PREFIX + "remote_refused_temporarily"),
        (not_sent, "not_sent", PREFIX + "not_sent"),
    ],
)
def test_a_run_is_told_what_became_of_a_choice_or_stop(story: Any, verdict: str, code: str) -> None:
    (choice,) = answers_run(action(story(APPROVAL)), at=moment(LATER))
    (stop,) = answers_run(action(story(STOP)), at=moment(LATER))
    assert isinstance(choice, ChoiceAnswered)
    assert isinstance(stop, StopAnswered)
    assert (choice.verdict, choice.code, choice.resolved) == (verdict, code, 1 if verdict == "accepted" else None)
    assert (stop.verdict, stop.code, stop.state) == (verdict, code, "stopping" if verdict == "accepted" else "")


@pytest.mark.parametrize("history", [received(), accepted(STATUS), granted(STOP)])
def test_a_start_a_read_or_an_unsent_stop_tells_a_run_nothing(history: History) -> None:
    assert answers_run(action(history), at=moment(LATER)) == ()


# ---- reading events --------------------------------------------------------------------------------------------------


def delivered(*kinds: str, over: bool = False) -> RunStream:
    history = stored(subscribed(), *(frame(kind) for kind in kinds))
    return stream(closed(history) if over else history)


@pytest.mark.proves("A015", "A090", "A091")
@pytest.mark.parametrize(
    ("frames", "limit", "at", "status", "code", "terminal"),
    [
        (delivered("a", "run.completed"), 4_096, LATER, "completed", "", True),
        (delivered("a", "run.cancelled"), 4_096, LATER, "cancelled", "", True),
        (delivered("a", "run.failed"), 4_096, LATER, "failed", "stream_failed", True),
        (delivered("a", "run.interrupted"), 4_096, LATER, "failed", "stream_failed", True),
        (delivered("a", over=True), 4_096, LATER, "failed", "stream_incomplete", False),
        (delivered(over=True), 4_096, LATER, "failed", "stream_incomplete", False),
        (delivered("a", "b"), 2, LATER, "failed", "stream_truncated", False),
        (delivered("a", "run.completed"), 2, LATER, "failed", "stream_truncated", False),
        (delivered("a", "run.completed", "b"), 3, LATER, "completed", "", True),
        (delivered("a"), 4_096, 300, "failed", "deadline_exceeded", False),
    ],
)
def test_an_event_read_ends_with_a_terminal_frame_or_says_that_it_is_incomplete(
    frames: RunStream, limit: int, at: float, status: str, code: str, terminal: bool
) -> None:
    made = settlement(step_of(accepted(EVENTS, max_events=limit), at, stream=frames))
    assert (made.status, made.code, made.details["terminal"]) == (status, PREFIX + code if code else "", terminal)
    assert made.details["truncated"] is (code == "stream_truncated")


@pytest.mark.proves("A021")
def test_an_event_read_follows_until_300_seconds() -> None:
    assert step_of(accepted(EVENTS), 299.9, stream=delivered("a")) == WaitUntil(at=moment(300), why="following")
    assert word(step_of(accepted(EVENTS), stream=RunStream())) == "WaitUntil following"


def test_an_event_read_waits_for_a_resumption_where_the_provider_replays() -> None:
    resumable = {"run": run(bound(REPLAYING)), "stream": delivered("a", over=True)}
    assert word(step_of(accepted(EVENTS), **resumable)) == "WaitUntil following"
    assert settlement(step_of(accepted(EVENTS), 80, **resumable)).code == PREFIX + "stream_incomplete"
    over = resumable | {"run": run(ended(bound(REPLAYING)))}
    assert settlement(step_of(accepted(EVENTS), **over)).code == PREFIX + "stream_incomplete"


def test_an_event_read_of_a_run_that_is_not_ours_finds_nothing() -> None:
    assert settlement(step_of(accepted(EVENTS), run=None)).code == "action.not_found"
