"""Binding: one Action tied to one Hermes run, with everything known about that tie.

The run's state comes from terminal evidence or from the last thing that was seen; a ``404``, a closed stream or silence
ends nothing (runs page, Poll run status; runbook, Recover by provider state owner).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum

import msgspec

from domain.errors import CallerError
from domain.events import (
    ChoiceAnswered,
    ChoiceClaimed,
    EndDisputed,
    Event,
    IntegrityMarked,
    OwnerChanged,
    RunBound,
    RunDeadlinePassed,
    RunEnded,
    StatusSeen,
    StatusUnread,
    StopAnswered,
    StopClaimed,
)
from domain.history import Recorded
from domain.provider import TERMINAL_STATES, Exchange, StatusReading
from domain.stream import PendingAsk, RunStream
from domain.values import Fence, Plain, Private, after

# The provider counts from before we see its request: a choice in the last moments could meet the next request.
PROVIDER_MARGIN_MS = 1_000


class Phase(StrEnum):
    """How much is known of a run."""

    NEW = "new"
    FOLLOWED = "followed"
    LOST = "evidence_lost"
    ENDED = "ended"
    CONTRADICTED = "contradicted"


NEXT: dict[tuple[Phase, type[Event]], Phase] = {
    (Phase.NEW, RunBound): Phase.FOLLOWED,
    (Phase.FOLLOWED, StatusUnread): Phase.LOST,
    (Phase.LOST, StatusSeen): Phase.FOLLOWED,
    (Phase.FOLLOWED, RunEnded): Phase.ENDED,
    (Phase.LOST, RunEnded): Phase.ENDED,
    (Phase.ENDED, EndDisputed): Phase.CONTRADICTED,
}
"""Transitions. A failed read that does not say that the run is missing, and a dispute by a word that is no end, are
evidence only; no observation leads out of an end."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that was claimed for this run, and what became of it."""

    claim: ChoiceClaimed
    answer: ChoiceAnswered | None = None


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """A stop that was claimed for this run, and what became of it."""

    claim: StopClaimed
    answer: StopAnswered | None = None

    @property
    def may_have_acted(self) -> bool:
        """False only if the stop was refused or never sent."""
        return self.answer is None or self.answer.verdict in ("accepted", "unknown")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run as its history tells it."""

    version: int = 0
    phase: Phase = Phase.NEW
    bound: RunBound | None = None
    owner: Fence | None = None
    seen: StatusSeen | None = None
    seen_version: int = 0
    unread: StatusUnread | None = None
    choices: tuple[Choice, ...] = ()
    stops: tuple[Stop, ...] = ()
    ended: RunEnded | None = None
    confirmed: bool = False
    disputes: tuple[EndDisputed, ...] = ()
    integrity: tuple[IntegrityMarked, ...] = ()
    deadline_passed_at: datetime | None = None

    @property
    def tie(self) -> RunBound:
        """The receipt that bound the run; there is no run without it."""
        if self.bound is None:
            raise CallerError("action.not_found")
        return self.bound

    @property
    def stop_sent(self) -> bool:
        """True once a stop may have reached the provider."""
        return any(stop.may_have_acted for stop in self.stops)


def _moves(run: Run, event: Event) -> bool:
    """Whether this event is of the kind that the table speaks about."""
    match event:
        case StatusUnread():
            return event.missing
        case EndDisputed():
            return event.state in TERMINAL_STATES and run.ended is not None and event.state != run.ended.state
        case _:
            return True


def evolve(run: Run, event: Event, version: int) -> Run:
    """The run after one more event."""
    replace = msgspec.structs.replace
    phase = NEXT.get((run.phase, type(event)), run.phase) if _moves(run, event) else run.phase
    run = replace(run, version=version, phase=phase)
    match event:
        case RunBound():
            return replace(run, bound=event, owner=event.owner)
        case OwnerChanged():
            return replace(run, owner=event.owner)
        case StatusSeen():
            confirmed = run.confirmed or (run.ended is not None and event.state in TERMINAL_STATES)
            return replace(run, seen=event, seen_version=version, unread=None, confirmed=confirmed)
        case StatusUnread():
            return replace(run, unread=event)
        case ChoiceClaimed():
            return replace(run, choices=(*run.choices, Choice(claim=event)))
        case ChoiceAnswered():
            choices = tuple(
                replace(choice, answer=event) if choice.claim.attempt_id == event.attempt_id else choice
                for choice in run.choices
            )
            return replace(run, choices=choices)
        case StopClaimed():
            return replace(run, stops=(*run.stops, Stop(claim=event)))
        case StopAnswered():
            stops = tuple(
                replace(stop, answer=event) if stop.claim.attempt_id == event.attempt_id else stop for stop in run.stops
            )
            return replace(run, stops=stops)
        case RunEnded() if run.ended is None:
            return replace(run, ended=event, confirmed=event.source == "status")
        case EndDisputed():
            return replace(run, disputes=(*run.disputes, event))
        case IntegrityMarked():
            return replace(run, integrity=(*run.integrity, event))
        case RunDeadlinePassed():
            return replace(run, deadline_passed_at=event.at)
        case _:
            return run


def replay(history: Iterable[Recorded]) -> Run:
    """The run of a whole history."""
    run = Run()
    for recorded in history:
        run = evolve(run, recorded.event, recorded.version)
    return run


def told_state(run: Run) -> tuple[str, str]:
    """(state, unknown_reason) for callers. An end stays an end; two ends that differ are ``contradicted``."""
    if run.phase in (Phase.CONTRADICTED, Phase.LOST):
        return "unknown", run.phase.value
    if run.ended is not None:
        return run.ended.state, ""
    if run.stop_sent:
        return "stopping", ""
    if run.deadline_passed_at is not None:
        return "unknown", "deadline_passed"
    if run.seen is not None and run.seen.state in ("waiting_for_approval", "stopping"):
        return run.seen.state, ""
    return "running", ""


def marks(run: Run) -> tuple[str, ...]:
    """Why this run's told outcome deserves doubt, as stable words."""
    found = set(run.ended.marks if run.ended else ())
    if run.ended is not None and run.ended.state == "cancelled" and not run.stop_sent:
        found.add("cancelled_without_stop")
    if run.ended is not None and run.ended.state == "completed" and run.stop_sent:
        found.add("completed_after_stop")
    if run.phase is Phase.CONTRADICTED:
        found.add("contradicted")
    if run.integrity:
        found.add("integrity")
    if run.ended is not None and run.deadline_passed_at is not None:
        found.add("ended_after_deadline")
    return tuple(sorted(found))


# ---- observations: what a reading or a frame adds to the history ----


def observe_status(
    run: Run, reading: StatusReading, exchange: Exchange, digest: str, *, at: datetime
) -> tuple[Event, ...]:
    """Events for one status read; none if it says nothing new. Late and contradicting words are kept as evidence."""
    if reading.problem:
        last = run.unread
        if last is not None and (last.code, last.cause, last.missing) == (
            reading.problem,
            reading.cause,
            reading.missing,
        ):
            return ()
        return (
            StatusUnread(
                at=at,
                code=reading.problem,
                cause=reading.cause,
                missing=reading.missing,
                http_status=reading.http_status,
            ),
        )
    seen = StatusSeen(
        at=at,
        state=reading.state,
        answer_digest=digest,
        answer=Plain(content=exchange.body),
        session_id=reading.session_id,
        last_event=reading.last_event,
        has_output=reading.has_output,
        marks=reading.marks,
        updated_at=reading.updated_at,
    )
    if run.ended is not None:
        if reading.state == run.ended.state:
            return () if run.confirmed else (seen,)
        if any(dispute.state == reading.state for dispute in run.disputes):
            return ()
        return (seen, EndDisputed(at=at, state=reading.state, source="status", evidence=f"run:{run.version + 1}"))
    same = run.seen is not None and run.unread is None and _same_reading(run.seen, seen)
    if reading.state not in TERMINAL_STATES:
        return () if same else (seen,)
    ended = RunEnded(
        at=at,
        state=reading.state,
        source="status",
        evidence=f"run:{run.version + 1}",
        result=Plain(content=exchange.body),
        has_output=reading.has_output,
        marks=reading.marks,
    )
    return (seen, ended)


def _same_reading(old: StatusSeen, new: StatusSeen) -> bool:
    return (old.state, old.session_id, old.last_event, old.has_output) == (
        new.state,
        new.session_id,
        new.last_event,
        new.has_output,
    )


def observe_end_frame(
    run: Run,
    state: str,
    result: Private,
    evidence: str,
    has_output: bool,
    marks_found: tuple[str, ...],
    *,
    at: datetime,
) -> tuple[Event, ...]:
    """Events for a terminal frame: the end, or evidence beside an end that is known already."""
    if run.ended is None:
        return (
            RunEnded(
                at=at,
                state=state,
                source="frame",
                evidence=evidence,
                result=result,
                has_output=has_output,
                marks=marks_found,
            ),
        )
    if run.ended.state != state and not any(dispute.state == state for dispute in run.disputes):
        return (EndDisputed(at=at, state=state, source="frame", evidence=evidence),)
    return ()


def pass_deadline(run: Run, *, at: datetime) -> tuple[Event, ...]:
    """The run outlived its deadline; once."""
    deadline = run.tie.deadline
    if run.ended is not None or run.deadline_passed_at is not None or deadline is None or at < deadline:
        return ()
    return (RunDeadlinePassed(at=at),)


# ---- choices and stops: who may be sent to this run ----


def check_choice(
    run: Run,
    stream: RunStream,
    *,
    choice: str,
    resolve_all: bool,
    reviewed: tuple[str, ...],
    approval_timeout_ms: int,
    at: datetime,
) -> tuple[PendingAsk, ...]:
    """The pending requests that this choice would answer, or a refusal; nothing is sent on a refusal.

    Hermes answers by position, so a single choice must be for the oldest pending request, and a choice for all must
    name every pending one. A provider that answers by exact request takes any pending one that has an id of its own.
    After a stop only a denial goes: a command that is released then still runs.
    """
    if run.ended is not None:
        raise CallerError("run.already_terminal", details={"state": run.ended.state})
    if run.stop_sent and choice != "deny":
        raise CallerError("approval.after_stop")
    by_request = exact_request(run, stream, reviewed, resolve_all=resolve_all) is not None
    if not reviewed:
        raise CallerError("approval.review_required")
    if stream.open_gap is not None and not by_request:
        raise CallerError("approval.not_pending", details={"reason": "events_missed"})
    pending = {item.ask.digest: item for item in stream.pending}
    if any(digest not in pending for digest in reviewed):
        raise CallerError("approval.not_pending", details={"pending": len(stream.pending)})
    if not resolve_all and len(reviewed) != 1:
        raise CallerError("approval.review_required", "One choice answers one request.")
    chosen = tuple(pending[digest] for digest in reviewed)
    taken = {number for item in run.choices if _may_have_acted(item) for number in item.claim.generations}
    for item in chosen:
        if item.ask.generation in taken:
            raise CallerError("approval.already_decided", details={"generation": item.ask.generation})
    applied = {number for item in run.choices if _was_applied(item) for number in item.claim.generations}
    waiting = [item.ask.digest for item in stream.pending if item.ask.generation not in applied]
    if resolve_all and set(reviewed) != set(waiting):
        raise CallerError("approval.review_required", "Every pending request has to be reviewed.")
    if not resolve_all and not by_request and waiting[0] != reviewed[0]:
        raise CallerError("approval.not_oldest", details={"oldest": waiting[0]})
    for item in chosen:
        if item.ask.choices and choice not in item.ask.choices:
            raise CallerError("approval.choice_not_offered", details={"offered": list(item.ask.choices)})
        if at >= after(item.at, approval_timeout_ms - min(PROVIDER_MARGIN_MS, approval_timeout_ms // 10)):
            raise CallerError("approval.provider_timeout", details={"after_ms": approval_timeout_ms})
    return chosen


def exact_request(run: Run, stream: RunStream, reviewed: tuple[str, ...], *, resolve_all: bool) -> str | None:
    """The provider's own id of the one reviewed request, where it answers by exact request; else it goes by position.

    An id that several pending requests have names none of them.
    """
    if resolve_all or len(reviewed) != 1 or not run.tie.target.features.request_ids:
        return None
    named = [item.ask.request_id for item in stream.pending if item.ask.digest == reviewed[0]]
    alike = sum(1 for item in stream.pending if named and item.ask.request_id == named[0])
    return (named[0] or None) if alike == 1 else None


def _was_applied(choice: Choice) -> bool:
    """True if the receipt proves that exactly the reviewed requests left the queue, before the stream says so."""
    answer = choice.answer
    return answer is not None and answer.verdict == "accepted" and answer.resolved == len(choice.claim.generations)


def _may_have_acted(choice: Choice) -> bool:
    return choice.answer is None or choice.answer.verdict in ("accepted", "unknown")


def check_stop(run: Run) -> None:
    """Refuse a stop for a run whose end is known. A second stop is another Action, and its answer says what it did."""
    if run.ended is not None:
        raise CallerError("run.already_terminal", details={"state": run.ended.state})


def check_resolved(answer: ChoiceAnswered, claim: ChoiceClaimed, *, at: datetime) -> tuple[Event, ...]:
    """A count of resolved entries other than reviewed is an integrity fault for people to look at."""
    if answer.verdict != "accepted" or answer.resolved is None or answer.resolved == len(claim.generations):
        return ()
    detail = f"reviewed {len(claim.generations)}, resolved {answer.resolved}"
    return (IntegrityMarked(at=at, kind="resolved_count", detail=detail),)
