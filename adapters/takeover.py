"""Going on with unfinished work: our own after a restart, and that of hosts that are gone.

Views say where to look; each Action and run is then adopted by an event in its own history, under our fence. A living
host's work is left alone: its owner is expired only after a full lease time of silence on our own clock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from adapters.driver import Driver
from adapters.lease import HostLease, Watch
from adapters.observer import Observer
from domain.errors import IntegrityFault
from domain.events import RecoverySummed, SequenceExpired, SequenceTaken
from domain.history import Change, Command, fence_history, host_history
from domain.ports import Clock, Conflict, Finder, Store, Unfinished
from domain.values import Fence

log = logging.getLogger(__name__)


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """What one round found: how many pieces of work are ours now, of which kind, and how many could not be read."""

    actions: int = 0
    runs: int = 0
    elsewhere: int = 0
    failed: int = 0


class Takeover:
    """Adopts unfinished work whose owner cannot decide any more."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        lease: HostLease,
        finder: Finder,
        driver: Driver,
        observer: Observer,
        watch: Watch,
        replica: str,
    ) -> None:
        self._store, self._clock, self._lease, self._finder = store, clock, lease, finder
        self._driver, self._observer, self._watch, self._replica = driver, observer, watch, replica

    async def recover(self) -> RecoverySummed:
        """Start-up recovery: adopt what is ours, then store the summary of it (runbook, host readiness)."""
        began = self._clock.now()
        work = await self._finder.unfinished()
        waiting = sum(1 for item in work if item.kind == "approval")
        recovered = await self.adopt(work)
        if recovered.failed:
            log.error("recovery.unreadable", extra={"count": recovered.failed})
        summary = RecoverySummed(
            at=self._clock.now(),
            sequence=self._lease.fence.sequence,
            began_at=began,
            pending_approvals=waiting,
            recoverable_transactions=0,
            queued_results=0,
            delegation_results=0,
            callback_deliveries=0,
            resumed=recovered.actions + recovered.runs,
            unknown=recovered.failed,
        )
        await self._store_summary(summary)
        return summary

    async def _store_summary(self, summary: RecoverySummed) -> None:
        history = host_history(self._replica)
        while True:
            events = await self._store.load(history)
            change = Change(history=history, expected=events[-1].version if events else 0, events=(summary,))
            try:
                await self._store.append(Command(changes=(change,), fence=self._lease.fence, cause="recovery"))
            except Conflict:
                continue
            return

    async def adopt(self, work: Sequence[Unfinished]) -> Recovered:
        """Adopt and go on with each piece whose owner is us, an older process of us, or a host that is gone."""
        gone: dict[Fence, bool] = {}
        counts = {"action": 0, "run": 0, "approval": 0, "elsewhere": 0, "failed": 0}
        for item in work:
            if item.owner not in gone:
                gone[item.owner] = await self._is_gone(item.owner)
            try:
                ours = item.owner == self._lease.fence or (gone[item.owner] and await self._take(item))
            except IntegrityFault as fault:
                log.error("recovery.history_stopped", extra={"code": fault.code, "kind": item.kind})
                counts["failed"] += 1
                continue
            counts[item.kind if ours else "elsewhere"] += 1
            if ours:
                self._go_on(item)
        return Recovered(
            actions=counts["action"] + counts["approval"],
            runs=counts["run"],
            elsewhere=counts["elsewhere"],
            failed=counts["failed"],
        )

    async def _take(self, item: Unfinished) -> bool:
        if item.kind == "run":
            return await self._observer.adopt(item.tenant, item.endpoint_id, item.id)
        return await self._driver.adopt(item.tenant, item.id)

    def _go_on(self, item: Unfinished) -> None:
        if item.kind == "run":
            self._observer.observe(item.tenant, item.endpoint_id, item.id)
        else:
            self._driver.take(item.tenant, item.id)

    async def _is_gone(self, owner: Fence) -> bool:
        """True if this sequence cannot decide any more; a silent host is expired first, by an event."""
        if owner == self._lease.fence:
            return False
        events = await self._store.load(fence_history(owner.replica))
        if events and events[-1].version > owner.sequence:
            if owner.replica == self._replica or not isinstance(events[-1].event, SequenceTaken):
                return True
            owner = Fence(owner.replica, events[-1].version)  # its newer process goes on with the work, if it lives
        if not self._watch.silent(owner):
            return False
        expired = SequenceExpired(at=self._clock.now(), by=self._lease.fence, watched_ms=self._watch.ttl_ms)
        change = Change(history=fence_history(owner.replica), expected=owner.sequence, events=(expired,))
        try:
            await self._store.append(Command(changes=(change,), fence=self._lease.fence, cause="owner_expired"))
        except Conflict:
            return False
        log.warning("host.expired", extra={"replica": owner.replica, "sequence": owner.sequence})
        return True

    async def keep(self) -> None:
        """Look for abandoned and for forgotten work for ever."""
        while True:
            await self._clock.sleep(self._watch.look_again_s)
            await self.round()

    async def round(self) -> None:
        """Look once. What fails now is found again in the next round."""
        try:
            if self._lease.valid():
                await self.adopt(await self._finder.unfinished())
        except Exception as error:  # noqa: BLE001  whatever one round meets, the next one comes
            log.warning("takeover.round_failed", extra={"fault": type(error).__name__})
