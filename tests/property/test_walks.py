"""Walks through a world that answers, loses, refuses, cancels and crashes as it likes, and counts what it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from domain import action as actions
from domain import attempt as attempts
from domain import binding
from domain.action import Action, State
from domain.binding import Phase
from domain.contracts import CONTRACTS
from domain.events import Event
from domain.provider import Exchange, Failure, judge, read_status
from domain.reconciler import Claim, Facts, Record, RecordRun, RunFacts, next_run_step, next_step
from domain.values import MUTATIONS, Effect, Mode, Operation, sha256
from tests.builders import (
    APPROVER,
    ASK,
    OWNER,
    POLICY,
    REQUESTER,
    RUN,
    TARGET,
    accepted,
    action,
    answer,
    asking,
    awaiting,
    bound,
    broken,
    closed,
    error_body,
    frame,
    moment,
    receipt_of,
    run,
    stored,
    stream,
    subscribed,
)

ANSWERS: dict[str, Callable[[Operation], Exchange]] = {
    "receipt": receipt_of,
    "refused for now": lambda _: answer(429, error_body("rate_limit_exceeded"), retry_after="1"),
    "refused": lambda _: answer(400, error_body("bad")),
    "server fault": lambda _: answer(500, b""),
    "lost": lambda _: broken(Failure.READ_ERROR),
    "not sent": lambda _: broken(Failure.DNS, sent=False),
}


DID_NOTHING = ("refused for now", "refused", "not sent")


class Walk:
    """One Action and its world. ``acted`` is the world's own count of sendings that may have had an effect."""

    def __init__(self, operation: Operation, mode: Mode) -> None:
        timeout = {"deadline": moment(900), "timeout_ms": 900_000} if mode is Mode.ASYNC else {}
        begin = awaiting if CONTRACTS[operation].approval else accepted
        self.events: list[Event] = [*begin(operation, mode=mode, **timeout)]
        self.clock = 11.0
        self.sent: dict[str, Exchange | None] = {}
        self.in_flight: frozenset[str] = frozenset()
        self.acted = 0
        self.wished_when_sent = False

    @property
    def action(self) -> Action:
        return action(self.events)

    def step(self, reply: str) -> None:
        known = self.action
        facts = Facts(
            action=known,
            owner=OWNER,
            in_flight=self.in_flight,
            run=run(bound()),
            stream=stream(stored(subscribed(at=11), asking(ASK, at=11))),
            approval_timeout_ms=3_600_000,
        )
        step = next_step(facts, at=moment(self.clock))
        if isinstance(step, Record):
            self.events += step.events
        elif isinstance(step, Claim):
            claim = actions.claim(
                known,
                OWNER,
                TARGET,
                attempt_id=f"att_{len(known.attempts) + 1}",
                lease_valid=True,
                policy_hash=POLICY.hash,
                at=moment(self.clock),
            )
            self.wished_when_sent |= known.cancel is not None
            self.events.append(claim)
            self.sent[claim.attempt_id] = ANSWERS[reply](known.request.operation)
            self.in_flight |= {claim.attempt_id}
            self.acted += reply not in DID_NOTHING

    def hear(self) -> None:
        """The oldest answer that is still on its way arrives, in time or late."""
        for attempt in self.action.attempts:
            exchange = self.sent.pop(attempt.claim.attempt_id, None)
            if exchange is not None:
                judgement = judge(attempt.claim.operation, exchange, attempt.claim.run_id)
                digest = sha256(exchange.body)
                self.events.append(attempts.record(attempt, judgement, exchange, digest, at=moment(self.clock)))
                self.in_flight -= {attempt.claim.attempt_id}
                return

    def decide(self, *, granted: bool) -> None:
        if self.action.state is State.AWAITING and self.clock < 900:
            self.events += actions.decide_approval(
                self.action, POLICY, APPROVER, granted=granted, reason="r", decision_id="d", at=moment(self.clock)
            )

    def cancel(self) -> None:
        if self.action.settled is None:
            self.events += actions.wish_cancel(self.action, REQUESTER, "", at=moment(self.clock))


MOVES = st.sampled_from(["step", "step", "step", "hear", "hear", "crash", "grant", "deny", "cancel", "wait"])


@pytest.mark.proves("A134", "A142")
@settings(max_examples=1_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(MUTATIONS)),
    st.sampled_from([Mode.SYNC, Mode.ASYNC]),
    st.lists(
        st.tuples(MOVES, st.sampled_from(sorted(ANSWERS)), st.sampled_from([0, 0.5, 3, 40])), min_size=10, max_size=24
    ),
)
def test_at_most_one_sending_is_without_proof_that_it_had_no_effect(
    operation: Operation, mode: Mode, moves: list[tuple[str, str, float]]
) -> None:
    walk = Walk(operation, mode)
    answered = None
    for move, reply, seconds in moves:
        match move:
            case "step":
                walk.step(reply)
            case "hear":
                walk.hear()
            case "crash":
                walk.in_flight = frozenset()
            case "grant" | "deny":
                walk.decide(granted=move == "grant")
            case "cancel":
                walk.cancel()
            case _:
                walk.clock += 100
        walk.clock += seconds
        known = walk.action
        answered = answered or known.settled
        assert walk.acted <= 1
        assert sum(attempt.effect is not Effect.NONE for attempt in known.attempts) <= 1
        assert walk.acted == 0 or known.effect is not Effect.NONE
        assert known.settled == answered
        assert not walk.wished_when_sent
        if operation is not Operation.RUN_START:
            assert len(known.attempts) <= 1
        if known.settled is not None and known.settled.effect is Effect.NONE:
            assert known.effect is Effect.NONE


SIGHTS = ("running", "stopping", "completed", "failed", "404", "500", "frame", "close", "step")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(SIGHTS), max_size=16),
    st.booleans(),
)
def test_a_run_ends_only_by_a_terminal_word_and_every_step_of_observing_it_can_be_decided(
    moves: list[str], live: bool
) -> None:
    of_run: tuple[Event, ...] = bound(deadline=20)
    of_stream: tuple[Event, ...] = subscribed()
    for number, move in enumerate(moves):
        at = moment(10 + number * 3)
        known, frames_seen = run(of_run), stream(of_stream)
        if move == "step":
            facts = RunFacts(run=known, stream=frames_seen, owner=OWNER, live=live and frames_seen.open)
            step = next_run_step(facts, at=at)
            if isinstance(step, RecordRun):
                of_run, of_stream = (*of_run, *step.run), (*of_stream, *step.stream)
        elif move == "frame":
            of_stream = stored(of_stream, frame("message.delta"))
        elif move == "close":
            of_stream = closed(of_stream) if frames_seen.open else of_stream
        else:
            body = {"object": "hermes.run", "run_id": RUN, "status": move}
            exchange = answer(404, error_body("run_not_found")) if move == "404" else answer(200, body)
            exchange = answer(500, b"") if move == "500" else exchange
            of_run = (*of_run, *binding.observe_status(known, read_status(exchange, RUN), exchange, "d", at=at))
    said = {move for move in moves if move in ("completed", "failed")}
    known = run(of_run)
    assert (known.ended is not None) is bool(said)
    assert (known.phase is Phase.CONTRADICTED) is (len(said) == 2)
    gaps = stream(of_stream).gaps
    assert all(gap.before is None or gap.before > gap.after for gap in gaps)
