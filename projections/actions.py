"""Actions: one row per Action, and how status, result and lists are told (AIP 3.1 to 3.3).

An unknown outcome is told as such: ``requires_human`` with the code ``outcome_unknown``, never as failed or completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from domain import action as actions
from domain.action import Action, State
from domain.attempt import Attempt
from domain.errors import PREFIX, TABLE, CallerError, HostError
from domain.events import (
    ActionAccepted,
    ActionSettled,
    AttemptAccepted,
    AttemptClaimed,
    AttemptClosed,
    AttemptUnknown,
    Event,
    EvidenceFound,
)
from domain.history import Recorded
from domain.values import MUTATIONS, Effect, Operation, Sealed, rfc3339
from projections import Facets, Projection, Row, sealed, with_fact, with_needs, without_content

OUTCOME_UNKNOWN = PREFIX + "outcome_unknown"

RESULT_STATUS = {
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "expired": "failed",
    "pending_approval": "pending_approval",
    "unknown": "requires_human",
}
"""The status word of a result for each told state that has one; the others have no result yet."""

UNFINISHED = {
    State.NEW: "",
    State.AWAITING: "awaiting_approval",
    State.READY: "accepted_not_claimed",
    State.CLAIMED: "claimed_in_flight",
    State.CLOSED: "attempt_closed_waiting",
    State.UNKNOWN: "outcome_unknown",
    State.RECEIVED: "received_not_settled",
    State.SETTLED: "",
}
"""Why an Action in this state is unfinished work. A read that was accepted is ``read_in_progress``."""

NEXT_STEP = {
    Operation.RUN_START: "Look for this start at the endpoint and record what is found; it is not sent again.",
    Operation.RUN_APPROVAL: "Read the run's status and its stored events; the choice is not sent again.",
    Operation.RUN_STOP: "Read the run's status until it shows an end; the stop is not sent again.",
}


class ActionRow(Row, frozen=True, kw_only=True, omit_defaults=True):
    """One Action as the domain tells it. It carries the caller's input and the settled output, both sealed."""

    history: str = ""
    action: Action = Action()

    @property
    def request(self) -> ActionAccepted:
        """What was accepted."""
        return self.action.request

    @property
    def state(self) -> str:
        """The lifecycle word (AIP 3.3)."""
        return actions.told_state(self.action)

    @property
    def run_id(self) -> str:
        """The run that it speaks to, or that its receipt named."""
        return self.request.run_id or actions.started_run(self.action)

    @property
    def session(self) -> str:
        """The caller's own session, else the provider's session that was sent or asked for."""
        request = self.request
        return request.aip_session or request.sent_session or request.requested_session

    @property
    def reason(self) -> str:
        """Why it is unfinished work, or an empty text."""
        if self.action.state is State.READY and self.request.operation not in MUTATIONS:
            return "read_in_progress"
        return UNFINISHED[self.action.state]


def key(recorded: Recorded) -> str | None:
    """``tenant/action id`` for the events of an Action's history."""
    tenant, kind, name = [*recorded.history.split("/", 2), "", ""][:3]
    return f"{tenant}/{name}" if kind == "act" else None


def action_key(tenant: str, action_id: str) -> str:
    """The row of an Action."""
    return f"{tenant}/{action_id}"


def _carried(event: Event) -> Event:
    """The event with no more private content than a row answers from: the journal keeps the rest."""
    match event:
        case ActionAccepted():
            return msgspec.structs.replace(event, session_key=without_content(event.session_key))
        case AttemptAccepted():
            return msgspec.structs.replace(event, answer=without_content(event.answer) or event.answer)
        case AttemptClosed() | AttemptUnknown():
            return msgspec.structs.replace(event, answer=without_content(event.answer))
        case _:
            return event


def _word(event: Event) -> str:
    match event:
        case AttemptClaimed():
            return event.attempt_id
        case AttemptClosed() | AttemptUnknown():
            return f"{event.code} {event.cause}".strip()
        case AttemptAccepted():
            return event.run_id or event.state or event.choice
        case EvidenceFound():
            return f"{event.proves} {event.source}"
        case ActionSettled():
            return f"{event.status} {event.code}".strip()
        case _:
            return ""


def _waited(action: Action) -> list[tuple[str, str]]:
    approval, attempt = action.approval, action.attempt
    if action.state is State.AWAITING and approval and approval.requested.policy_decision == "person_required":
        return [("pending_approval", approval.requested.approval_id)]
    if action.state is State.UNKNOWN and attempt:
        return [("outcome_unknown", attempt.claim.attempt_id)]
    return []


def fold(row: ActionRow | None, recorded: Recorded) -> ActionRow:
    """The row after one more event of its Action."""
    row = row or ActionRow(history=recorded.history)
    action = actions.evolve(row.action, _carried(recorded.event), recorded.version)
    row = with_fact(msgspec.structs.replace(row, action=action), recorded, _word(recorded.event))
    return with_needs(row, recorded, _waited(action))


def facets(row: ActionRow) -> Facets | None:
    """What lists of Actions filter by."""
    accepted, approval = row.action.accepted, row.action.approval
    if accepted is None:
        return None
    return Facets(
        tenant=accepted.tenant,
        state=row.state,
        principal=accepted.principal,
        capability_id=accepted.capability_id,
        endpoint_id=accepted.endpoint_id,
        session=row.session,
        run_id=row.run_id,
        approval_id=approval.requested.approval_id if approval else "",
        approval=approval.status if approval else "",
        reason=row.reason,
        person=row.open_needs[0].reason if row.open_needs else "",
        open=row.action.state is not State.SETTLED,
        needed=bool(row.needs),
        at=accepted.at,
    )


ACTIONS = Projection(
    name="actions",
    version=2,
    topics=frozenset(
        {
            "action.accepted", "action.approval_requested", "action.approval_decided", "action.approval_expired",
            "action.cancel_wished", "attempt.claimed", "attempt.accepted", "attempt.closed", "attempt.unknown",
            "attempt.evidence_found", "action.settled", "owner.changed",
        }
    ),
    histories=frozenset({"act"}),
    row=ActionRow,
    key=key,
    fold=fold,
    facets=facets,
)  # fmt: skip


# ---- answers ---------------------------------------------------------------------------------------------------------


def action_links(action_id: str) -> dict[str, str]:
    """Where an Action's other answers are."""
    base = f"/aip/v1/actions/{action_id}"
    return {
        "self": base,
        "result": f"{base}/result",
        "events": f"{base}/events",
        "chunks": f"{base}/chunks",
        "cancel": f"{base}/cancel",
    }


def action_status(row: ActionRow) -> dict[str, Any]:
    """``action_status`` (AIP 3.2)."""
    request, action, state = row.request, row.action, row.state
    body: dict[str, Any] = {
        "action_id": request.action_id,
        "capability_id": request.capability_id,
        "state": state,
        "started_at": rfc3339(request.at),
        "updated_at": rfc3339(row.updated_at or request.at),
        "links": action_links(request.action_id),
    }
    optional = {
        "session_id": row.session,
        "correlation_id": request.correlation_id,
        "result_status": RESULT_STATUS.get(state, ""),
        "queued_state": "queued" if action.state in (State.READY, State.CLOSED) and state == "queued" else "",
        "approval_id": action.approval.requested.approval_id if action.approval else "",
        "completed_at": rfc3339(action.settled.at) if action.settled else "",
    }
    return body | {name: value for name, value in optional.items() if value}


def is_settled(row: ActionRow) -> bool:
    """True once the one final answer stands."""
    return row.action.state is State.SETTLED


def sealed_input(row: ActionRow) -> Sealed | None:
    """The caller's input as sealed content, to be opened for those who may see it."""
    return sealed(row.request.input)


def sealed_output(row: ActionRow) -> Sealed | None:
    """The settled result's content, sealed; ``None`` if it has none."""
    return sealed(row.action.settled.output) if row.action.settled else None


def _unknown_error(row: ActionRow, attempt: Attempt) -> dict[str, Any]:
    unknown, operation = attempt.unknown, row.request.operation
    proved = [fact.evidence for fact in row.facts if fact.topic in ("attempt.claimed", "attempt.unknown")]
    details: dict[str, Any] = {
        "uncertain_outcome": True,
        "operation": operation.value,
        "attempt_id": attempt.claim.attempt_id,
        "cause": unknown.code if unknown else "",
        "evidence": proved,
        "next_step": NEXT_STEP.get(operation, ""),
    }
    if unknown and unknown.http_status is not None:
        details["remote_status"] = unknown.http_status
    return HostError(OUTCOME_UNKNOWN, effect=row.action.effect, details=details).body() | {"retryable": False}


def _settled_error(row: ActionRow, settled: ActionSettled) -> dict[str, Any] | None:
    if not settled.code and settled.status != "failed":
        return None
    code = settled.code if settled.code in TABLE else "internal.fault"
    details = {name: value for name, value in settled.details.items() if value not in (None, "")}
    body = HostError(
        code,
        settled.message,
        retry_after_ms=settled.retry_after_ms,
        effect=settled.effect,
        details={"operation": row.request.operation.value, **details},
    ).body()
    return body | {"retryable": body["retryable"] and row.request.operation not in MUTATIONS}


def action_result(row: ActionRow, output: Any = None) -> dict[str, Any]:
    """``action_result`` (AIP 3.1). ``output`` is the opened content of ``sealed_output``, or a mask, as JSON.

    Raises CallerError ``action.result_not_ready`` while nothing is known. ``settled`` is false on a provisional answer:
    an unknown outcome, and an Action that waits for a decision.
    """
    status = RESULT_STATUS.get(row.state)
    action = row.action
    if status is None:
        raise CallerError("action.result_not_ready", details={"state": row.state})
    body: dict[str, Any] = {"action_id": row.request.action_id, "status": status, "settled": is_settled(row)}
    if action.state is State.UNKNOWN and action.attempt is not None:
        return body | {"error": _unknown_error(row, action.attempt)}
    if action.settled is None:
        approval_id = action.approval.requested.approval_id if action.approval else ""
        return body | {"output": {"approval_id": approval_id}}
    if output is None and action.settled.effect is Effect.CONFIRMED:
        output = dict(action.settled.details)
    if output is not None:
        body["output"] = output
    error = _settled_error(row, action.settled)
    return body | {"error": error} if error else body


def action_list(rows: Sequence[ActionRow], total: int, cursor: str) -> dict[str, Any]:
    """``action_list`` (AIP 3.2): the page's statuses, how many there are in all, and the cursor after the last one."""
    body: dict[str, Any] = {"actions": [action_status(row) for row in rows], "total_size": total}
    return body | {"cursor": cursor} if cursor else body


def claim_evidence(row: ActionRow) -> str:
    """The event of the latest claim, or an empty text."""
    return next((fact.evidence for fact in reversed(row.facts) if fact.topic == AttemptClaimed.topic), "")
