"""Everything this system can remember: one frozen value per event.

An event says what was decided or seen, in the past tense, with the time at which it was. Private content (inputs,
outputs, frames, provider texts) is a ``Private`` member; every other member is clear and is all that decisions use.
A new optional member needs no new version; a new meaning is a new event; topics are never used again.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

import msgspec

from domain.provider import Features
from domain.values import Effect, Fence, Mode, Operation, Private


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored fact. ``at`` is UTC and labels; it never decides an order (positions do)."""

    topic: ClassVar[str]
    class_version: ClassVar[int] = 1
    at: datetime


class KeyReserved(Event, frozen=True, kw_only=True):
    """A caller's key now names one Action. A later one in the same history reserves an expired key anew."""

    topic = "key.reserved"
    action_id: str
    capability_id: str
    principal: str
    fingerprint: str
    expires_at: datetime


class SessionTaken(Event, frozen=True, kw_only=True):
    """A start names this conversation. ``beside`` holds the earlier starts in it that were not over then."""

    topic = "session.taken"
    action_id: str
    beside: tuple[str, ...] = ()


class Target(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The endpoint as it was admitted when a claim was made."""

    endpoint_id: str
    origin: str
    tenant_binding: str = ""
    config_revision: str = ""
    credential_revision: str = ""
    features: Features = Features()


class ActionAccepted(Event, frozen=True, kw_only=True):
    """A request was admitted. ``input`` is what the caller sent, ``request_digest`` that of the body it forms.

    ``deadline`` bounds this Action's own work; ``run_deadline`` (start only) the run that it creates.
    ``reviewed`` holds the digests of the provider requests that a choice was made for.
    """

    topic = "action.accepted"
    action_id: str
    tenant: str
    principal: str
    principal_kind: str
    capability_id: str
    endpoint_id: str
    operation: Operation
    mode: Mode
    input: Private
    fingerprint: str
    deadline: datetime
    timeout_ms: int
    owner: Fence
    request_digest: str = ""
    key: str = ""
    key_history: str = ""
    run_id: str = ""
    choice: str = ""
    resolve_all: bool = False
    reviewed: tuple[str, ...] = ()
    max_events: int = 0
    requested_session: str = ""
    sent_session: str = ""
    history_kind: str = "none"
    session_key: Private | None = None
    run_deadline: datetime | None = None
    trace_id: str = ""
    correlation_id: str = ""
    aip_session: str = ""
    dropped: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    retry_of: str = ""


class ApprovalRequested(Event, frozen=True, kw_only=True):
    """The tenant's policy wants a decision before the mutation is sent (runs page, Resolve a pending approval)."""

    topic = "action.approval_requested"
    approval_id: str
    reason: str
    input_digest: str
    policy_decision: str
    policy_hash: str
    approver_roles: tuple[str, ...]
    expires_at: datetime


class ApprovalDecided(Event, frozen=True, kw_only=True):
    """A person, or the policy itself (``by_policy``), granted or denied."""

    topic = "action.approval_decided"
    approval_id: str
    decision_id: str
    granted: bool
    by: str
    by_kind: str
    reason: str
    policy_hash: str
    by_policy: bool = False


class ApprovalExpired(Event, frozen=True, kw_only=True):
    """The approval ran out before it was used."""

    topic = "action.approval_expired"
    approval_id: str


class CancelWished(Event, frozen=True, kw_only=True):
    """Somebody wants this Action cancelled. What follows depends on what was sent already."""

    topic = "action.cancel_wished"
    by: str
    reason: str


class AttemptClaimed(Event, frozen=True, kw_only=True):
    """The committed decision to send one mutation. Only the turn that committed it may send."""

    topic = "attempt.claimed"
    attempt_id: str
    number: int
    operation: Operation
    target: Target
    owner: Fence
    request_digest: str = ""
    key: str = ""
    run_id: str = ""
    approval_id: str = ""


class AttemptAccepted(Event, frozen=True, kw_only=True):
    """The provider's receipt. Proves what it says: created, applied or stopping; never an end."""

    topic = "attempt.accepted"
    attempt_id: str
    http_status: int
    answer_digest: str
    answer: Private
    run_id: str = ""
    choice: str = ""
    resolved: int | None = None
    state: str = ""
    replayed: bool = False
    late: bool = False


class AttemptClosed(Event, frozen=True, kw_only=True):
    """The attempt proved to be without effect by itself: refused by the provider, or never sent."""

    topic = "attempt.closed"
    attempt_id: str
    sent: bool
    code: str
    cause: str
    http_status: int | None = None
    provider_code: str = ""
    retry_after_ms: int | None = None
    answer_digest: str = ""
    answer: Private | None = None
    late: bool = False


class AttemptUnknown(Event, frozen=True, kw_only=True):
    """A claim without a provable result. It is never sent again; only evidence refines it."""

    topic = "attempt.unknown"
    attempt_id: str
    code: str
    cause: str
    http_status: int | None = None
    answer_digest: str = ""
    answer: Private | None = None


class EvidenceFound(Event, frozen=True, kw_only=True):
    """Evidence about an unknown attempt from another source than its own answer. ``proves``: applied or nothing."""

    topic = "attempt.evidence_found"
    attempt_id: str
    proves: str
    source: str
    reference: str


class ActionSettled(Event, frozen=True, kw_only=True):
    """The one final answer. ``status``: completed, failed, cancelled or expired. ``output`` is the result's object."""

    topic = "action.settled"
    status: str
    effect: Effect
    code: str = ""
    message: str = ""
    output: Private | None = None
    details: dict[str, str | int | bool | None] = {}
    retry_after_ms: int | None = None
    evidence: tuple[str, ...] = ()


class OwnerChanged(Event, frozen=True, kw_only=True):
    """Another host process goes on with this work after its owner expired or restarted."""

    topic = "owner.changed"
    owner: Fence
    previous: Fence


class HandleTaken(Event, frozen=True, kw_only=True):
    """Uniqueness of a handle per endpoint, whatever the tenant: history -/handle/<endpoint>/<digest of the run id>."""

    topic = "handle.taken"
    tenant: str
    action_id: str


class RunBound(Event, frozen=True, kw_only=True):
    """Hermes answered with a handle. Proves creation and scheduling, not progress."""

    topic = "run.bound"
    tenant: str
    endpoint_id: str
    run_id: str
    action_id: str
    attempt_id: str
    principal: str
    target: Target
    owner: Fence
    started_at: datetime
    requested_session: str = ""
    sent_session: str = ""
    deadline: datetime | None = None


class StatusSeen(Event, frozen=True, kw_only=True):
    """A status object for this run that says something new."""

    topic = "run.status_seen"
    state: str
    answer_digest: str
    answer: Private
    session_id: str = ""
    last_event: str = ""
    has_output: bool = False
    marks: tuple[str, ...] = ()
    updated_at: float | None = None


class StatusUnread(Event, frozen=True, kw_only=True):
    """Status reads began to fail, or fail in another way. ``missing``: this process does not know the run."""

    topic = "run.status_unread"
    code: str
    cause: str
    missing: bool = False
    http_status: int | None = None


class ChoiceClaimed(Event, frozen=True, kw_only=True):
    """A choice is about to be sent for these pending requests; nobody else may answer them."""

    topic = "run.choice_claimed"
    action_id: str
    attempt_id: str
    choice: str
    generations: tuple[int, ...]
    resolve_all: bool = False


class ChoiceAnswered(Event, frozen=True, kw_only=True):
    """What became of a claimed choice: accepted, refused, not_sent or unknown."""

    topic = "run.choice_answered"
    action_id: str
    attempt_id: str
    verdict: str
    resolved: int | None = None
    code: str = ""


class StopClaimed(Event, frozen=True, kw_only=True):
    """A stop is about to be sent for this run."""

    topic = "run.stop_claimed"
    action_id: str
    attempt_id: str


class StopAnswered(Event, frozen=True, kw_only=True):
    """What became of a claimed stop. ``state`` is the provider's word, ``stopping`` proves no cancellation."""

    topic = "run.stop_answered"
    action_id: str
    attempt_id: str
    verdict: str
    state: str = ""
    code: str = ""


class RunEnded(Event, frozen=True, kw_only=True):
    """Terminal evidence: a terminal status or a terminal frame, cited by history and version.

    ``result`` holds output, usage and error as the provider gave them; ``marks`` say why the claim deserves doubt.
    """

    topic = "run.ended"
    state: str
    source: str
    evidence: str
    result: Private
    has_output: bool = False
    marks: tuple[str, ...] = ()


class EndDisputed(Event, frozen=True, kw_only=True):
    """Evidence that came after the end and says otherwise. It stands beside the end and changes nothing."""

    topic = "run.end_disputed"
    state: str
    source: str
    evidence: str


class IntegrityMarked(Event, frozen=True, kw_only=True):
    """Facts that must not occur together did: for people to look at."""

    topic = "run.integrity_marked"
    kind: str
    detail: str


class RunDeadlinePassed(Event, frozen=True, kw_only=True):
    """The run outlived its deadline. Observation goes on; the outcome counts as unknown until there is evidence."""

    topic = "run.deadline_passed"


class SubscriptionIntended(Event, frozen=True, kw_only=True):
    """Stored before a stream is opened, so that on a provider without replay it is opened once, ever."""

    topic = "stream.subscription_intended"
    owner: Fence
    number: int
    resume_after: str = ""


class SubscriptionOpened(Event, frozen=True, kw_only=True):
    """The provider answered the subscription with an event stream."""

    topic = "stream.subscription_opened"
    number: int


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One ``approval.request`` frame: our generation (from 1, order of arrival), its digest and what it offers.

    ``digest`` is what a review names. The same text asked twice has two digests.
    """

    generation: int
    seq: int
    digest: str
    choices: tuple[str, ...] = ()
    request_id: str = ""


class FramesStored(Event, frozen=True, kw_only=True):
    """A batch of frames in order. ``kinds`` is run-length coded; ``frames`` holds the exact texts.

    ``first`` and ``count`` are our sequence numbers (from 1, no holes); ``last_id`` is the provider's id of the last
    frame that had one; ``answers`` counts approval.responded and ``tools_done`` names the frames after which no earlier
    request is pending.
    """

    topic = "stream.frames_stored"
    first: int
    count: int
    kinds: tuple[tuple[str, int], ...]
    digest: str
    size: int
    frames: Private
    asks: tuple[Ask, ...] = ()
    settles: tuple[tuple[int, str], ...] = ()
    last_id: str = ""
    last_provider_seq: int | None = None
    terminal_seq: int = 0
    terminal_state: str = ""
    faults: tuple[str, ...] = ()


class GapOpened(Event, frozen=True, kw_only=True):
    """From here on frames may have been missed: after our sequence ``after`` (0: from the first one)."""

    topic = "stream.gap_opened"
    number: int
    after: int
    reason: str


class GapClosed(Event, frozen=True, kw_only=True):
    """The far edge of a gap: nothing is missed after it. ``by``: terminal_status, terminal_frame, replay or resumed."""

    topic = "stream.gap_closed"
    number: int
    before: int
    by: str


class StreamClosed(Event, frozen=True, kw_only=True):
    """The subscription is over, for whatever reason; no end of the run is concluded from it."""

    topic = "stream.closed"
    number: int
    reason: str


class SequenceTaken(Event, frozen=True, kw_only=True):
    """A host process took the next sequence of its replica; every older process of it decides nothing any more."""

    topic = "fence.taken"
    instance: str
    release: str


class SequenceExpired(Event, frozen=True, kw_only=True):
    """Another host watched a full lease time without a renewal and closed the sequence."""

    topic = "fence.expired"
    by: Fence
    watched_ms: int


class LeaseRenewed(Event, frozen=True, kw_only=True):
    """The process that holds this sequence is alive; other hosts time its silence by their own clocks."""

    topic = "host.lease_renewed"
    sequence: int


class RecoverySummed(Event, frozen=True, kw_only=True):
    """What start-up recovery found (runbook, Interpret host readiness precisely). ``began_at`` is its start."""

    topic = "host.recovery_summed"
    sequence: int
    began_at: datetime
    pending_approvals: int
    recoverable_transactions: int
    queued_results: int
    delegation_results: int
    callback_deliveries: int
    resumed: int = 0
    unknown: int = 0


class RequestRefused(Event, frozen=True, kw_only=True):
    """An audited refusal, in a history of its own. Holds no content of the request."""

    topic = "audit.request_refused"
    by: str
    route: str
    code: str
    subject: str = ""


TOPICS: dict[str, type[Event]] = {kind.topic: kind for kind in Event.__subclasses__()}
"""Every event by its topic: the closed table from which stored events are read."""
