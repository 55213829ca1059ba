"""One operating-system process as far as a test needs it: its ports, counted, and the ways in which it can fail there.

Every call of a port is a point. A process that was killed runs nothing any more: each port call ends it at once, so no
cleanup of it reaches the world. A fault is placed at a point by number; ``trace`` names the points that were passed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, TypeVar, cast

import anyio
import msgspec

from adapters.store import JournalStore
from adapters.vault import Vault
from domain.errors import HostError
from domain.events import SequenceTaken, Target
from domain.history import Command, Recorded
from domain.ports import AppendUnknown, NotStored
from domain.provider import Exchange, Failure, Outgoing, StreamEnd, StreamItem
from domain.values import Fence, Private
from tests.world.hermes import LOST, UNREACHED, SimHermes

T = TypeVar("T")
BEGAN = datetime(2026, 11, 30, 12, tzinfo=UTC)
FAULTS = ("kill_before", "kill_after", "lost", "away", "cancel", "pause")


class Died(BaseException):
    """This process does not exist any more."""


class Fault(msgspec.Struct, frozen=True):
    """What goes wrong at the ``at``-th port call. ``seconds`` is the length of a pause."""

    kind: str
    at: int
    seconds: float = 45.0


class Process:
    """The switch of one process and the counter of its port calls."""

    def __init__(self) -> None:
        self.dead = False
        self.trace: list[str] = []
        self.counting = False
        self.fault: Fault | None = None
        self.hit = ""
        self.store_away = False
        self.cancel: Callable[[], None] = lambda: None
        self._scopes: set[anyio.CancelScope] = set()
        self._awake = anyio.Event()
        self._awake.set()

    def kill(self) -> None:
        """End it now: nothing of it runs on, also nothing that is shielded from cancellation."""
        self.dead = True
        for scope in self._scopes:
            scope.cancel()
        self.cancel()

    def freeze(self) -> None:
        """Stop it, as SIGSTOP does, until ``thaw``."""
        if self._awake.is_set():
            self._awake = anyio.Event()

    def thaw(self) -> None:
        """Let it go on."""
        self._awake.set()

    async def call(self, point: str, perform: Callable[[], Awaitable[T]], lost: Callable[[T], T] | None = None) -> T:
        """One call of a port. ``lost`` turns a result into what is seen when the answer is lost."""
        fault = self._count(point)
        await self._pass()
        if fault == "kill_before":
            self.kill()
        self._check()
        if fault == "away" or (self.store_away and point.startswith("store.")):
            away = _away(point)
            if away is not None:
                return cast("T", away)
        if fault == "cancel":
            self.cancel()
        result = await self._perform(perform)
        if fault == "kill_after":
            self.kill()
        self._check()
        if fault == "pause" and self.fault is not None:
            self.freeze()
            await self._within(lambda: anyio.sleep(self.fault.seconds if self.fault else 0))
            self.thaw()
        await self._pass()
        return lost(result) if fault == "lost" and lost is not None else result

    def _count(self, point: str) -> str:
        self._check()
        if not self.counting:
            return ""
        self.trace.append(point)
        if self.fault is None or self.fault.at != len(self.trace):
            return ""
        self.hit = point
        return self.fault.kind

    async def _perform(self, perform: Callable[[], Awaitable[T]]) -> T:
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                return await perform()
            finally:
                self._scopes.discard(scope)
        raise Died

    async def _within(self, perform: Callable[[], Awaitable[None]]) -> None:
        with anyio.CancelScope(shield=True):
            await self._perform(perform)

    async def _pass(self) -> None:
        while not self._awake.is_set():
            await self._within(self._awake.wait)

    def _check(self) -> None:
        if self.dead:
            raise Died


def _away(point: str) -> Any:
    """What a port gives, or raises, while the other side cannot be reached at all; None where that cannot be."""
    if point in ("store.append", "store.confirm", "lease.take"):
        raise NotStored("the store is away") if point != "store.confirm" else AppendUnknown("the store is away")
    if point in ("store.load", "store.load_many", "vault.open", "finder", "store.read_log"):
        raise HostError("storage.unavailable")
    if point in ("provider.send", "provider.read"):
        return UNREACHED
    return StreamEnd(reason="not_connected") if point == "provider.stream" else None


class SimClock:
    """``domain.ports.Clock`` on virtual time. All processes of a world share ``ids``."""

    def __init__(self, process: Process, ids: count[int]) -> None:
        self._process, self._ids = process, ids

    def now(self) -> datetime:
        """The wall clock."""
        return BEGAN + timedelta(seconds=round(anyio.current_time(), 6))

    def monotonic(self) -> float:
        """Virtual seconds."""
        return anyio.current_time()

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        await self._process.call("clock.sleep", lambda: anyio.sleep(seconds))

    def new_id(self, prefix: str) -> str:
        """Ids in order."""
        return f"{prefix}{next(self._ids):032x}"

    def jitter(self) -> float:
        """No chance here."""
        return 0.5


def _unsure(_: Any) -> Any:
    raise AppendUnknown("the answer was lost")


def _unreadable(_: Any) -> Any:
    raise HostError("storage.unavailable")


class SimStore:
    """The real store of a process, behind its switch."""

    def __init__(self, process: Process, store: JournalStore) -> None:
        self._process, self._store = process, store

    async def load(self, history: str) -> tuple[Recorded, ...]:
        """As `JournalStore.load`."""
        return await self._process.call("store.load", lambda: self._store.load(history), _unreadable)

    async def load_many(self, histories: Sequence[str]) -> Mapping[str, tuple[Recorded, ...]]:
        """As `JournalStore.load_many`."""
        return await self._process.call("store.load_many", lambda: self._store.load_many(histories), _unreadable)

    async def append(self, command: Command) -> tuple[Recorded, ...]:
        """As `JournalStore.append`."""
        return await self._process.call("store.append", lambda: self._store.append(command), _unsure)

    async def confirm(self) -> None:
        """As `JournalStore.confirm`."""
        await self._process.call("store.confirm", self._store.confirm, _unsure)

    async def read_log(self, after: int, limit: int) -> Any:
        """As `JournalStore.read_log`."""
        return await self._process.call("store.read_log", lambda: self._store.read_log(after, limit), _unreadable)

    async def take_sequence(self, replica: str, event: SequenceTaken, sequence: int | None = None) -> Fence:
        """As `JournalStore.take_sequence`."""
        return await self._process.call("lease.take", lambda: self._store.take_sequence(replica, event, sequence))


class SimVault:
    """The real vault of a process, behind its switch."""

    def __init__(self, process: Process, vault: Vault) -> None:
        self._process, self._vault = process, vault

    async def open(self, private: Private) -> bytes:
        """As `Vault.open`."""
        return await self._process.call("vault.open", lambda: self._vault.open(private), _unreadable)

    def digest(self, content: bytes) -> str:
        """As `Vault.digest`."""
        return self._vault.digest(content)


class SimLink:
    """``domain.ports.Provider``: the way from one process to the provider."""

    def __init__(self, process: Process, hermes: SimHermes, target: Target) -> None:
        self._process, self._hermes, self.target = process, hermes, target

    async def send(self, out: Outgoing) -> Exchange:
        """One mutation."""
        return await self._exchange("provider.send", out)

    async def read(self, out: Outgoing) -> Exchange:
        """One read."""
        return await self._exchange("provider.read", out)

    async def _exchange(self, point: str, out: Outgoing) -> Exchange:
        return await self._process.call(point, lambda: self._hermes.exchange(out), lambda _: LOST)

    async def stream(self, out: Outgoing, idle_s: float = 75) -> AsyncIterator[StreamItem]:
        """One event stream."""
        items = cast("AsyncGenerator[StreamItem, None]", self._hermes.stream(out, idle_s))
        try:
            while True:
                item = await self._process.call("provider.stream", lambda: anext(items), lambda _: CUT)
                yield item
                if isinstance(item, StreamEnd):
                    return
        finally:
            await items.aclose()


CUT = StreamEnd(reason="cut", exchange=Exchange(sent=True, failure=Failure.READ_ERROR))
