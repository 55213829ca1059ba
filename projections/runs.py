"""Runs: one row per run, folded from its binding's and its stream's history and from the Actions that name it.

A run is told by terminal evidence or by the last thing that was seen of it, with the time of that sight; what was
missed is told as gaps with both edges (runs page, Poll run status, Consume run events).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from domain import binding, stream
from domain.binding import Choice, Phase, Run
from domain.events import (
    ActionAccepted,
    ChoiceAnswered,
    ChoiceClaimed,
    EndDisputed,
    Event,
    FramesStored,
    GapClosed,
    GapOpened,
    IntegrityMarked,
    RunBound,
    RunEnded,
    StatusSeen,
    StatusUnread,
    StopAnswered,
    StopClaimed,
    StreamClosed,
)
from domain.history import Recorded, run_token
from domain.stream import Gap, PendingAsk, RunStream
from domain.values import Operation, Sealed, after, rfc3339
from projections import Facets, Projection, Row, evidence, sealed, told_facts, with_fact, with_needs, without_content

STATES_FIRST = 8
STATES_LAST = 24
ACTIONS_KEPT = 200

MISSING_CAUSES = {
    "unknown_id": "the handle was never known to this process",
    "retention_expired": "a finished run's status was dropped about an hour after its last change",
    "process_restart": "the provider's process was restarted and lost its runs",
}
"""What a missing status can mean (runs page, Poll run status); none of them says that nothing happened."""

LONGEST_RETENTION_MS = 3_600_000


class StateSeen(msgspec.Struct, frozen=True, omit_defaults=True):
    """A provider's word for the run: first seen, last seen with nothing else between, and the event of the first."""

    state: str
    first_at: datetime
    last_at: datetime
    evidence: str


class NamedBy(msgspec.Struct, frozen=True, omit_defaults=True):
    """An Action that speaks to this run."""

    operation: Operation
    action_id: str
    at: datetime


class RunRow(Row, frozen=True, kw_only=True, omit_defaults=True):
    """One run as the domain tells it. It carries the last status and the end's result, both sealed."""

    run: Run = Run()
    stream: RunStream = RunStream()
    named_by: tuple[NamedBy, ...] = ()
    states: tuple[StateSeen, ...] = ()
    ended_by: str = ""
    seen_at: datetime | None = None

    @property
    def state(self) -> str:
        """The run's state for callers."""
        return binding.told_state(self.run)[0]

    @property
    def unknown_reason(self) -> str:
        """With the state ``unknown``: evidence_lost, contradicted or deadline_passed."""
        return binding.told_state(self.run)[1]

    @property
    def session(self) -> str:
        """The session that the provider tells, else the one that was sent or asked for."""
        tie = self.run.tie
        return effective_session(self) or tie.sent_session or tie.requested_session

    @property
    def open(self) -> bool:
        """False once its end is known and confirmed, or not readable any more, and its events were listened to."""
        run, heard = self.run, self.stream
        over = run.ended is not None and (run.confirmed or run.unread is not None)
        return not over or heard.open or heard.open_gap is not None or not (heard.subscriptions or heard.terminal_seq)

    @property
    def reason(self) -> str:
        """Why it is unfinished work, or an empty text."""
        run = self.run
        if run.phase is Phase.CONTRADICTED:
            return "run_contradicted"
        if run.ended is not None:
            return "run_ended_in_doubt" if binding.marks(run) else ""
        if run.phase is Phase.LOST:
            return "run_evidence_lost"
        if run.deadline_passed_at is not None:
            return "run_deadline_passed"
        if self.stream.pending and not run.stop_sent:
            return "provider_approval_pending"
        return "run_stopping" if run.stop_sent else "run_followed"


def key(recorded: Recorded) -> str | None:
    """``tenant/endpoint/run token`` for the events of a run and its stream, and for Actions that name a run."""
    event = recorded.event
    if isinstance(event, ActionAccepted):
        return f"{event.tenant}/{event.endpoint_id}/{run_token(event.run_id)}" if event.run_id else None
    tenant, kind, rest = [*recorded.history.split("/", 2), "", ""][:3]
    return f"{tenant}/{rest}" if kind in ("run", "str") else None


def _carried(event: Event) -> Event:
    return (
        msgspec.structs.replace(event, frames=without_content(event.frames))
        if isinstance(event, FramesStored)
        else event
    )


def _word(event: Event) -> str:
    match event:
        case StatusSeen() | RunEnded() | EndDisputed():
            return event.state
        case StatusUnread():
            return f"{event.code} {event.cause}".strip()
        case ChoiceClaimed():
            return event.choice
        case ChoiceAnswered() | StopAnswered():
            return f"{event.verdict} {event.code}".strip()
        case IntegrityMarked():
            return event.kind
        case GapOpened():
            return f"{event.number} after {event.after} {event.reason}"
        case GapClosed():
            return f"{event.number} before {event.before} {event.by}"
        case StreamClosed():
            return event.reason
        case RunBound():
            return event.run_id
        case _:
            return ""


def _with_state(row: RunRow, state: str, at: datetime, proof: str) -> RunRow:
    if row.states and row.states[-1].state == state:
        states = (*row.states[:-1], msgspec.structs.replace(row.states[-1], last_at=at))
    else:
        states = (*row.states, StateSeen(state, at, at, proof))
    if len(states) > STATES_FIRST + STATES_LAST:
        states = states[:STATES_FIRST] + states[STATES_FIRST + 1 :]
    return msgspec.structs.replace(row, states=states)


def _answered_unknown(items: Iterable[Choice | binding.Stop], reason: str) -> list[tuple[str, str]]:
    return [(reason, item.claim.attempt_id) for item in items if item.answer and item.answer.verdict == "unknown"]


def _waited(row: RunRow) -> list[tuple[str, str]]:
    run, waited = row.run, []
    if run.phase is Phase.CONTRADICTED:
        waited.append(("run_contradicted", ""))
    waited += [("integrity", f"{mark.kind}:{number}") for number, mark in enumerate(run.integrity, 1)]
    if run.ended is None:
        if run.phase is Phase.LOST:
            waited.append(("run_evidence_lost", ""))
        if run.deadline_passed_at is not None:
            waited.append(("run_deadline_passed", ""))
        waited += _answered_unknown(run.choices, "choice_in_doubt") + _answered_unknown(run.stops, "stop_in_doubt")
        waited += [("provider_approval_pending", str(item.ask.generation)) for item in row.stream.pending]
    return waited


def fold(row: RunRow | None, recorded: Recorded) -> RunRow:
    """The row after one more event of its run, its stream, or an Action that names it."""
    row, event = row or RunRow(), recorded.event
    if isinstance(event, ActionAccepted):
        named = NamedBy(event.operation, event.action_id, event.at)
        return with_fact(
            msgspec.structs.replace(row, named_by=(*row.named_by, named)[-ACTIONS_KEPT:]),
            recorded,
            event.operation.value,
        )
    if recorded.history.split("/", 2)[1] == "str":
        changed = stream.evolve(row.stream, _carried(event), recorded.version)
        row = msgspec.structs.replace(row, stream=changed)
        if isinstance(event, FramesStored):
            row = msgspec.structs.replace(row, position=recorded.position, updated_at=event.at, seen_at=event.at)
            return with_needs(row, recorded, _waited(row))
    else:
        row = msgspec.structs.replace(row, run=binding.evolve(row.run, event, recorded.version))
        match event:
            case RunBound():
                start = NamedBy(Operation.RUN_START, event.action_id, event.started_at)
                row = msgspec.structs.replace(row, named_by=(start, *row.named_by))
            case StatusSeen():
                row = _with_state(row, event.state, event.at, evidence(recorded))
                row = msgspec.structs.replace(row, seen_at=event.at)
            case RunEnded() if not row.ended_by:
                row = msgspec.structs.replace(row, ended_by=evidence(recorded), seen_at=event.at)
    row = with_fact(row, recorded, _word(event))
    return with_needs(row, recorded, _waited(row))


def facets(row: RunRow) -> Facets | None:
    """What lists of runs filter by; a run that is not bound is in no list."""
    tie = row.run.bound
    if tie is None:
        return None
    return Facets(
        tenant=tie.tenant,
        state=row.state,
        principal=tie.principal,
        endpoint_id=tie.endpoint_id,
        session=row.session,
        run_id=tie.run_id,
        reason=row.reason,
        person=row.open_needs[0].reason if row.open_needs else "",
        open=row.open,
        needed=bool(row.needs),
        at=tie.started_at,
    )


RUNS = Projection(
    name="runs",
    version=1,
    topics=frozenset(
        {
            "action.accepted", "owner.changed", "run.bound", "run.status_seen", "run.status_unread",
            "run.choice_claimed", "run.choice_answered", "run.stop_claimed", "run.stop_answered", "run.ended",
            "run.end_disputed", "run.integrity_marked", "run.deadline_passed", "stream.subscription_intended",
            "stream.subscription_opened", "stream.frames_stored", "stream.gap_opened", "stream.gap_closed",
            "stream.closed",
        }
    ),
    histories=frozenset({"act", "run", "str"}),
    row=RunRow,
    key=key,
    fold=fold,
    facets=facets,
)  # fmt: skip


# ---- answers ---------------------------------------------------------------------------------------------------------


def run_key(tenant: str, endpoint_id: str, run_id: str) -> str:
    """The row of a run."""
    return f"{tenant}/{endpoint_id}/{run_token(run_id)}"


def effective_session(row: RunRow) -> str:
    """The session that the provider's status named, or an empty text."""
    return row.run.seen.session_id if row.run.seen else ""


def sealed_result(row: RunRow) -> Sealed | None:
    """Output, usage and error of the end as the provider gave them, sealed; ``None`` before an end."""
    return sealed(row.run.ended.result) if row.run.ended else None


def sealed_status(row: RunRow) -> Sealed | None:
    """The last status object, sealed; ``None`` if none was seen."""
    return sealed(row.run.seen.answer) if row.run.seen else None


def actions_by_operation(row: RunRow) -> dict[str, list[str]]:
    """The ids of the Actions that speak to this run; the latest 200."""
    found: dict[str, list[str]] = {}
    for named in row.named_by:
        found.setdefault(named.operation.value, []).append(named.action_id)
    return found


def missing_causes(row: RunRow) -> list[dict[str, str]]:
    """What a missing status can still mean, after what is known of this run; empty if it is not missing.

    A handle from a receipt or an earlier status was known once; a status of an unfinished run does not expire.
    """
    unread = row.run.unread
    if unread is None or not unread.missing:
        return []
    causes = dict(MISSING_CAUSES)
    if row.run.seen is not None:
        del causes["unknown_id"]
        silence = row.seen_at or row.run.seen.at
        if unread.at < after(silence, LONGEST_RETENTION_MS):
            del causes["retention_expired"]
    return [{"cause": cause, "means": meaning} for cause, meaning in causes.items()]


def _told_gap(gap: Gap) -> dict[str, Any]:
    return {
        "number": gap.number,
        "after": gap.after,
        "before": gap.before,
        "reason": gap.reason,
        "opened_at": rfc3339(gap.opened_at),
        "closed_by": gap.closed_by or None,
    }


def pending_approvals(row: RunRow, approval_timeout_ms: int | None = None) -> list[dict[str, Any]]:
    """Provider requests that nothing seen has answered, oldest first; the deadline is the endpoint's time-out.

    ``answerable`` is false where the order of the provider's queue is not known, or the run is told to stop.
    """

    def told(number: int, item: PendingAsk) -> dict[str, Any]:
        body: dict[str, Any] = {
            "generation": item.ask.generation,
            "digest": item.ask.digest,
            "sequence": item.ask.seq,
            "choices": list(item.ask.choices),
            "oldest": number == 0,
            "asked_at": rfc3339(item.at),
            "answerable": row.run.ended is None and not row.run.stop_sent and row.stream.open_gap is None,
        }
        if item.ask.request_id:
            body["request_id"] = item.ask.request_id
        if approval_timeout_ms is not None:
            body["provider_gives_up_at"] = rfc3339(after(item.at, approval_timeout_ms))
        return body

    return [told(number, item) for number, item in enumerate(row.stream.pending)]


def _sent(claim: ChoiceClaimed | StopClaimed, answer: ChoiceAnswered | StopAnswered | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "action_id": claim.action_id,
        "attempt_id": claim.attempt_id,
        "claimed_at": rfc3339(claim.at),
        "outcome": answer.verdict if answer else "in_flight",
        "answered_at": rfc3339(answer.at) if answer else None,
    }
    if isinstance(claim, ChoiceClaimed):
        body |= {"choice": claim.choice, "generations": list(claim.generations), "resolve_all": claim.resolve_all}
    if answer is not None and answer.code:
        body["code"] = answer.code
    if isinstance(answer, ChoiceAnswered):
        body["resolved"] = answer.resolved
    if isinstance(answer, StopAnswered) and answer.state:
        body["status"] = answer.state
    return body


def _session(row: RunRow) -> dict[str, Any]:
    tie, effective = row.run.tie, effective_session(row)
    asked = tie.sent_session or tie.requested_session
    notices = []
    if asked and effective and asked != effective:
        notices.append("The provider works under another session than the one asked for.")
    if tie.requested_session and tie.sent_session != tie.requested_session:
        notices.append("The session that was asked for is not the one that was sent.")
    return {"requested": tie.requested_session, "sent": tie.sent_session, "effective": effective, "notices": notices}


def _end(row: RunRow) -> dict[str, Any]:
    run = row.run
    if run.ended is not None:
        return {
            "known": True,
            "state": run.ended.state,
            "source": run.ended.source,
            "at": rfc3339(run.ended.at),
            "evidence": row.ended_by,
            "rests_on": run.ended.evidence,
            "has_output": run.ended.has_output,
            "confirmed_by_status": run.confirmed,
            "disputed_by": [
                {"state": item.state, "source": item.source, "at": rfc3339(item.at), "evidence": item.evidence}
                for item in run.disputes
            ],
        }
    if run.phase is Phase.LOST:
        why = "The provider's process does not know the run any more; what it did is not provable from here."
    elif run.unread is not None:
        why = "Status reads fail; the run may go on."
    elif row.stream.closed_reason and not row.stream.terminal_seq:
        why = "The event stream ended without a terminal event, and no status has shown an end."
    else:
        why = "No status and no event has shown an end."
    return {"known": False, "why": why, "missing_can_mean": missing_causes(row)}


def run_view(
    row: RunRow,
    *,
    approval_timeout_ms: int | None = None,
    result: Mapping[str, Any] | None = None,
    other_runs: Iterable[str] = (),
) -> dict[str, Any]:
    """``/views/runs/{run_id}``. ``result`` holds the opened end (output, usage, error, model) or a mask.

    ``other_runs`` are the ids of other unfinished runs of the same session.
    """
    run, tie, events = row.run, row.run.tie, row.stream
    failed = run.unread
    return {
        "run_id": tie.run_id,
        "tenant": tie.tenant,
        "endpoint_id": tie.endpoint_id,
        "state": row.state,
        "unknown_reason": row.unknown_reason or None,
        "marks": list(binding.marks(run)),
        "reason": row.reason or None,
        "principal": tie.principal,
        "started_at": rfc3339(tie.started_at),
        "updated_at": rfc3339(row.updated_at or tie.at),
        "last_observed_at": rfc3339(row.seen_at) if row.seen_at else None,
        "deadline": rfc3339(tie.deadline) if tie.deadline else None,
        "deadline_passed_at": rfc3339(run.deadline_passed_at) if run.deadline_passed_at else None,
        "actions": actions_by_operation(row),
        "session": _session(row) | {"other_active_runs": list(other_runs)},
        "states": [
            {
                "state": s.state,
                "first_seen_at": rfc3339(s.first_at),
                "last_seen_at": rfc3339(s.last_at),
                "evidence": s.evidence,
            }
            for s in row.states
        ],
        "status_reads": {
            "failing": failed is not None,
            "since": rfc3339(failed.at) if failed else None,
            "code": failed.code if failed else None,
            "run_missing": bool(failed and failed.missing),
        },
        "events": {
            "stored": events.last_seq,
            "by_kind": dict(sorted(events.kinds.items())),
            "subscriptions": events.subscriptions,
            "open": events.open,
            "closed": events.closed_reason or None,
            "last_at": rfc3339(events.last_frame_at) if events.last_frame_at else None,
            "terminal": events.terminal_state or None,
            "gaps": [_told_gap(gap) for gap in events.gaps],
        },
        "pending_approvals": pending_approvals(row, approval_timeout_ms),
        "answered_approvals": [
            {"generation": item.generation, "how": item.how, "sequence": item.seq} for item in events.answered
        ],
        "choices": [_sent(item.claim, item.answer) for item in run.choices],
        "stops": [_sent(item.claim, item.answer) for item in run.stops],
        "integrity": [{"kind": m.kind, "detail": m.detail, "at": rfc3339(m.at)} for m in run.integrity],
        "end": _end(row),
        "result": dict(result) if result is not None else None,
        "facts": told_facts(row),
    }


def run_summary(row: RunRow) -> dict[str, Any]:
    """One run in a list."""
    tie = row.run.tie
    return {
        "run_id": tie.run_id,
        "endpoint_id": tie.endpoint_id,
        "state": row.state,
        "unknown_reason": row.unknown_reason or None,
        "marks": list(binding.marks(row.run)),
        "session_id": row.session,
        "action_id": tie.action_id,
        "pending_approvals": len(row.stream.pending),
        "gaps": len(row.stream.gaps),
        "started_at": rfc3339(tie.started_at),
        "updated_at": rfc3339(row.updated_at or tie.at),
        "last_observed_at": rfc3339(row.seen_at) if row.seen_at else None,
    }
