"""The eight metrics of the host (AIP 5.3; runbook, Host metrics): a snapshot and its exposition text.

They speak of this process alone, start at zero with it, carry no labels, and a scrape asks nobody: the two readiness
flags are what the last probe or heartbeat found.
"""

from __future__ import annotations

import msgspec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HostMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One reading. ``storage_ready`` and ``connector_ready`` are the flags cached by the last probe."""

    lease_valid: bool = False
    draining: bool = False
    storage_ready: bool = False
    connector_ready: bool = False
    in_flight: int = 0
    requests_total: int = 0
    rejected_total: int = 0
    heartbeat_failures_total: int = 0
    lease_recovery_attempts_total: int = 0
    lease_recoveries_total: int = 0

    @property
    def ready(self) -> bool:
        """All four gates by their cached flags."""
        return self.lease_valid and not self.draining and self.storage_ready and self.connector_ready


def exposition(metrics: HostMetrics) -> str:
    """The Prometheus text: type lines and values in the published order, no help lines."""
    samples = (
        ("ready", "gauge", int(metrics.ready)),
        ("storage_ready", "gauge", int(metrics.storage_ready)),
        ("in_flight", "gauge", metrics.in_flight),
        ("requests_total", "counter", metrics.requests_total),
        ("rejected_total", "counter", metrics.rejected_total),
        ("heartbeat_failures_total", "counter", metrics.heartbeat_failures_total),
        ("lease_recovery_attempts_total", "counter", metrics.lease_recovery_attempts_total),
        ("lease_recoveries_total", "counter", metrics.lease_recoveries_total),
    )
    return "".join(
        f"# TYPE aip_connector_host_{name} {kind}\naip_connector_host_{name} {value}\n" for name, kind, value in samples
    )
