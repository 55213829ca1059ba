"""Action: what a caller asked for, from acceptance to its one settlement.

The transition table is the specification: an event that it does not name for a state leaves the state as it is and
stands in the history as evidence. A settled Action never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from domain import approval as approvals
from domain import attempt as attempts
from domain.approval import Approval, TenantPolicy
from domain.attempt import Attempt, AttemptState
from domain.errors import CallerError
from domain.events import (
    ActionAccepted,
    ActionSettled,
    ApprovalDecided,
    ApprovalExpired,
    ApprovalRequested,
    AttemptAccepted,
    AttemptClaimed,
    AttemptClosed,
    AttemptUnknown,
    CancelWished,
    Event,
    EvidenceFound,
    OwnerChanged,
    Target,
)
from domain.history import Recorded
from domain.values import MUTATIONS, Actor, Effect, Fence, Operation, after


class State(StrEnum):
    """Where an Action stands."""

    NEW = "new"
    AWAITING = "awaiting_approval"
    READY = "ready"
    CLAIMED = "claimed"
    CLOSED = "attempt_closed"
    UNKNOWN = "unknown"
    RECEIVED = "received"
    SETTLED = "settled"


NEXT: dict[tuple[State, type[Event]], State] = {
    (State.NEW, ActionAccepted): State.READY,
    (State.READY, ApprovalRequested): State.AWAITING,
    (State.AWAITING, ApprovalDecided): State.READY,
    (State.READY, AttemptClaimed): State.CLAIMED,
    (State.CLOSED, AttemptClaimed): State.CLAIMED,
    (State.CLAIMED, AttemptAccepted): State.RECEIVED,
    (State.CLAIMED, AttemptClosed): State.CLOSED,
    (State.CLAIMED, AttemptUnknown): State.UNKNOWN,
    (State.UNKNOWN, AttemptAccepted): State.RECEIVED,
    (State.UNKNOWN, AttemptClosed): State.CLOSED,
    (State.UNKNOWN, EvidenceFound): State.RECEIVED,
    (State.READY, ActionSettled): State.SETTLED,
    (State.AWAITING, ActionSettled): State.SETTLED,
    (State.CLOSED, ActionSettled): State.SETTLED,
    (State.RECEIVED, ActionSettled): State.SETTLED,
    (State.UNKNOWN, ActionSettled): State.SETTLED,
}


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One Action as its history tells it; ``version`` is the last event's."""

    version: int = 0
    state: State = State.NEW
    accepted: ActionAccepted | None = None
    owner: Fence | None = None
    approval: Approval | None = None
    attempts: tuple[Attempt, ...] = ()
    cancel: CancelWished | None = None
    settled: ActionSettled | None = None
    updated_at: datetime | None = None

    @property
    def request(self) -> ActionAccepted:
        """What was accepted; there is no Action without it."""
        if self.accepted is None:
            raise CallerError("action.not_found")
        return self.accepted

    @property
    def attempt(self) -> Attempt | None:
        """The latest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def deadline(self) -> datetime:
        """When this Action's own work must be over: counted from acceptance, or from a person's grant."""
        request = self.request
        decided = self.approval.decided if self.approval else None
        if decided is not None and decided.granted and not decided.by_policy:
            return after(decided.at, request.timeout_ms)
        return request.deadline

    @property
    def effect(self) -> Effect:
        """What this Action may have done in the world, over all its attempts."""
        effects = {attempt.effect for attempt in self.attempts}
        for effect in (Effect.CONFIRMED, Effect.POSSIBLE):
            if effect in effects:
                return effect
        return Effect.NONE


_ABOUT_AN_ATTEMPT = (AttemptAccepted, AttemptClosed, AttemptUnknown, EvidenceFound)


def _moves(action: Action, event: AttemptAccepted | AttemptClosed | AttemptUnknown | EvidenceFound) -> bool:
    """Only what is said of the latest attempt moves the Action; about an earlier one it is late evidence."""
    latest = action.attempt
    proves = not isinstance(event, EvidenceFound) or event.proves == "applied"
    return proves and latest is not None and latest.claim.attempt_id == event.attempt_id


def evolve(action: Action, event: Event, version: int) -> Action:
    """The Action after one more event. It only believes: rules live in commands."""
    state = NEXT.get((action.state, type(event)), action.state)
    if isinstance(event, _ABOUT_AN_ATTEMPT) and not _moves(action, event):
        state = action.state
    action = msgspec.structs.replace(action, version=version, state=state, updated_at=event.at)
    match event:
        case ActionAccepted():
            return msgspec.structs.replace(action, accepted=event, owner=event.owner)
        case OwnerChanged():
            return msgspec.structs.replace(action, owner=event.owner)
        case ApprovalRequested():
            return msgspec.structs.replace(action, approval=Approval(requested=event))
        case ApprovalDecided() if action.approval:
            return msgspec.structs.replace(action, approval=msgspec.structs.replace(action.approval, decided=event))
        case ApprovalExpired() if action.approval:
            return msgspec.structs.replace(action, approval=msgspec.structs.replace(action.approval, expired=True))
        case AttemptClaimed():
            return msgspec.structs.replace(action, attempts=(*action.attempts, Attempt(claim=event)))
        case AttemptAccepted() | AttemptClosed() | AttemptUnknown() | EvidenceFound():
            changed = tuple(
                attempts.evolve(attempt, event) if attempt.claim.attempt_id == event.attempt_id else attempt
                for attempt in action.attempts
            )
            return msgspec.structs.replace(action, attempts=changed)
        case CancelWished():
            return msgspec.structs.replace(action, cancel=action.cancel or event)
        case ActionSettled() if action.settled is None:
            approval = action.approval
            if approval is not None and approval.status == "pending":
                approval = msgspec.structs.replace(approval, revoked=True)
            return msgspec.structs.replace(action, settled=event, approval=approval)
        case _:
            return action


def replay(history: Iterable[Recorded]) -> Action:
    """The Action of a whole history."""
    action = Action()
    for recorded in history:
        action = evolve(action, recorded.event, recorded.version)
    return action


# ---- commands: they return the events to be stored, or refuse --------------------------------------------------------


def decide_approval(
    action: Action, policy: TenantPolicy, actor: Actor, *, granted: bool, reason: str, decision_id: str, at: datetime
) -> tuple[Event, ...]:
    """A person's decision about this Action. A denial also settles it: nothing is sent.

    A settled Action waits for nobody, also if it was cancelled before anybody decided.
    """
    if action.settled is not None:
        raise CallerError("policy.approval_not_pending", details={"status": action.settled.status})
    decided = approvals.decide(
        action.approval,
        policy,
        actor,
        action.request.principal,
        granted=granted,
        reason=reason,
        decision_id=decision_id,
        at=at,
    )
    if granted:
        return (decided,)
    return (decided, settle_without_effect("failed", "policy.approval_not_granted", at=at))


def wish_cancel(action: Action, actor: Actor, reason: str, *, at: datetime) -> tuple[Event, ...]:
    """Cancel: at once and without effect while nothing is claimed, else as a stored wish.

    A settled Action is refused; a settled start names its run, which is stopped by ``run_stop``. A repeated cancel
    adds nothing and is not refused, so that a caller whose answer was lost may ask again.
    """
    if action.cancel is not None:
        return ()
    if action.state is State.SETTLED:
        run_id = started_run(action)
        raise CallerError("action.already_settled", details={"run_id": run_id} if run_id else None)
    wish = CancelWished(at=at, by=actor.id, reason=reason)
    if action.state in (State.READY, State.AWAITING, State.CLOSED):
        return (wish, settle_without_effect("cancelled", "action.cancelled", at=at))
    return (wish,)


def claim(
    action: Action,
    owner: Fence,
    target: Target,
    *,
    attempt_id: str,
    lease_valid: bool,
    policy_hash: str,
    at: datetime,
) -> AttemptClaimed:
    """The decision to send this Action's mutation once: only for its owner, before its deadline, under its approval.

    An approval holds for the policy under which it was granted; ``policy_hash`` is that of the tenant's policy now.
    """
    request = action.request
    if request.operation not in MUTATIONS or action.state not in (State.READY, State.CLOSED):
        raise CallerError("action.already_settled", f"Nothing can be sent in state {action.state.value}.")
    if action.attempt is not None and action.attempt.unknown is not None:
        raise CallerError("action.already_settled", "Evidence that came late permits no new sending.")
    if action.owner != owner or not lease_valid:
        raise CallerError("host.owned_elsewhere")
    if target.tenant_binding and target.tenant_binding != request.tenant:
        raise CallerError("connector.hermes_agent.tenant_mismatch")
    if at >= action.deadline:
        raise CallerError("action.expired")
    if action.approval is not None:
        if action.approval.status != "approved":
            raise CallerError("policy.human_approval_required")
        if action.approval.requested.policy_hash != policy_hash:
            raise CallerError("policy.approval_not_granted", "The tenant's policy changed since the approval.")
        if at >= action.approval.usable_until or any(attempt.claim.approval_id for attempt in action.attempts):
            raise CallerError("policy.approval_expired")
    return AttemptClaimed(
        at=at,
        attempt_id=attempt_id,
        number=len(action.attempts) + 1,
        operation=request.operation,
        target=target,
        owner=owner,
        request_digest=request.request_digest,
        key=request.key,
        run_id=request.run_id,
        approval_id=action.approval.requested.approval_id if action.approval else "",
    )


def settle_without_effect(
    status: str,
    code: str,
    *,
    at: datetime,
    details: Mapping[str, str | int | bool | None] | None = None,
    message: str = "",
) -> ActionSettled:
    """A settlement of something that was never sent."""
    return ActionSettled(
        at=at, status=status, effect=Effect.NONE, code=code, message=message, details=dict(details or {})
    )


def settle_closed(action: Action, *, at: datetime) -> ActionSettled:
    """The settlement after an attempt that proved to be without effect: refused, or never sent."""
    attempt = action.attempt
    if attempt is None or attempt.closed is None:
        raise CallerError("action.result_not_ready")
    closed = attempt.closed
    return ActionSettled(
        at=at,
        status="failed",
        effect=Effect.NONE,
        code=closed.code,
        output=closed.answer,
        retry_after_ms=closed.retry_after_ms,
        details={
            "remote_status": closed.http_status,
            "provider_code": closed.provider_code,
            "sent": closed.sent,
            "cause": closed.cause,
            "attempts": len(action.attempts),
            "endpoint_id": action.request.endpoint_id,
            "credential_revision": attempt.claim.target.credential_revision,
        },
        evidence=(f"attempt:{attempt.claim.attempt_id}",),
    )


def settle_received(action: Action, *, at: datetime) -> ActionSettled:
    """The settlement by the provider's receipt or by evidence that the mutation was applied."""
    attempt = action.attempt
    if attempt is None or attempt.state is not AttemptState.ACCEPTED:
        raise CallerError("action.result_not_ready")
    accepted = attempt.accepted
    details: dict[str, str | int | bool | None] = {"attempts": len(action.attempts)}
    if accepted is not None:
        details |= {"run_id": accepted.run_id or action.request.run_id}
        if accepted.choice:
            details |= {"choice": accepted.choice, "resolved": accepted.resolved}
        if accepted.state:
            details |= {"status": accepted.state}
    elif attempt.found is not None:
        details |= {"run_id": action.request.run_id, "proved_by": attempt.found.source}
    return ActionSettled(
        at=at,
        status="completed",
        effect=Effect.CONFIRMED,
        output=accepted.answer if accepted else None,
        details=details,
        evidence=(f"attempt:{attempt.claim.attempt_id}",),
    )


def started_run(action: Action) -> str:
    """The handle that a start's receipt gave, or an empty string."""
    for attempt in reversed(action.attempts):
        if attempt.accepted is not None and attempt.accepted.run_id:
            return attempt.accepted.run_id
    return ""


def told_state(action: Action) -> str:
    """The lifecycle word for callers (AIP 3.3)."""
    match action.state:
        case State.AWAITING:
            return "pending_approval"
        case State.CLAIMED | State.RECEIVED:
            return "cancelling" if action.cancel else "running"
        case State.UNKNOWN:
            return "unknown"
        case State.SETTLED:
            return action.settled.status if action.settled else "unknown"
        case _:
            return "running" if action.accepted and action.accepted.operation not in MUTATIONS else "queued"


def is_waiting_read(action: Action) -> bool:
    """True for a read Action (status, events) that is not settled."""
    return (
        action.accepted is not None
        and action.accepted.operation in (Operation.RUN_STATUS, Operation.RUN_EVENTS)
        and action.state is not State.SETTLED
    )
