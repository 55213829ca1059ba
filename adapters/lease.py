"""This process's right to decide: a sequence of its replica in the journal, renewed in time.

A deciding append passes only while the sequence is the newest of its replica; the journal checks that. Here the process
keeps to its own monotonic clock besides: once the lease may have run out it decides nothing, whatever any answer says.
A process whose sequence was taken by another process of the same replica stops for good; one that was merely expired
by another host takes a new sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import anyio
import msgspec

from domain.errors import HostError
from domain.events import LeaseRenewed, SequenceExpired, SequenceTaken
from domain.history import Change, Command, Recorded, fence_history, host_history
from domain.ports import AppendUnknown, Clock, Conflict, Fenced, NotStored, Store
from domain.values import Fence

log = logging.getLogger(__name__)


class SequenceStore(Store, Protocol):
    """A store that can also make a new sequence of a replica the current one."""

    async def take_sequence(self, replica: str, event: SequenceTaken, sequence: int | None = None) -> Fence:
        """Take the next sequence."""


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds: how long a renewal holds, how often it is renewed, and the margin for local delays."""

    ttl_ms: int = 30_000
    heartbeat_ms: int = 10_000
    margin_ms: int = 1_000


class LeaseCounts:
    """Counters of this process since it started."""

    def __init__(self) -> None:
        self.heartbeat_failures = 0
        self.recovery_attempts = 0
        self.recoveries = 0


class HostLease:
    """Implements ``domain.ports.Lease`` on the journal."""

    def __init__(
        self, store: SequenceStore, clock: Clock, replica: str, instance: str, release: str, times: LeaseTimes
    ) -> None:
        self._store, self._clock, self._times = store, clock, times
        self._replica, self._instance, self._release = replica, instance, release
        self._fence: Fence | None = None
        self._valid_until = float("-inf")
        self._lost = False
        self._version = 0
        self.counts = LeaseCounts()

    @property
    def fence(self) -> Fence:
        """Replica and sequence of this process."""
        if self._fence is None:
            raise HostError("connector_host.not_ready", "No sequence is taken yet.")
        return self._fence

    @property
    def superseded(self) -> bool:
        """True once another process of this replica has taken over: this one never decides again."""
        return self._lost

    def valid(self) -> bool:
        """True while the last renewal holds by the local monotonic clock, margin included."""
        return not self._lost and self._clock.monotonic() < self._valid_until

    def seconds_left(self) -> float:
        """How long the lease still holds."""
        return max(0.0, self._valid_until - self._clock.monotonic()) if not self._lost else 0.0

    async def take(self) -> Fence:
        """Take the next sequence of the replica. From here on every older process of it is fenced."""
        began = self._clock.monotonic()
        event = SequenceTaken(at=self._clock.now(), instance=self._instance, release=self._release)
        self._fence = await self._store.take_sequence(self._replica, event)
        self._hold(began)
        return self._fence

    def _hold(self, began: float) -> None:
        self._valid_until = began + (self._times.ttl_ms - self._times.margin_ms) / 1000

    async def keep(self, regained: Callable[[], None]) -> None:
        """Renew for ever. One failed or hung cycle never ends the loop; ``regained`` is told of a new sequence."""
        while not self._lost:
            await self._clock.sleep(self._times.heartbeat_ms / 1000)
            try:
                with anyio.fail_after(self._times.heartbeat_ms / 1000):
                    if await self._renewed():
                        continue
                self.counts.heartbeat_failures += 1
                with anyio.fail_after(self._times.heartbeat_ms / 1000):
                    await self._regain(regained)
            except Exception as error:  # noqa: BLE001  whatever one cycle meets, the loop goes on
                self.counts.heartbeat_failures += 1
                log.warning("lease.renewal_failed", extra={"fault": type(error).__name__})

    async def _renewed(self) -> bool:
        """Renew once; False if this sequence is not the newest of its replica any more."""
        began, history = self._clock.monotonic(), host_history(self._replica)
        while True:
            event = LeaseRenewed(at=self._clock.now(), sequence=self.fence.sequence)
            change = Change(history=history, expected=self._version, events=(event,))
            try:
                await self._store.append(Command(changes=(change,), fence=self.fence, cause="renewal"))
            except Fenced:
                return False
            except Conflict:  # the recovery summary, an earlier process, or our own append whose answer was lost
                events = await self._store.load(history)
                self._version = events[-1].version if events else 0
                continue
            self._version += 1
            self._hold(began)
            return True

    async def _regain(self, regained: Callable[[], None]) -> None:
        """Our sequence is not the newest: stop for good if our own replica took it, else take a new one."""
        newest = (await self._store.load(fence_history(self._replica)))[-1]
        if isinstance(newest.event, SequenceTaken) and newest.event.instance != self._instance:
            self._lost = True
            log.error("lease.superseded", extra={"sequence": newest.version})
            return
        self.counts.recovery_attempts += 1
        await self.take()
        self.counts.recoveries += 1
        regained()

    async def release(self) -> None:
        """Close our own sequence after a clean stop, so that others may go on at once."""
        if self._fence is None or self._lost:
            return
        event = SequenceExpired(at=self._clock.now(), by=self._fence, watched_ms=0)
        change = Change(history=fence_history(self._replica), expected=self._fence.sequence, events=(event,))
        self._valid_until = float("-inf")
        try:
            await self._store.append(Command(changes=(change,), fence=self._fence, cause="offline"))
        except (Conflict, Fenced, NotStored, AppendUnknown) as error:
            log.warning("lease.release_failed", extra={"fault": type(error).__name__})


class Watch:
    """Times the silence of other hosts on the local monotonic clock, by what the follower notices of them."""

    def __init__(self, clock: Clock, ttl_ms: int) -> None:
        self._clock, self._ttl_s = clock, ttl_ms / 1000
        self._heard: dict[Fence, float] = {}

    def notice(self, recorded: Recorded) -> None:
        """An event decided under a fence proves that its host lived a moment ago."""
        if recorded.fence is not None:
            self._heard[recorded.fence] = self._clock.monotonic()

    def silent(self, owner: Fence) -> bool:
        """True once a full lease time has passed without a sign; the first question starts the time."""
        heard = self._heard.setdefault(owner, self._clock.monotonic())
        return self._clock.monotonic() - heard > self._ttl_s

    @property
    def ttl_ms(self) -> int:
        """The lease time that a host may be silent."""
        return int(self._ttl_s * 1000)

    @property
    def look_again_s(self) -> float:
        """How often to ask."""
        return self._ttl_s / 4
