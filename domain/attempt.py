"""Attempt: one sending of one unsafe mutation, at most once. Shared by start, approval and stop.

A claim is committed before the send. What comes back is recorded once as the attempt's result; anything that comes
after a result is late evidence. A claim without a provable result is *outcome unknown* and is never sent again.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from domain.errors import PREFIX
from domain.events import (
    AttemptAccepted,
    AttemptClaimed,
    AttemptClosed,
    AttemptUnknown,
    Event,
    EvidenceFound,
)
from domain.provider import Exchange, Judgement, Verdict
from domain.values import Effect, Plain


class AttemptState(StrEnum):
    """Where an attempt stands."""

    CLAIMED = "claimed"
    ACCEPTED = "accepted"
    CLOSED = "closed"
    UNKNOWN = "unknown"


NEXT: dict[tuple[AttemptState, type[Event]], AttemptState] = {
    (AttemptState.CLAIMED, AttemptAccepted): AttemptState.ACCEPTED,
    (AttemptState.CLAIMED, AttemptClosed): AttemptState.CLOSED,
    (AttemptState.CLAIMED, AttemptUnknown): AttemptState.UNKNOWN,
    (AttemptState.UNKNOWN, AttemptAccepted): AttemptState.ACCEPTED,
    (AttemptState.UNKNOWN, AttemptClosed): AttemptState.CLOSED,
    (AttemptState.UNKNOWN, EvidenceFound): AttemptState.ACCEPTED,
}
"""Transitions. A pair that is not here leaves the state as it is: the event is late evidence beside a result."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as its history tells it."""

    claim: AttemptClaimed
    state: AttemptState = AttemptState.CLAIMED
    accepted: AttemptAccepted | None = None
    closed: AttemptClosed | None = None
    unknown: AttemptUnknown | None = None
    found: EvidenceFound | None = None
    late: int = 0

    @property
    def effect(self) -> Effect:
        """What this attempt may have done in the world."""
        match self.state:
            case AttemptState.CLOSED:
                return Effect.NONE
            case AttemptState.ACCEPTED:
                return Effect.CONFIRMED
            case _:
                return Effect.POSSIBLE


def evolve(attempt: Attempt, event: Event) -> Attempt:
    """The attempt after one more event about it."""
    state = NEXT.get((attempt.state, type(event)))
    if state is None:
        return msgspec.structs.replace(attempt, late=attempt.late + 1)
    match event:
        case AttemptAccepted():
            return msgspec.structs.replace(attempt, state=state, accepted=event)
        case AttemptClosed():
            return msgspec.structs.replace(attempt, state=state, closed=event)
        case AttemptUnknown():
            return msgspec.structs.replace(attempt, state=state, unknown=event)
        case EvidenceFound():
            if event.proves != "applied":
                return msgspec.structs.replace(attempt, late=attempt.late + 1)
            return msgspec.structs.replace(attempt, state=state, found=event)
        case _:
            raise AssertionError(event)


def record(attempt: Attempt, judgement: Judgement, exchange: Exchange, digest: str, *, at: datetime) -> Event:
    """The event that keeps what came back for this attempt, also if a result or an unknown stands there already."""
    late = attempt.state is not AttemptState.CLAIMED
    attempt_id = attempt.claim.attempt_id
    answer = Plain(content=exchange.body)
    match judgement.verdict:
        case Verdict.ACCEPTED:
            return AttemptAccepted(
                at=at,
                attempt_id=attempt_id,
                http_status=judgement.http_status or 0,
                answer_digest=digest,
                answer=answer,
                run_id=judgement.run_id,
                choice=judgement.choice,
                resolved=judgement.resolved,
                state=judgement.state,
                replayed=judgement.replayed,
                late=late,
            )
        case Verdict.REFUSED | Verdict.NOT_SENT:
            return AttemptClosed(
                at=at,
                attempt_id=attempt_id,
                sent=judgement.verdict is Verdict.REFUSED,
                code=judgement.code if judgement.verdict is Verdict.REFUSED else PREFIX + "not_sent",
                cause=judgement.cause,
                http_status=judgement.http_status,
                provider_code=judgement.provider_code[:64],
                retry_after_ms=judgement.retry_after_ms,
                answer_digest=digest if exchange.body else "",
                answer=answer if exchange.body else None,
                late=late,
            )
        case Verdict.AMBIGUOUS:
            return AttemptUnknown(
                at=at,
                attempt_id=attempt_id,
                code=judgement.code,
                cause=judgement.cause,
                http_status=judgement.http_status,
                answer_digest=digest if exchange.body else "",
                answer=answer if exchange.body else None,
            )


def orphaned(attempt: Attempt, *, at: datetime) -> AttemptUnknown:
    """A claim that nobody performs any more: whether its request left is not known and never will be guessed."""
    return AttemptUnknown(at=at, attempt_id=attempt.claim.attempt_id, code=PREFIX + "transport", cause="sender_lost")


def never_sent(attempt: Attempt, cause: str, *, at: datetime) -> AttemptClosed:
    """The claiming process itself knows that no byte left."""
    return AttemptClosed(at=at, attempt_id=attempt.claim.attempt_id, sent=False, code=PREFIX + "not_sent", cause=cause)
