"""The one next safe step: a pure, level-triggered function of stored facts and the time.

It looks at what is known, not at how it came to be known, so a first try, a retry and a recovery after any crash take
the same path. A ``Claim`` may be followed by one send, and only in the turn that committed it: no step says "send".
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from domain import action as actions
from domain import attempt as attempts
from domain import binding, stream
from domain.action import Action, State
from domain.binding import Run
from domain.errors import PREFIX, CallerError, HostError
from domain.events import ActionSettled, ApprovalExpired, ChoiceAnswered, Event, EvidenceFound, StopAnswered
from domain.stream import RunStream
from domain.values import MUTATIONS, Effect, Fence, Mode, Operation, after

BACKOFF_MS = (1_000, 2_000, 4_000, 8_000, 15_000, 30_000)
POLL_LIVE_MS = (2_000, 5_000, 10_000, 15_000, 30_000)
POLL_BLIND_MS = (250, 500, 1_000, 2_000, 4_000, 8_000, 10_000)
POLL_LOST_MS = (1_000, 2_000, 5_000, 15_000, 60_000, 300_000)
OBSERVE_LIMIT_MS = 86_400_000
CONFIRMING_POLLS = 6
RETRYABLE_REFUSALS = frozenset({PREFIX + "remote_refused_temporarily", PREFIX + "not_sent"})


class Claim(msgspec.Struct, frozen=True):
    """Commit a claim for this Action's mutation; the turn that committed it sends once."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Append these events to the Action's history."""

    events: tuple[Event, ...]
    why: str


class ReadStatus(msgspec.Struct, frozen=True):
    """Perform the one provider read of a ``run_status`` Action, then settle it."""


class WaitUntil(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is to be done before this time, unless a new fact is stored."""

    at: datetime
    why: str


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing may be done; only evidence or a person's finding moves this."""

    why: str


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is left to be done here."""

    why: str


Step = Claim | Record | ReadStatus | WaitUntil | Hold | Finished


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision about one Action rests on. ``in_flight`` names attempts that this process performs right now,
    ``unsent`` those that it claimed without learning so in time and did not send. ``admitted`` says that the endpoint
    is configured.

    ``run`` and ``stream`` are those of ``request.run_id`` for operations on a run. ``owner`` is this host's fence.
    """

    action: Action
    owner: Fence
    in_flight: frozenset[str] = frozenset()
    unsent: frozenset[str] = frozenset()
    admitted: bool = True
    run: Run | None = None
    stream: RunStream | None = None
    approval_timeout_ms: int = 60_000


def next_step(facts: Facts, *, at: datetime) -> Step:
    """From the known facts to the one next step of an Action."""
    action = facts.action
    if action.state is State.SETTLED:
        return Finished(why="settled")
    if action.owner != facts.owner:
        return Hold(why="owned_elsewhere")
    match action.state:
        case State.CLAIMED:
            return _claimed(facts, at)
        case State.RECEIVED:
            return Record(events=(actions.settle_received(action, at=at),), why="receipt_stored")
        case State.UNKNOWN:
            return _unknown(facts, at)
        case State.AWAITING:
            return _awaiting(action, at)
        case State.CLOSED:
            return _closed(facts, at)
        case _:
            return _ready(facts, at)


def _claimed(facts: Facts, at: datetime) -> Step:
    attempt = facts.action.attempt
    if attempt is None or attempt.claim.attempt_id in facts.in_flight:
        return Hold(why="in_flight")
    if attempt.claim.attempt_id in facts.unsent:
        return Record(events=(attempts.never_sent(attempt, "claim_in_doubt", at=at),), why="claimed_but_not_sent")
    return Record(events=(attempts.orphaned(attempt, at=at),), why="sender_lost")


def _awaiting(action: Action, at: datetime) -> Step:
    approval = action.approval
    if approval is None:
        return Hold(why="approval_missing")
    if at >= approval.usable_until:
        return Record(events=_expired_approval(action, at), why="approval_expired")
    return WaitUntil(at=approval.usable_until, why="awaiting_approval")


def _expired_approval(action: Action, at: datetime) -> tuple[ApprovalExpired | ActionSettled, ...]:
    settled = actions.settle_without_effect("failed", "policy.approval_expired", at=at)
    if action.approval is None:
        return (settled,)
    return (ApprovalExpired(at=at, approval_id=action.approval.requested.approval_id), settled)


def _ready(facts: Facts, at: datetime) -> Step:
    action = facts.action
    request = action.request
    if request.operation is Operation.RUN_EVENTS:
        return _events(facts, at)
    if at >= action.deadline:
        code = PREFIX + "deadline_exceeded" if request.operation is Operation.RUN_STATUS else "action.expired"
        status = "failed" if request.operation is Operation.RUN_STATUS else "expired"
        return Record(events=(actions.settle_without_effect(status, code, at=at),), why="deadline_passed")
    if request.operation is Operation.RUN_STATUS:
        return ReadStatus()
    if action.approval is not None and at >= action.approval.usable_until:
        return Record(events=_expired_approval(action, at), why="approval_expired")
    refusal = refuse_before_claim(facts, at=at)
    if refusal is not None:
        return Record(events=(refusal,), why="refused_before_sending")
    if not facts.admitted:
        return WaitUntil(at=action.deadline, why="endpoint_not_admitted")
    return Claim()


def refuse_before_claim(facts: Facts, *, at: datetime) -> ActionSettled | None:
    """The settlement of a choice or stop that must not be sent, by what is known of its run; else ``None``."""
    request, run = facts.action.request, facts.run
    if request.operation not in (Operation.RUN_APPROVAL, Operation.RUN_STOP):
        return None
    try:
        if run is None:
            raise CallerError("action.not_found")
        if request.operation is Operation.RUN_STOP:
            binding.check_stop(run)
        else:
            binding.check_choice(
                run,
                facts.stream or RunStream(),
                choice=request.choice,
                resolve_all=request.resolve_all,
                reviewed=request.reviewed,
                approval_timeout_ms=facts.approval_timeout_ms,
                at=at,
            )
    except HostError as error:
        clear = {name: value for name, value in error.details.items() if isinstance(value, str | int | bool)}
        return actions.settle_without_effect("failed", error.code, at=at, details=clear, message=error.message)
    return None


def _closed(facts: Facts, at: datetime) -> Step:
    """After a refusal or a proven no-send: a queued start may wait and claim a further attempt, else it settles."""
    action = facts.action
    attempt, request = action.attempt, action.request
    closed = attempt.closed if attempt else None
    if closed is None or attempt is None:
        return Hold(why="attempt_missing")
    if action.cancel is not None:
        cancelled = actions.settle_without_effect("cancelled", "action.cancelled", at=at)
        return Record(events=(cancelled,), why="cancelled_before_another_attempt")
    again = (
        request.mode is Mode.ASYNC
        and request.operation is Operation.RUN_START
        and closed.code in RETRYABLE_REFUSALS
        and attempt.unknown is None
    )
    if not again:
        return Record(events=(actions.settle_closed(action, at=at),), why="attempt_closed")
    wait = max(BACKOFF_MS[min(len(action.attempts), len(BACKOFF_MS)) - 1], closed.retry_after_ms or 0)
    due = after(closed.at, wait)
    if max(due, at) >= action.deadline:
        return Record(events=(actions.settle_closed(action, at=at),), why="no_time_for_another_attempt")
    if at < due:
        return WaitUntil(at=due, why="provider_refused_for_now")
    return Claim() if facts.admitted else WaitUntil(at=action.deadline, why="endpoint_not_admitted")


def _unknown(facts: Facts, at: datetime) -> Step:
    """An unknown outcome moves by evidence alone: what the stream or the run's end proves about this very attempt."""
    found = evidence(facts, at=at)
    return Record(events=(found,), why="evidence_found") if found else Hold(why="outcome_unknown")


def evidence(facts: Facts, *, at: datetime) -> EvidenceFound | None:
    """Proof in the run's own records that an unknown choice or stop was applied; ``None`` proves nothing.

    A cancelled run proves a stop only if no other stop may have reached it.
    """
    action, run = facts.action, facts.run
    attempt, request = action.attempt, action.request
    if attempt is None or run is None:
        return None
    attempt_id = attempt.claim.attempt_id
    if request.operation is Operation.RUN_STOP and run.ended is not None and run.ended.state == "cancelled":
        if any(stop.may_have_acted for stop in run.stops if stop.claim.attempt_id != attempt_id):
            return None  # any of several stops can have ended the run
        return EvidenceFound(
            at=at, attempt_id=attempt_id, proves="applied", source="run.cancelled", reference=run.ended.evidence
        )
    if request.operation is Operation.RUN_APPROVAL and facts.stream is not None:
        claimed = next((item.claim for item in run.choices if item.claim.attempt_id == attempt_id), None)
        for answer in facts.stream.answered if claimed else ():
            if claimed and answer.generation in claimed.generations and answer.how == f"responded:{request.choice}":
                return EvidenceFound(
                    at=at,
                    attempt_id=attempt_id,
                    proves="applied",
                    source="approval.responded",
                    reference=f"stream:{answer.seq}",
                )
    return None


def _events(facts: Facts, at: datetime) -> Step:
    """A ``run_events`` Action reads what is stored and follows until an end, its limit or its deadline (AIP 11.7)."""
    action, run = facts.action, facts.run
    seen = facts.stream or RunStream()
    if run is None:
        settled = actions.settle_without_effect("failed", "action.not_found", at=at)
        return Record(events=(settled,), why="run_not_bound")
    details: dict[str, str | int | bool | None] = {"run_state": binding.told_state(run)[0], "run_id": run.tie.run_id}
    limit = action.request.max_events
    effect = Effect.POSSIBLE

    def settle(status: str, code: str, count: int, *, terminal: bool) -> Record:
        truncated = code.endswith("stream_truncated")
        facts_told = details | {"events": count, "terminal": terminal, "truncated": truncated}
        return Record(
            events=(ActionSettled(at=at, status=status, effect=effect, code=code, details=facts_told),), why="read"
        )

    if seen.last_seq >= limit and (not seen.terminal_seq or seen.terminal_seq >= limit):
        return settle("failed", PREFIX + "stream_truncated", limit, terminal=False)
    if seen.terminal_seq:
        if seen.terminal_state == "cancelled":
            return settle("cancelled", "", seen.terminal_seq, terminal=True)
        if seen.terminal_state in ("failed", "interrupted"):
            return settle("failed", PREFIX + "stream_failed", seen.terminal_seq, terminal=True)
        return settle("completed", "", seen.terminal_seq, terminal=True)
    resumable = run.tie.target.features.replay and run.ended is None
    if seen.subscriptions and not seen.open and not (resumable and stream.may_subscribe(seen, resumable, at=at)):
        return settle("failed", PREFIX + "stream_incomplete", seen.last_seq, terminal=False)
    if at >= action.deadline:
        return settle("failed", PREFIX + "deadline_exceeded", seen.last_seq, terminal=False)
    return WaitUntil(at=action.deadline, why="following")


# ---- runs ------------------------------------------------------------------------------------------------------------


class Subscribe(msgspec.Struct, frozen=True):
    """Store the intent, then open the run's event stream."""


class PollRun(msgspec.Struct, frozen=True):
    """Read the run's status once."""


class RecordRun(msgspec.Struct, frozen=True, kw_only=True):
    """Append these events to the run's and to the stream's history."""

    run: tuple[Event, ...] = ()
    stream: tuple[Event, ...] = ()
    why: str = ""


RunStep = Subscribe | PollRun | RecordRun | WaitUntil | Hold | Finished


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision about observing one run rests on.

    ``live`` says that this process reads the run's stream now. ``polled_at`` and ``polls`` tell this process's own
    status reads since the last change; ``spread`` (0 up to 1) lengthens the next pause by up to a quarter, so that many
    runs do not ask at once.
    """

    run: Run
    stream: RunStream
    owner: Fence
    live: bool = False
    polled_at: datetime | None = None
    polls: int = 0
    spread: float = 0.0


def next_run_step(facts: RunFacts, *, at: datetime) -> RunStep:
    """The one next step of observing a run: reads only, whatever happened before."""
    run, seen = facts.run, facts.stream
    if run.owner != facts.owner:
        return Hold(why="owned_elsewhere")
    overdue = binding.pass_deadline(run, at=at)
    if overdue:
        return RecordRun(run=overdue, why="deadline_passed")
    replay = run.tie.target.features.replay
    if seen.open and not facts.live:
        return RecordRun(stream=stream.close(seen, "subscriber_lost", at=at), why="subscriber_lost")
    if run.ended is not None and seen.open_gap is not None and not facts.live:
        by = "terminal_status" if run.ended.source == "status" else "terminal_frame"
        return RecordRun(stream=stream.end_gap(seen, by, at=at), why="end_known")
    subscribes = not facts.live and stream.may_subscribe(seen, replay, at=at)
    if subscribes and at >= stream.subscribe_from(seen, at=at) and (run.ended is None or not seen.subscriptions):
        return Subscribe()
    if run.ended is not None and (run.confirmed or run.unread is not None or facts.polls >= CONFIRMING_POLLS):
        return Hold(why="stream_open") if facts.live else Finished(why="end_known")
    if at >= after(run.tie.at, OBSERVE_LIMIT_MS) and run.phase is binding.Phase.LOST:
        return Finished(why="evidence_lost")
    due = _next_poll(facts)
    return PollRun() if due is None or at >= due else WaitUntil(at=_soonest(due, run), why="poll")


def _next_poll(facts: RunFacts) -> datetime | None:
    if facts.polled_at is None:
        return None
    ladder: tuple[int, ...]
    if facts.run.unread is not None:
        ladder = POLL_LOST_MS
    else:
        ladder = POLL_LIVE_MS if facts.live and facts.run.ended is None else POLL_BLIND_MS
    pause = ladder[min(facts.polls, len(ladder) - 1)]
    return after(facts.polled_at, int(pause * (1 + facts.spread / 4)))


def _soonest(due: datetime, run: Run) -> datetime:
    deadline = run.tie.deadline
    return min(due, deadline) if deadline is not None and run.deadline_passed_at is None else due


def answers_run(action: Action, *, at: datetime) -> tuple[Event, ...]:
    """What a choice's or stop's attempt means for its run, taken from the Action's latest attempt."""
    attempt = action.attempt
    if attempt is None or action.request.operation not in MUTATIONS - {Operation.RUN_START}:
        return ()
    verdict, code, state = "unknown", attempt.unknown.code if attempt.unknown else "", ""
    resolved = None
    if attempt.accepted is not None:
        verdict, code = "accepted", ""
        state, resolved = attempt.accepted.state, attempt.accepted.resolved
    elif attempt.found is not None:
        verdict, code = "accepted", ""
    elif attempt.closed is not None:
        verdict, code = ("refused" if attempt.closed.sent else "not_sent"), attempt.closed.code
    action_id, attempt_id = action.request.action_id, attempt.claim.attempt_id
    if action.request.operation is Operation.RUN_STOP:
        return (
            StopAnswered(at=at, action_id=action_id, attempt_id=attempt_id, verdict=verdict, state=state, code=code),
        )
    return (
        ChoiceAnswered(
            at=at, action_id=action_id, attempt_id=attempt_id, verdict=verdict, resolved=resolved, code=code
        ),
    )


def is_over(action: Action, run: Run) -> bool:
    """True once a start and its run cannot act any more: settled without effect, or ended beyond contradiction."""
    if action.settled is None:
        return False
    return action.effect is Effect.NONE or run.phase is binding.Phase.ENDED
