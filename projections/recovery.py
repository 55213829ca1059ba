"""Recovery: unfinished work by reason, and work that waits for a person.

Both are read from the rows of Actions and runs: a count and its list come from the same facet, so they agree. Each
transition into waiting is one entry with an id that never changes (runbook, Recover by provider state owner).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from domain import binding
from domain.history import Recorded
from domain.values import rfc3339
from projections import Need
from projections.actions import ActionRow
from projections.runs import RunRow

ACTION_REASONS: dict[str, str] = {
    "accepted_not_claimed": "Accepted; nothing was sent yet.",
    "read_in_progress": "A read that has not answered yet.",
    "awaiting_approval": "Waits for a decision under the tenant's policy; nothing was sent.",
    "claimed_in_flight": "Claimed; the sending is under way or its host has stopped.",
    "attempt_closed_waiting": "The last attempt had no effect; another one may follow before the deadline.",
    "outcome_unknown": "Sent, and what became of it is not provable.",
    "received_not_settled": "The provider's receipt is stored; the settlement follows.",
}
RUN_REASONS: dict[str, str] = {
    "run_followed": "The run goes on and is observed.",
    "run_stopping": "A stop may have reached the run; no end is proven.",
    "provider_approval_pending": "The provider waits for a choice.",
    "run_deadline_passed": "The run outlived its deadline; no end is proven.",
    "run_evidence_lost": "The provider's process does not know the run any more; no end is proven.",
    "run_contradicted": "Two ends are stored that differ.",
    "run_ended_in_doubt": "The end is stored together with marks that give it doubt.",
}
REASONS: dict[str, str] = ACTION_REASONS | RUN_REASONS
"""Every reason for which work counts as unfinished, in the operator's words."""

DECISIONS: dict[str, tuple[str, ...]] = {
    "pending_approval": ("approve", "deny", "cancel"),
    "outcome_unknown": ("look_at_endpoint", "wait"),
    "provider_approval_pending": ("run_approval", "run_stop", "wait"),
    "run_evidence_lost": ("look_at_endpoint", "wait"),
    "run_contradicted": ("review",),
    "run_deadline_passed": ("run_stop", "wait"),
    "choice_in_doubt": ("run_stop", "wait"),
    "stop_in_doubt": ("wait",),
    "integrity": ("review",),
}
"""What a person may decide for each reason to wait for one. None of them sends the same mutation again."""

WHY: dict[str, str] = {
    "pending_approval": "The tenant's policy wants a person's decision before this is sent.",
    "outcome_unknown": "It was sent, and no answer proves what became of it.",
    "provider_approval_pending": "The run stands still until somebody answers the provider's request.",
    "run_evidence_lost": "The provider does not know the run any more; its end cannot be read.",
    "run_contradicted": "The provider told two different ends of one run.",
    "run_deadline_passed": "The run goes on beyond its deadline.",
    "choice_in_doubt": "A choice was sent, and no answer proves whether it was applied.",
    "stop_in_doubt": "A stop was sent, and no answer proves whether it was taken.",
    "integrity": "Facts that exclude each other are stored.",
}


def unfinished_action(row: ActionRow) -> dict[str, Any]:
    """One unsettled Action in the recovery view."""
    request, attempt = row.request, row.action.attempt
    return {
        "kind": "action",
        "reason": row.reason,
        "means": REASONS[row.reason],
        "action_id": request.action_id,
        "operation": request.operation.value,
        "endpoint_id": request.endpoint_id,
        "run_id": row.run_id or None,
        "attempt_id": attempt.claim.attempt_id if attempt else None,
        "effect": row.action.effect.value,
        "owner": _owner(row.action.owner),
        "accepted_at": rfc3339(request.at),
        "updated_at": rfc3339(row.updated_at or request.at),
        "deadline": rfc3339(row.action.deadline),
        "evidence": row.facts[-1].evidence,
        "needs": [need.id for need in row.open_needs],
    }


def unfinished_run(row: RunRow) -> dict[str, Any]:
    """One run without a proven end, or with an end that deserves doubt, in the recovery view."""
    tie = row.run.tie
    return {
        "kind": "run",
        "reason": row.reason,
        "means": REASONS[row.reason],
        "run_id": tie.run_id,
        "endpoint_id": tie.endpoint_id,
        "action_id": tie.action_id,
        "state": row.state,
        "unknown_reason": row.unknown_reason or None,
        "marks": list(binding.marks(row.run)),
        "owner": _owner(row.run.owner),
        "started_at": rfc3339(tie.started_at),
        "last_observed_at": rfc3339(row.seen_at) if row.seen_at else None,
        "deadline": rfc3339(tie.deadline) if tie.deadline else None,
        "open_gaps": int(row.stream.open_gap is not None),
        "needs": [need.id for need in row.open_needs],
    }


def recovery_view(
    counts: Mapping[str, int],
    actions: Iterable[ActionRow],
    runs: Iterable[RunRow],
    *,
    unreadable: Iterable[Mapping[str, Any]] = (),
    at_start: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``/views/recovery``: unfinished work by reason with counts, unreadable histories, and the start-up summary.

    ``counts`` are those of the ``reason`` facet over both projections; the lists may be pages of them.
    """
    groups: dict[str, dict[str, Any]] = {
        reason: {"reason": reason, "means": REASONS[reason], "count": count, "work": []}
        for reason, count in sorted(counts.items())
        if reason in REASONS and count
    }
    work = [unfinished_action(row) for row in actions] + [unfinished_run(row) for row in runs]
    for entry in work:
        if entry["reason"] in groups:
            groups[entry["reason"]]["work"].append(entry)
    held = [dict(fault) for fault in unreadable]
    return {
        "total": sum(group["count"] for group in groups.values()),
        "groups": list(groups.values()),
        "unreadable_histories": held,
        "unreadable_count": len(held),
        "at_start": dict(at_start) if at_start is not None else None,
    }


def _owner(fence: Any) -> dict[str, Any] | None:
    return {"replica": fence.replica, "sequence": fence.sequence} if fence else None


# ---- people ----------------------------------------------------------------------------------------------------------


def told_need(row: ActionRow | RunRow, need: Need) -> dict[str, Any]:
    """One entry of ``/views/needs-person`` and of its feed."""
    subject: dict[str, Any]
    if isinstance(row, ActionRow):
        request = row.request
        subject = {
            "action_id": request.action_id,
            "operation": request.operation.value,
            "endpoint_id": request.endpoint_id,
            "run_id": row.run_id or None,
        }
    else:
        tie = row.run.tie
        subject = {"action_id": tie.action_id, "endpoint_id": tie.endpoint_id, "run_id": tie.run_id}
    return {
        "id": need.id,
        "kind": "needs-human",
        "reason": need.reason,
        "why": WHY[need.reason],
        "decisions": list(DECISIONS[need.reason]),
        "reference": need.reference or None,
        "position": need.position,
        "since": rfc3339(need.at),
        "met_at": rfc3339(need.met_at) if need.met_at else None,
        "evidence": need.evidence,
    } | subject


def needs_person(rows: Iterable[ActionRow | RunRow]) -> list[dict[str, Any]]:
    """What waits for a person now, oldest first."""
    found = [told_need(row, need) for row in rows for need in row.open_needs]
    return sorted(found, key=lambda entry: (entry["position"], entry["id"]))


def needs_after(rows: Iterable[ActionRow | RunRow], position: int) -> list[dict[str, Any]]:
    """The feed: transitions after a position, met or not, in the order of the journal.

    Rows that were not touched after the position have none, so a page of rows by position gives every transition.
    """
    found = [told_need(row, need) for row in rows for need in row.needs if need.position > position]
    return sorted(found, key=lambda entry: (entry["position"], entry["id"]))


def need_of(row: ActionRow | RunRow, recorded: Recorded) -> tuple[Need, ...]:
    """The needs that one event opened: what a callback or a chunk tells about it."""
    return tuple(need for need in row.needs if need.position == recorded.position)
