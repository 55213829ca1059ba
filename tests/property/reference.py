"""What callers must be told: a small model of the promises, written from the specification alone.

It knows what was asked for, and how each request to the provider ended as seen on the wire. It does not know how the
host works. Times are seconds. Words are those of the callers' lifecycle (AIP 3.3) and of the effect.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

KEY_LIFE_S = 86_400.0
APPROVAL_LIFE_S = 900.0
NEAR_S = 120.0
"""How far a call's own time can lie from the time of its effect: a patient caller repeats for a while."""

MUTATIONS = {"run_start", "run_approval", "run_stop"}
LIFECYCLE = {
    "queued", "running", "cancelling", "pending_approval", "unknown", "completed", "failed", "cancelled", "expired"
}  # fmt: skip
Told = tuple[str, str]
NOTHING: set[Told] = {(word, "none") for word in ("queued", "pending_approval", "failed", "cancelled", "expired")}
UNDER_WAY: set[Told] = {("running", "possible"), ("cancelling", "possible")}
UNKNOWN: Told = ("unknown", "possible")
DONE: Told = ("completed", "confirmed")
RECEIVED: set[Told] = {DONE, ("running", "confirmed"), ("cancelling", "confirmed")}


def reading(operation: str, run_id: str, sent: bool, status: int | None, whole: bool, body: bytes) -> str:
    """What an exchange proves (runs page, Failure handling): receipt, refused, not_sent or doubt."""
    if not sent:
        return "not_sent"
    if not whole or status is None:
        return "doubt"
    try:
        told = json.loads(body)
    except ValueError:
        return "doubt"
    if not isinstance(told, dict):
        return "doubt"
    error = told.get("error")
    if isinstance(error, dict) and (400 <= status < 500 or (status == 503 and error.get("code") == "gateway_draining")):
        return "refused"
    if operation == "run_start":
        return "receipt" if status == 202 and told.get("run_id") else "doubt"
    return "receipt" if status == 200 and told.get("run_id") == run_id else "doubt"


@dataclass
class Sending:
    """One request to the provider. ``reading`` is empty while nobody has got its end."""

    attempt_id: str
    reading: str = ""
    lost_sender: bool = False


@dataclass
class Asked:
    """One thing asked for once, under one Action."""

    action_id: str
    principal: str
    operation: str
    key: str
    words: str
    queued: bool
    at: float
    governed: bool = False
    decision: str = ""
    cancel: str = ""
    sendings: list[Sending] = field(default_factory=list)
    applied: bool = False
    lost_claim: bool = False
    over: bool = False

    @property
    def doubtful(self) -> bool:
        """True if a request may have acted without anybody holding its proof."""
        return any(sending.reading in ("", "doubt") for sending in self.sendings)

    @property
    def received(self) -> bool:
        """True if a receipt reached a sender."""
        return any(sending.reading == "receipt" for sending in self.sendings)


class Reference:
    """The promises to callers."""

    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}
        self._keys: dict[tuple[str, str], list[Asked]] = {}

    def take(self, asked: Asked) -> None:
        """It was admitted under a new Action."""
        self.asked[asked.action_id] = asked
        if asked.key:
            self._keys.setdefault((asked.operation, asked.key), []).append(asked)

    def holder(self, operation: str, key: str) -> Asked | None:
        """The latest Action under a key."""
        held = self._keys.get((operation, key))
        return held[-1] if held else None

    def submit(self, principal: str, operation: str, key: str, words: str, at: float) -> set[str]:
        """What may be answered: ``new``, the id of the original, or the code of a refusal (S12)."""
        held = self.holder(operation, key) if key else None
        if held is None:
            return {"new"}
        if held.principal != principal:
            same = "idempotency.conflict"
        else:
            same = held.action_id if held.words == words else "idempotency.input_hash_mismatch"
        age = at - held.at
        if age + NEAR_S < KEY_LIFE_S or not held.over:  # a key whose outcome is not known does not expire
            return {same}
        return {"new"} if age > KEY_LIFE_S + NEAR_S else {same, "new"}

    def decide(self, asked: Asked, person: str, approver: bool, at: float) -> set[str]:
        """What may be answered to a decision: ``stored`` or the code of a refusal (S8)."""
        gone = "policy.approval_not_pending"
        if not asked.governed or asked.decision or asked.over:
            return {gone, "policy.approval_expired"}
        late = {gone, "policy.approval_expired"}
        if at > asked.at + APPROVAL_LIFE_S + NEAR_S:
            return late
        told = {"stored"} if approver else {"policy.approver_unauthorized"}
        if approver and person == asked.principal:
            told = {"policy.separation_of_duties.requester"}
        return told if at < asked.at + APPROVAL_LIFE_S - NEAR_S else told | late

    def cancel(self, asked: Asked) -> set[str]:
        """What may be answered to a cancel."""
        told = {"cancelled_without_effect", "wish_stored", "nothing_to_do", "stop_requested"}
        if asked.over and not asked.cancel:
            return {"action.already_settled"}
        return told if asked.over or asked.cancel else told | {"action.already_settled"}

    # ---- what an Action may be told as -------------------------------------------------------------------------------

    def allowed(self, asked: Asked) -> set[Told]:
        """Every (state, effect) that would be true of this Action now (S1, S3, S6, P1)."""
        if asked.operation not in MUTATIONS:
            return {(word, effect) for word in LIFECYCLE - {"unknown", "expired"} for effect in ("none", "possible")}
        told: set[Told] = set(UNDER_WAY)
        if asked.lost_claim or asked.doubtful or any(sending.lost_sender for sending in asked.sendings):
            told.add(UNKNOWN)
        if asked.received:
            told |= RECEIVED
        if asked.applied and asked.operation != "run_start":
            told |= RECEIVED  # the run's own records may prove it
        if not asked.doubtful and not asked.received and not asked.lost_claim:
            told |= NOTHING
        if any(sending.lost_sender and sending.reading in ("refused", "not_sent") for sending in asked.sendings):
            told |= NOTHING
        return told

    def final(self, asked: Asked) -> set[Told]:
        """What is left of that once nothing moves any more and a host lives."""
        told = self.allowed(asked) - UNDER_WAY - (RECEIVED - {DONE})
        if asked.operation not in MUTATIONS:
            return told - {("queued", "none"), ("cancelling", "none")}
        last = asked.sendings[-1] if asked.sendings else None
        if last is not None and not last.lost_sender and not asked.lost_claim:
            if last.reading == "receipt":
                return {DONE}
            if last.reading == "doubt":
                return {UNKNOWN, DONE} if DONE in told else {UNKNOWN}
        if asked.over or not asked.governed or asked.decision:
            told.discard(("pending_approval", "none"))
        if asked.decision == "denied":
            return {("failed", "none")} if asked.cancel != "first" else {("cancelled", "none")}
        if not asked.cancel:
            told.discard(("cancelled", "none"))
        return told - {("queued", "none")}
