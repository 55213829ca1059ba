"""Approvals: what waits for a tenant's decision and what was decided (AIP 3.6).

An approval is part of its Action's row. The provider's own requests are another gate with records of their own; they
are told with their run (runs page, Resolve a pending provider approval).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from domain.approval import EVIDENCE, Approval
from domain.errors import CallerError
from domain.values import rfc3339
from projections.actions import ActionRow, action_status


def approval_of(row: ActionRow) -> Approval:
    """The approval of an Action's row; CallerError ``action.not_found`` if it needed none."""
    if row.action.approval is None:
        raise CallerError("action.not_found")
    return row.action.approval


def approval_record_view(row: ActionRow, opened_input: Any = None) -> dict[str, Any]:
    """``approval_record_view``. ``opened_input`` is the caller's input, or a mask; without it there is no snapshot."""
    approval, request = approval_of(row), row.request
    asked, decided = approval.requested, approval.decided
    requester = {"id": request.principal, "kind": request.principal_kind, "tenant_id": request.tenant}
    body: dict[str, Any] = {
        "request": {
            "id": asked.approval_id,
            "action_id": request.action_id,
            "capability_id": request.capability_id,
            "requester": requester,
            "subject": requester,
            "approver_selector": {"type": "tenant_policy"},
            "approver_roles": list(asked.approver_roles),
            "reason": asked.reason,
            "evidence": [
                {"id": f"evidence:{kind}:{request.action_id}", "kind": kind, "hash": digest}
                for kind, digest in zip(EVIDENCE, ("", asked.input_digest, asked.policy_hash), strict=True)
                if digest
            ],
            "expires_at": rfc3339(asked.expires_at),
            "policy_decision_id": f"policy:{request.action_id}",
            "policy_decision": asked.policy_decision,
            "policy_hash": asked.policy_hash,
            "operation": request.operation.value,
            "run_id": request.run_id,
        },
        "status": approval.status,
        "action_status": action_status(row),
        "created_at": rfc3339(asked.at),
        "updated_at": rfc3339(decided.at if decided else row.updated_at or asked.at),
    }
    if request.choice:
        body["request"] |= {
            "choice": request.choice,
            "resolve_all": request.resolve_all,
            "reviewed": list(request.reviewed),
        }
    if decided is not None:
        body["decision"] = {
            "approval_id": asked.approval_id,
            "decision_id": decided.decision_id,
            "decision": "approved" if decided.granted else "denied",
            "approver": {"id": decided.by, "kind": decided.by_kind, "tenant_id": request.tenant},
            "decided_at": rfc3339(decided.at),
            "reason": decided.reason,
            "policy_hash": decided.policy_hash,
            "by_policy": decided.by_policy,
        }
    if opened_input is not None:
        body["evidence_payload"] = {
            "action_id": request.action_id,
            "capability_id": request.capability_id,
            "input_hash": asked.input_digest,
            "input": opened_input,
        }
    return body


def approval_list(rows: Sequence[ActionRow], total: int, cursor: str) -> dict[str, Any]:
    """``approval_list``: the page's records without inputs, how many there are, and the cursor after the last one."""
    body: dict[str, Any] = {"approvals": [approval_record_view(row) for row in rows], "total_size": total}
    return body | {"cursor": cursor} if cursor else body
