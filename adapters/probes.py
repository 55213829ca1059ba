"""Live probes of storage and of every endpoint, and the flags that they leave for admission and metrics.

One probe runs at a time and is shared by all who ask meanwhile. The time-out covers the whole loop over the endpoints,
in normalised id order; basic health proves neither token nor model nor tools (runbook, Interpret host readiness).
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import msgspec

from adapters.intake import Gates
from adapters.journal import Journal, NotConfirmed
from domain.events import RecoverySummed
from domain.ports import Clock, Provider
from domain.provider import Exchange, Features, read_features
from domain.requests import capabilities_request, health_request, models_request
from projections import readiness


class Counters:
    """Counts of this process since it started."""

    def __init__(self) -> None:
        self.requests_total = 0
        self.rejected_total = 0


class Probes:
    """Storage and connector probes of one host."""

    def __init__(
        self,
        journal: Journal,
        endpoints: Mapping[str, Provider],
        gates: Gates,
        clock: Clock,
        *,
        health_timeout_ms: int,
    ) -> None:
        self._journal, self._endpoints, self._gates, self._clock = journal, endpoints, gates, clock
        self._timeout_s = health_timeout_ms / 1000
        self._lock = anyio.Lock()
        self._finished = 0
        self.storage_detail = "not probed yet"
        self.connector_detail = "not probed yet"
        self.health: dict[str, Exchange] = {}

    async def probe(self) -> None:
        """Probe storage, then the endpoints. Whoever asks while a probe runs has that probe's answer."""
        seen = self._finished
        async with self._lock:
            if self._finished != seen:
                return
            await self._probe_storage()
            await self._probe_connector()
            self._finished += 1

    async def _probe_storage(self) -> None:
        try:
            with anyio.fail_after(self._timeout_s):
                await self._journal.confirm(self._timeout_s)
            self._gates.storage_ready, self.storage_detail = True, "ok"
        except NotConfirmed:
            self._gates.storage_ready, self.storage_detail = False, "check failed"
        except TimeoutError:
            self._gates.storage_ready, self.storage_detail = False, "timed out"

    async def _probe_connector(self) -> None:
        failing = ""
        try:
            with anyio.fail_after(self._timeout_s):
                for endpoint_id in sorted(self._endpoints):
                    failing = endpoint_id
                    problem = await self._check(endpoint_id)
                    if problem:
                        break
                else:
                    self._gates.connector_ready, self.connector_detail = True, "ok"
                    return
        except TimeoutError:
            problem = "timed out; a first run after the provider's start blocks its health route for some seconds"
        self._gates.connector_ready = False
        self.connector_detail = f"endpoint {failing}: {problem}"[: readiness.DETAIL_LIMIT]

    async def _check(self, endpoint_id: str) -> str:
        exchange = await self._endpoints[endpoint_id].read(health_request())
        self.health[endpoint_id] = exchange
        if not exchange.complete:
            return exchange.failure.value or "no answer"
        if not 200 <= (exchange.status or 0) < 300:
            return f"HTTP {exchange.status}"
        try:
            msgspec.json.decode(exchange.body)
        except msgspec.DecodeError:
            return "the answer is not JSON"
        return ""

    def gates(self, summary: RecoverySummed | None, *, lease_valid: bool) -> readiness.Gates:
        """The four gates as the last probe left them."""
        recovery = readiness.RecoverySummary(
            recovered_at=summary.began_at if summary else self._clock.now(),
            pending_approvals=summary.pending_approvals if summary else 0,
            recoverable_transactions=summary.recoverable_transactions if summary else 0,
            queued_results=summary.queued_results if summary else 0,
            delegation_results=summary.delegation_results if summary else 0,
            callback_deliveries=summary.callback_deliveries if summary else 0,
        )
        return readiness.Gates(
            lease_valid=lease_valid,
            draining=self._gates.draining,
            storage_ready=self._gates.storage_ready,
            connector_ready=self._gates.connector_ready,
            durability="durable_shared",
            recovery=recovery,
            storage_detail=self.storage_detail,
            connector_detail=self.connector_detail,
        )


async def read_endpoint(provider: Provider) -> tuple[Features, Exchange]:
    """What an endpoint advertises, and its answer to one protected read (models)."""
    health = await provider.read(health_request())
    capabilities = await provider.read(capabilities_request())
    models = await provider.read(models_request())
    return read_features(capabilities, health), models
