"""Four gates and their one combined answer, in the shape of AIP 5.2 (runbook, Interpret host readiness precisely)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from domain.values import t9

DETAIL_LIMIT = 1024
HEALTH: dict[str, Any] = {"status": "ok", "protocol": "AIP", "version": "1.0", "service": "aip-connector-host"}
"""The constant answer of ``/health``: this process answers, and nothing else (AIP 5.1)."""


class RecoverySummary(msgspec.Struct, frozen=True, kw_only=True):
    """What start-up recovery found. ``recovered_at`` is when it began; the numbers never change after start."""

    recovered_at: datetime
    pending_approvals: int = 0
    recoverable_transactions: int = 0
    queued_results: int = 0
    delegation_results: int = 0
    callback_deliveries: int = 0


class Gates(msgspec.Struct, frozen=True, kw_only=True):
    """The gates as a live probe found them. ``durability``: ephemeral, durable_single_process or durable_shared."""

    lease_valid: bool
    draining: bool
    storage_ready: bool
    connector_ready: bool
    durability: str
    recovery: RecoverySummary
    storage_detail: str = "ok"
    connector_detail: str = "ok"

    @property
    def ready(self) -> bool:
        """True only if all four gates pass."""
        return self.lease_valid and not self.draining and self.storage_ready and self.connector_ready


def ready_answer(gates: Gates) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of ``/ready``: 200 if all four gates pass, else 503."""
    summary = gates.recovery
    body = {
        "status": "ready" if gates.ready else "not_ready",
        "lease_valid": gates.lease_valid,
        "draining": gates.draining,
        "runtime": {
            "durability": gates.durability,
            "ready": gates.storage_ready,
            "detail": gates.storage_detail[:DETAIL_LIMIT],
            "recovery": {
                "recovered_at": t9(summary.recovered_at),
                "pending_approvals": summary.pending_approvals,
                "recoverable_transactions": summary.recoverable_transactions,
                "queued_results": summary.queued_results,
                "delegation_results": summary.delegation_results,
                "callback_deliveries": summary.callback_deliveries,
            },
        },
        "connector": {"ready": gates.connector_ready, "detail": gates.connector_detail[:DETAIL_LIMIT]},
    }
    return (200 if gates.ready else 503), body
