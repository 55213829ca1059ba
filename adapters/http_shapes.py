"""The shapes of answers, as the OpenAPI document publishes them (AIP 3.1 to 3.10; interface page).

They describe what the projections build; members that a shape does not name may be there too.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from adapters.http_wire import ErrorBody


class AsOf(msgspec.Struct, kw_only=True):
    """The journal position up to which a view was folded, and when that was read."""

    position: int
    at: datetime


class ActionStatus(msgspec.Struct, kw_only=True):
    """Where an Action stands (AIP 3.2)."""

    action_id: str
    capability_id: str
    state: str
    started_at: datetime
    updated_at: datetime
    links: dict[str, str]
    session_id: str = ""
    correlation_id: str = ""
    result_status: str = ""
    queued_state: str = ""
    approval_id: str = ""
    completed_at: datetime | None = None


class ActionResult(msgspec.Struct, kw_only=True):
    """The retained result of an Action (AIP 3.1)."""

    action_id: str
    status: Literal["completed", "failed", "cancelled", "pending_approval", "requires_human"]
    settled: bool
    output: Any = None
    error: ErrorBody | None = None


class Ack(msgspec.Struct, kw_only=True):
    """An Action was accepted; its result follows."""

    action_id: str
    status: Literal["accepted", "rejected", "queued", "streaming", "cached"]
    reason: str = ""


class ResultAnswer(msgspec.Struct, kw_only=True):
    """A result; ``settled`` is false while it is provisional."""

    action_result: ActionResult
    settled: bool


class AcceptedAnswer(msgspec.Struct, kw_only=True):
    """Accepted work: an acknowledgement, or a result that waits for a decision."""

    ack: Ack | None = None
    action_result: ActionResult | None = None
    settled: bool = False


class StatusAnswer(msgspec.Struct, kw_only=True):
    """The state of one Action."""

    action_status: ActionStatus


class CancelDone(msgspec.Struct, kw_only=True):
    """What a cancel did, and the Action of a stop that it asked for."""

    what: Literal["cancelled_without_effect", "wish_stored", "stop_requested", "nothing_to_do"]
    stop_action_id: str = ""


class CancelAnswer(msgspec.Struct, kw_only=True):
    """The state after a cancel."""

    action_status: ActionStatus
    cancel: CancelDone


class ActionList(msgspec.Struct, kw_only=True):
    """A page of Actions by the position of their last change."""

    actions: list[ActionStatus]
    total_size: int
    cursor: str = ""


class ActionListAnswer(msgspec.Struct, kw_only=True):
    """A list of Actions."""

    action_list: ActionList


class FeedEvent(msgspec.Struct, kw_only=True):
    """One stored event (AIP 3.2)."""

    id: str
    kind: str
    occurred_at: datetime
    action_id: str
    data: dict[str, Any]
    session_id: str = ""
    correlation_id: str = ""
    actor: dict[str, Any] | None = None


class Chunk(msgspec.Struct, kw_only=True):
    """One provider event of a ``run_events`` Action (AIP 11.7); sequences count from 0."""

    action_id: str
    sequence: int
    kind: Literal["data", "progress", "tool", "thought", "preview", "pending_approval", "error", "done"]
    data: Any
    part: dict[str, Any] | None = None


class ActionEvents(msgspec.Struct, kw_only=True):
    """A page of an Action's feed; ``cursor`` is always set, ``terminal`` says that nothing can follow."""

    action_id: str
    events: list[FeedEvent]
    chunks: list[Chunk]
    cursor: str
    terminal: bool


class ActionEventsAnswer(msgspec.Struct, kw_only=True):
    """A page of an Action's feed."""

    action_events: ActionEvents


class ApprovalRecord(msgspec.Struct, kw_only=True):
    """The approval of one Action (AIP 3.6)."""

    request: dict[str, Any]
    status: Literal["pending", "approved", "denied", "expired", "revoked"]
    created_at: datetime
    updated_at: datetime
    decision: dict[str, Any] | None = None
    action_status: ActionStatus | None = None
    evidence_payload: dict[str, Any] | None = None


class ApprovalAnswer(msgspec.Struct, kw_only=True):
    """One approval."""

    approval_record_view: ApprovalRecord


class ApprovalList(msgspec.Struct, kw_only=True):
    """A page of approvals, without the snapshots of inputs."""

    approvals: list[ApprovalRecord]
    total_size: int
    cursor: str = ""


class ApprovalListAnswer(msgspec.Struct, kw_only=True):
    """A list of approvals."""

    approval_list: ApprovalList


class CallbackDelivery(msgspec.Struct, kw_only=True):
    """The delivery of a result to a callback (AIP 3.8)."""

    delivery_id: str
    status: str


class CallbackList(msgspec.Struct, kw_only=True):
    """A page of deliveries."""

    deliveries: list[CallbackDelivery]
    cursor: str = ""


class CallbackListAnswer(msgspec.Struct, kw_only=True):
    """A list of deliveries."""

    callback_delivery_list: CallbackList


class CallbackAnswer(msgspec.Struct, kw_only=True):
    """One delivery."""

    callback_delivery_record: CallbackDelivery


class AuditEvent(msgspec.Struct, kw_only=True):
    """One stored event with its place in the journal (AIP 3.10)."""

    id: str
    actor: dict[str, Any]
    action: str
    occurred_at: datetime
    data: dict[str, Any]


class AuditResult(msgspec.Struct, kw_only=True):
    """A page of the audit; it may be empty and still have a cursor while more is to be searched."""

    events: list[AuditEvent]
    cursor: str = ""


class AuditAnswer(msgspec.Struct, kw_only=True):
    """An answer of the audit."""

    audit_query_result: AuditResult


class Manifest(msgspec.Struct, kw_only=True):
    """Discovery (AIP 3.4)."""

    manifest_version: str
    agent: dict[str, Any]
    profiles: list[str]
    capabilities: list[dict[str, Any]]
    security: dict[str, Any]
    limits: dict[str, Any]
    compatibility: dict[str, Any]


class Capabilities(msgspec.Struct, kw_only=True):
    """The capabilities with their contracts."""

    capabilities: list[dict[str, Any]]


class RunList(msgspec.Struct, kw_only=True):
    """A page of runs by the position of their last change."""

    runs: list[dict[str, Any]]
    total_size: int
    as_of: AsOf
    cursor: str = ""


class RunAnswer(msgspec.Struct, kw_only=True):
    """One run with everything known of it."""

    run_id: str
    endpoint_id: str
    state: Literal[
        "running", "waiting_for_approval", "stopping", "completed", "failed", "cancelled", "interrupted", "unknown"
    ]
    as_of: AsOf
    unknown_reason: Literal["evidence_lost", "contradicted", "deadline_passed"] | None = None


class RunEvents(msgspec.Struct, kw_only=True):
    """A page of a run's feed; ``cursor`` is always set, ``terminal`` says that the observation is over."""

    run_id: str
    events: list[dict[str, Any]]
    cursor: str
    terminal: bool
    as_of: AsOf


class Explained(msgspec.Struct, kw_only=True):
    """The explained Action."""

    action_id: str
    operation: str
    state: str
    effect: Literal["none", "possible", "confirmed"]
    facts_known: list[dict[str, Any]]
    facts_unknown: list[dict[str, Any]]
    next_step: dict[str, Any]
    must_not: list[str]
    as_of: AsOf


class Recovery(msgspec.Struct, kw_only=True):
    """Unfinished work by reason, and beside it the start-up summary."""

    total: int
    groups: list[dict[str, Any]]
    unreadable_histories: list[dict[str, Any]]
    unreadable_count: int
    as_of: AsOf
    at_start: dict[str, Any] | None = None
    actions_cursor: str = ""
    runs_cursor: str = ""


class NeedsPerson(msgspec.Struct, kw_only=True):
    """Work that waits for a person, oldest first; ``follow_cursor`` is where a feed of further work begins."""

    needs_person: list[dict[str, Any]]
    total_size: int
    follow_cursor: str
    as_of: AsOf
    cursor: str = ""
