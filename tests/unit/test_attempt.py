"""One sending: what comes back is recorded once, what comes after is evidence, and nothing is sent again."""

from __future__ import annotations

import pytest

from domain import attempt as attempts
from domain.attempt import NEXT, Attempt, AttemptState
from domain.events import (
    AttemptAccepted,
    AttemptClaimed,
    AttemptClosed,
    AttemptUnknown,
    Event,
    EvidenceFound,
)
from domain.provider import Exchange, Failure, Judgement, Verdict, judge
from domain.values import Effect, Operation, Plain
from tests.builders import PREFIX, RUN, action, answer, broken, claimed, error_body, moment, receipt_of

AFTER_CLAIM = moment(21)


def attempt(operation: Operation = Operation.RUN_START) -> Attempt:
    known = action(claimed(operation)).attempt
    assert known is not None
    return known


def record(known: Attempt, exchange: Exchange) -> Event:
    judgement = judge(known.claim.operation, exchange, known.claim.run_id)
    return attempts.record(known, judgement, exchange, "d1", at=AFTER_CLAIM)


def after(known: Attempt, *exchanges: Exchange) -> Attempt:
    for exchange in exchanges:
        known = attempts.evolve(known, record(known, exchange))
    return known


def found(proves: str = "applied") -> EvidenceFound:
    return EvidenceFound(at=AFTER_CLAIM, attempt_id="att_1", proves=proves, source="run.cancelled", reference="run:9")


ACCEPTED = receipt_of(Operation.RUN_START)
REFUSED = answer(400, error_body("bad"))
NOT_SENT = broken(Failure.DNS, sent=False)
LOST = broken(Failure.READ_ERROR)


@pytest.mark.parametrize(
    ("exchange", "kind", "state", "effect"),
    [
        (ACCEPTED, AttemptAccepted, AttemptState.ACCEPTED, Effect.CONFIRMED),
        (REFUSED, AttemptClosed, AttemptState.CLOSED, Effect.NONE),
        (NOT_SENT, AttemptClosed, AttemptState.CLOSED, Effect.NONE),
        (LOST, AttemptUnknown, AttemptState.UNKNOWN, Effect.POSSIBLE),
        (answer(500, error_body()), AttemptUnknown, AttemptState.UNKNOWN, Effect.POSSIBLE),
        (answer(202, {}), AttemptUnknown, AttemptState.UNKNOWN, Effect.POSSIBLE),
    ],
)
def test_each_verdict_is_recorded_as_one_event_and_one_state(
    exchange: Exchange, kind: type[Event], state: AttemptState, effect: Effect
) -> None:
    event = record(attempt(), exchange)
    known = attempts.evolve(attempt(), event)
    assert (type(event), known.state, known.effect, known.late) == (kind, state, effect, 0)


def test_a_claim_alone_may_already_have_had_its_effect() -> None:
    assert (attempt().state, attempt().effect) == (AttemptState.CLAIMED, Effect.POSSIBLE)


@pytest.mark.proves("A102")
def test_a_receipt_keeps_exact_bytes_digest_choice_and_count() -> None:
    exchange = answer(200, {"run_id": RUN, "choice": "once", "resolved": 2})
    event = record(attempt(Operation.RUN_APPROVAL), exchange)
    assert isinstance(event, AttemptAccepted)
    assert (event.choice, event.resolved, event.http_status) == ("once", 2, 200)
    assert (event.answer, event.answer_digest) == (Plain(content=exchange.body), "d1")


@pytest.mark.proves("A158")
def test_a_refusal_keeps_status_provider_code_hint_and_body() -> None:
    exchange = answer(429, error_body("rate_limit_exceeded"), retry_after="1")
    event = record(attempt(), exchange)
    assert isinstance(event, AttemptClosed)
    assert (event.sent, event.code, event.http_status) == (True, PREFIX + "remote_refused_temporarily", 429)
    assert (event.provider_code, event.retry_after_ms) == ("rate_limit_exceeded", 1_000)
    assert event.answer == Plain(content=exchange.body)


def test_what_never_left_is_closed_under_one_code_with_its_cause() -> None:
    event = record(attempt(), broken(Failure.TLS, sent=False))
    assert isinstance(event, AttemptClosed)
    assert (event.sent, event.code, event.cause, event.answer) == (False, PREFIX + "not_sent", "tls", None)


@pytest.mark.proves("A148")
def test_an_answer_over_our_bound_is_unknown_with_what_was_read_of_it() -> None:
    exchange = Exchange(sent=True, failure=Failure.TOO_LARGE, status=202, body=b"x" * 100)
    event = record(attempt(), exchange)
    assert isinstance(event, AttemptUnknown)
    assert (event.cause, event.answer_digest, event.answer) == ("too_large", "d1", Plain(content=b"x" * 100))


def test_a_long_provider_code_is_cut() -> None:
    event = record(attempt(), answer(400, error_body("c" * 500)))
    assert isinstance(event, AttemptClosed)
    assert event.provider_code == "c" * 64


@pytest.mark.parametrize(("exchange", "state"), [(ACCEPTED, AttemptState.ACCEPTED), (REFUSED, AttemptState.CLOSED)])
def test_a_late_receipt_refines_an_unknown_and_is_marked_late(exchange: Exchange, state: AttemptState) -> None:
    unknown = after(attempt(), LOST)
    event = record(unknown, exchange)
    assert isinstance(event, AttemptAccepted | AttemptClosed)
    assert event.late is True
    known = attempts.evolve(unknown, event)
    assert (known.state, known.unknown) == (state, unknown.unknown)


@pytest.mark.parametrize("first", [ACCEPTED, REFUSED, NOT_SENT])
@pytest.mark.parametrize("second", [ACCEPTED, REFUSED, NOT_SENT, LOST])
def test_a_second_result_stands_beside_the_first_and_changes_nothing(first: Exchange, second: Exchange) -> None:
    once = after(attempt(), first)
    twice = after(once, second)
    assert (twice.state, twice.accepted, twice.closed, twice.unknown) == (
        once.state,
        once.accepted,
        once.closed,
        once.unknown,
    )
    assert twice.late == once.late + 1


@pytest.mark.proves("A142")
def test_an_orphaned_claim_becomes_unknown_and_never_less_than_possible() -> None:
    event = attempts.orphaned(attempt(), at=AFTER_CLAIM)
    known = attempts.evolve(attempt(), event)
    assert (event.cause, known.state, known.effect) == ("sender_lost", AttemptState.UNKNOWN, Effect.POSSIBLE)


def test_the_claiming_process_alone_knows_that_it_did_not_send() -> None:
    event = attempts.never_sent(attempt(), "claim_in_doubt", at=AFTER_CLAIM)
    known = attempts.evolve(attempt(), event)
    assert (event.sent, event.cause, known.state, known.effect) == (
        False,
        "claim_in_doubt",
        AttemptState.CLOSED,
        Effect.NONE,
    )


def test_evidence_refines_an_unknown_only_if_it_proves_something() -> None:
    unknown = after(attempt(Operation.RUN_STOP), LOST)
    proved, unproved = attempts.evolve(unknown, found()), attempts.evolve(unknown, found("nothing"))
    assert (proved.state, proved.effect, proved.found) == (AttemptState.ACCEPTED, Effect.CONFIRMED, found())
    assert (unproved.state, unproved.found, unproved.late) == (AttemptState.UNKNOWN, None, 1)


def claim_event() -> AttemptClaimed:
    return attempt().claim


EVENTS: dict[type[Event], Event] = {
    AttemptAccepted: record(attempt(), ACCEPTED),
    AttemptClosed: record(attempt(), REFUSED),
    AttemptUnknown: record(attempt(), LOST),
    EvidenceFound: found(),
    AttemptClaimed: claim_event(),
}
HISTORIES: dict[AttemptState, Attempt] = {
    AttemptState.CLAIMED: attempt(),
    AttemptState.ACCEPTED: after(attempt(), ACCEPTED),
    AttemptState.CLOSED: after(attempt(), REFUSED),
    AttemptState.UNKNOWN: after(attempt(), LOST),
}


@pytest.mark.parametrize("state", AttemptState)
@pytest.mark.parametrize("kind", EVENTS)
def test_an_event_that_the_table_does_not_name_changes_no_state(state: AttemptState, kind: type[Event]) -> None:
    known = attempts.evolve(HISTORIES[state], EVENTS[kind])
    assert known.state is NEXT.get((state, kind), state)


def test_no_row_of_the_table_leads_back_to_a_claim_or_out_of_a_result() -> None:
    assert AttemptState.CLAIMED not in NEXT.values()
    assert {state for state, _ in NEXT} == {AttemptState.CLAIMED, AttemptState.UNKNOWN}
    assert {
        (AttemptState.CLAIMED, AttemptAccepted): AttemptState.ACCEPTED,
        (AttemptState.CLAIMED, AttemptClosed): AttemptState.CLOSED,
        (AttemptState.CLAIMED, AttemptUnknown): AttemptState.UNKNOWN,
        (AttemptState.UNKNOWN, AttemptAccepted): AttemptState.ACCEPTED,
        (AttemptState.UNKNOWN, AttemptClosed): AttemptState.CLOSED,
        (AttemptState.UNKNOWN, EvidenceFound): AttemptState.ACCEPTED,
    } == NEXT


def test_a_result_without_a_body_keeps_no_empty_content() -> None:
    judgement = Judgement(verdict=Verdict.NOT_SENT, code=PREFIX + "not_sent", cause="lease_ran_out")
    event = attempts.record(attempt(), judgement, Exchange(sent=False), "d1", at=AFTER_CLAIM)
    assert isinstance(event, AttemptClosed)
    assert (event.answer, event.answer_digest, event.cause) == (None, "", "lease_ran_out")
