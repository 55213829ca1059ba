"""The policy gate of ``run_approval`` and ``run_stop``: who may let one mutation go to one endpoint.

This gate never decides the provider's own gate: a granted Action sends exactly the choice it was accepted with, a
denied one sends nothing (runs page, Resolve a pending provider approval; AIP 13.7).
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from domain.errors import CallerError
from domain.events import ApprovalDecided, ApprovalExpired, ApprovalRequested, Event
from domain.values import Actor, Operation, after, canonical, sha256

APPROVAL_TTL_MS = 900_000
EVIDENCE = ("reason", "input_snapshot", "policy_decision")


class TenantPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant grants. ``direct`` names operations granted without a person, ``choices`` the allowed answers."""

    id: str
    approver_roles: tuple[str, ...] = ("approver",)
    allow_self_approval: bool = False
    direct: tuple[str, ...] = ()
    choices: tuple[str, ...] = ("once", "deny")
    resolve_all: bool = False
    one_run_per_session: bool = False

    @property
    def hash(self) -> str:
        """Digest of the policy's words: a decision holds only under the policy for which it was made."""
        return sha256(canonical(msgspec.to_builtins(self)))


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """The approval of one Action: its request and, once there is one, its decision."""

    requested: ApprovalRequested
    decided: ApprovalDecided | None = None
    expired: bool = False
    revoked: bool = False

    @property
    def status(self) -> str:
        """``pending``, ``approved``, ``denied``, ``expired``, or ``revoked``: the Action ended without a decision."""
        if self.expired:
            return "expired"
        if self.decided is None:
            return "revoked" if self.revoked else "pending"
        return "approved" if self.decided.granted else "denied"

    @property
    def usable_until(self) -> datetime:
        """A waiting or granted approval is void from this time on (15 minutes)."""
        return self.requested.expires_at


def check_policy(policy: TenantPolicy, operation: Operation, choice: str, resolve_all: bool) -> None:
    """Refuse what the tenant's policy never grants, before anything is stored as accepted."""
    if operation is not Operation.RUN_APPROVAL:
        return
    if choice not in policy.choices:
        raise CallerError("policy.choice_denied", details={"choice": choice, "allowed": list(policy.choices)})
    if resolve_all and not policy.resolve_all:
        raise CallerError("policy.resolve_all_denied")


def request(
    policy: TenantPolicy,
    operation: Operation,
    *,
    approval_id: str,
    decision_id: str,
    reason: str,
    input_digest: str,
    at: datetime,
) -> tuple[Event, ...]:
    """The approval request of a governed mutation, and the policy's own grant where it needs no person."""
    asked = ApprovalRequested(
        at=at,
        approval_id=approval_id,
        reason=reason,
        input_digest=input_digest,
        policy_decision="granted_by_policy" if operation.value in policy.direct else "person_required",
        policy_hash=policy.hash,
        approver_roles=policy.approver_roles,
        expires_at=after(at, APPROVAL_TTL_MS),
    )
    if operation.value not in policy.direct:
        return (asked,)
    granted = ApprovalDecided(
        at=at,
        approval_id=approval_id,
        decision_id=decision_id,
        granted=True,
        by=f"policy:{policy.id}",
        by_kind="system",
        reason=f"{operation.value} is granted directly by the tenant's policy",
        policy_hash=policy.hash,
        by_policy=True,
    )
    return (asked, granted)


def decide(
    approval: Approval | None,
    policy: TenantPolicy,
    actor: Actor,
    requester: str,
    *,
    granted: bool,
    reason: str,
    decision_id: str,
    at: datetime,
) -> ApprovalDecided:
    """A person's decision. Refused without a role, for the requester, without a reason, twice or too late."""
    if approval is None or approval.status != "pending":
        raise CallerError("policy.approval_not_pending", details={"status": approval.status if approval else "none"})
    if at >= approval.usable_until:
        raise CallerError("policy.approval_expired")
    if not actor.may("approval:write") or not set(actor.roles) & set(approval.requested.approver_roles):
        raise CallerError("policy.approver_unauthorized")
    if actor.id == requester and not policy.allow_self_approval:
        raise CallerError("policy.separation_of_duties.requester")
    if not reason.strip():
        raise CallerError("policy.reason_required")
    if policy.hash != approval.requested.policy_hash:
        raise CallerError("policy.approval_not_pending", "The tenant's policy changed since the request was made.")
    return ApprovalDecided(
        at=at,
        approval_id=approval.requested.approval_id,
        decision_id=decision_id,
        granted=granted,
        by=actor.id,
        by_kind=actor.kind,
        reason=reason,
        policy_hash=policy.hash,
    )


def expire(approval: Approval, *, at: datetime) -> ApprovalExpired:
    """The record that a waiting or granted approval ran out unused."""
    return ApprovalExpired(at=at, approval_id=approval.requested.approval_id)
