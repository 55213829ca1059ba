"""Every port call of a start is a point of failure also on the real journal: PostgreSQL, its threads, and real time.

Each process has a journal, keys and views of its own on one database, as hosts have. Points are named by what is called
and how often it was called before, as real time interleaves tasks differently from pass to pass; those that every
undisturbed pass has are tried. After the fault a new process of the replica goes on, and every promise is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TypeVar

import anyio
import anyio.to_thread
import pytest
from anyio.abc import TaskGroup

from adapters.clock import SystemClock
from adapters.driver import Driver, DriverLimits
from adapters.echo import Echo
from adapters.host import ViewFinder
from adapters.intake import EndpointPolicy, Gates, Intake
from adapters.journal import Journal
from adapters.lease import HostLease, LeaseTimes, Watch
from adapters.notices import Notices
from adapters.observer import Observer
from adapters.sender import Sender
from adapters.store import JournalStore
from adapters.takeover import Takeover
from adapters.vault import PostgresKeys, Vault
from adapters.view_postgres import PostgresTables
from adapters.views import Views
from domain.action import State
from domain.errors import HostError
from domain.history import Command, Recorded
from domain.ports import AppendUnknown
from domain.values import Effect
from projections import Projection, folded
from projections.actions import ACTIONS
from projections.runs import RUNS
from tests.crash.conftest import Databases
from tests.world.host import ENDPOINT, MASTER, Gone, Host, World
from tests.world.laws import check
from tests.world.process import BEGAN, Fault, Process, SimClock, SimLink, SimStore, SimVault

pytestmark = [pytest.mark.anyio, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(300)]

T = TypeVar("T")
SYSTEM = SystemClock()
KINDS = ("kill_before", "kill_after", "lost", "cancel")
WITHOUT_ANSWER = "clock.sleep"
BACKGROUND = "store.read_log"
TIMES = LeaseTimes(ttl_ms=4_000, heartbeat_ms=1_000, margin_ms=200)
AT_ONCE = 6
UNDISTURBED = 3
TRIES = 5
STORY_S = 60.0
STORY = (("wait", 0.3), ("delta", "hello "), ("delta", "world"), ("complete", "hello world"))


class NamedFault(Fault, frozen=True):
    """What goes wrong at the ``at``-th call of one name."""

    point: str = ""


class NamedProcess(Process):
    """A process whose points are counted by name. Following the log in the background is no point of a start."""

    async def call(self, point: str, perform: Callable[[], Awaitable[T]], lost: Callable[[T], T] | None = None) -> T:
        """As `Process.call`; who is killed after a call is killed after a refused one too."""
        try:
            return await super().call(point, perform, lost)
        except Exception:
            if self.hit == point and self.fault and self.fault.kind == "kill_after":
                self.kill()
                self._check()
            raise

    def _count(self, point: str) -> str:
        self._check()
        if not self.counting or point == BACKGROUND:
            return ""
        self.trace.append(point)
        fault = self.fault
        if not isinstance(fault, NamedFault) or (fault.point, fault.at) != (point, self.trace.count(point)):
            return ""
        self.hit = point
        return fault.kind


class RealClock(SimClock):
    """Real time on the world's calendar, also for threads. The event loop's time is the same."""

    def now(self) -> datetime:
        """The wall clock."""
        return BEGAN + timedelta(seconds=round(self.monotonic(), 6))

    def monotonic(self) -> float:
        """Real seconds."""
        return SYSTEM.monotonic()


class NamedStore(SimStore):
    """A store whose points say what is read and what is stored."""

    async def load(self, history: str) -> tuple[Recorded, ...]:
        """As `JournalStore.load`."""
        kind = history.split("/")[1]
        return await self._process.call(f"store.load {kind}", lambda: self._store.load(history), _unreadable)

    async def append(self, command: Command) -> tuple[Recorded, ...]:
        """As `JournalStore.append`."""
        events = "+".join(type(event).__name__ for change in command.changes for event in change.events)
        return await self._process.call(f"store.append {events}", lambda: self._store.append(command), _unsure)


def _unreadable(_: object) -> tuple[Recorded, ...]:
    raise HostError("storage.unavailable")


def _unsure(_: object) -> tuple[Recorded, ...]:
    raise AppendUnknown("the answer was lost")


class PostgresHost(Host):
    """One process of one replica, with everything of its own that a process has of a database."""

    def __init__(self, world: PostgresWorld, replica: str, fault: Fault | None) -> None:
        self.world, self.replica = world, replica
        self.process = process = NamedProcess()
        process.fault = fault
        self.clock = clock = RealClock(process, world.ids)
        self.journal = Journal(world.dsn, clock=clock, reading_connections=2)
        self.keys, self.tables = PostgresKeys(world.dsn), PostgresTables(world.dsn, connections=1)
        vault = Vault(MASTER, self.keys, world.entropy)
        self.store = store = NamedStore(process, JournalStore(self.journal, vault, clock.new_id))
        self.vault = SimVault(process, vault)
        self.views = Views(self.tables, store, clock, wait_beyond=self.journal.wait_beyond)
        self.lease = HostLease(store, clock, replica, clock.new_id("proc_"), "test", TIMES)
        self.notices, self.gates, self.watch = Notices(), Gates(), Watch(clock, TIMES.ttl_ms)
        links = {ENDPOINT: SimLink(process, world.hermes, world.target)}
        self.observer = Observer(store, self.vault, clock, self.lease, links, self.notices)
        sender = Sender(
            store, self.vault, clock, self.lease, links, self.notices, self.observer.observe, lambda _: world.policy
        )
        self.driver = Driver(
            store, clock, self.lease, links, self.notices, self.observer, sender, DriverLimits(max_in_flight=4)
        )
        endpoint = EndpointPolicy(run_deadline_ms=world.run_deadline_ms, approvals_manual=True)
        self.intake = Intake(
            store,
            self.vault,
            clock,
            self.lease,
            links,
            {ENDPOINT: endpoint},
            lambda _: world.policy,
            self.driver,
            self.notices,
            self.gates,
        )
        finder = ViewFinder(self.views)
        self.takeover = Takeover(store, clock, self.lease, finder, self.driver, self.observer, self.watch, replica)
        self.ready, self.over, self.closed = anyio.Event(), anyio.Event(), anyio.Event()
        self.tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Its whole life; what is on the way to the database when it ends may still arrive."""
        try:
            await super().run()
        finally:
            with anyio.CancelScope(shield=True):
                await self.journal.stop(0)
                await self.tables.close()
                await self.keys.close()
                self.closed.set()

    async def _begin(self, tasks: TaskGroup) -> None:
        await self.journal.start()
        await self.lease.take()
        self.recovery = await self.takeover.recover()
        position = await self.journal.last_position()
        self.echo = Echo(self.store, self.clock, self.notices, self.watch, self.journal.wait_beyond, position)
        self.process.counting = True
        for keep in (self.views.run, self.echo.keep, self.takeover.keep):
            tasks.start_soon(keep)
        tasks.start_soon(self.lease.keep, self._regained)
        self.ready.set()


class PostgresWorld(World):
    """Everything outside the hosts, on one database and in real time."""

    def __init__(self, tasks: TaskGroup, dsn: str) -> None:
        super().__init__(tasks)
        self.dsn = dsn
        self.processes: list[PostgresHost] = []
        self.supervised = True
        self.hermes.scripts["plain"] = STORY
        clock = RealClock(Process(), self.ids)
        self.outside = Journal(dsn, clock=clock, reading_connections=1)
        self.log = JournalStore(self.outside, self.vault, clock.new_id)
        self.tables = PostgresTables(dsn, connections=1)
        self.views = Views(self.tables, self.log, clock)

    def start(self, replica: str = "a", fault: Fault | None = None) -> Host:
        """A new process."""
        host = PostgresHost(self, replica, fault)
        self.hosts.append(host)
        self.processes.append(host)
        self._tasks.start_soon(host.run)
        self._tasks.start_soon(self._supervise, host)
        return host

    async def _supervise(self, host: Host) -> None:
        """A process that ended is followed by a new one of its replica."""
        await host.over.wait()
        if self.supervised:
            self.current(host.replica)

    async def ask(self, call: Callable[[Intake], Awaitable[T]], replica: str = "a", *, tries: int = 60) -> T:
        """A caller that repeats at once after a lost answer, and as soon as something is stored after *not now*."""
        for _ in range(tries):
            position = await self.outside.last_position()
            try:
                return await self.current(replica).ask(call)
            except Gone:
                continue
            except HostError as error:
                if not error.retryable:
                    raise
                await self.outside.wait_beyond(position, 0.2)
        raise AssertionError("no answer")

    async def end(self) -> None:
        """Every process is gone, and what it had sent to the database has arrived or never will."""
        self.supervised = False
        for process in self.processes:
            process.process.kill()
            await process.closed.wait()

    async def until(self, met: Callable[[], Awaitable[bool]], seconds: float = STORY_S, step: float = 1.0) -> None:
        """Wait until a condition on what is stored is met; asked after each news, and each ``step`` seconds."""
        with anyio.fail_after(min(seconds, STORY_S)):
            while True:
                position = await self.outside.last_position()
                if await met():
                    return
                await self.outside.wait_beyond(position, min(step, 1.0))


@asynccontextmanager
async def postgres_world(databases: Databases) -> AsyncIterator[PostgresWorld]:
    """A world on a fresh database; its hosts end with the block."""
    database = databases()
    dsn = await anyio.to_thread.run_sync(database.__enter__)
    try:
        async with anyio.create_task_group() as tasks:
            made = PostgresWorld(tasks, dsn)
            await made.outside.start()
            try:
                yield made
            finally:
                made.supervised = False
                for host in made.hosts:
                    host.process.kill()
                with anyio.CancelScope(shield=True):
                    await made.outside.stop(0)
                    await made.tables.close()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(database.__exit__, None, None, None)


async def story(w: PostgresWorld, fault: Fault | None) -> Host:
    """A start, the end of its run and the same request again; then a new process, asked for the same once more."""
    first = w.start(fault=fault)
    action = await w.begin()
    found = await w.answered(action)
    if found.state is State.SETTLED:
        await w.settle()
    assert (await w.begin()).request.action_id == action.request.action_id
    if fault is None or fault.kind == "lost":
        first.process.counting = False
        await first.kill()
    elif first.process.hit:
        await first.over.wait()
    await w.current().ready.wait()
    assert len(w.hosts) > 1 or not first.process.hit, "a new process goes on"
    again = await w.begin()
    assert again.request.action_id == action.request.action_id
    if (await w.answered(again)).effect is Effect.CONFIRMED:
        await w.ended(w.hermes.created[0])
    await w.settle()
    return first


async def perform(databases: Databases, fault: NamedFault | None) -> Host:
    """One pass with all promises checked; the first process."""
    async with postgres_world(databases) as w:
        with anyio.fail_after(STORY_S):
            first = await story(w, fault)
            await w.end()
            await check(w)
            await _the_action_is_whole(w, fault)
            await _views_equal_the_log(w)
        return first


async def _the_action_is_whole(w: PostgresWorld, fault: NamedFault | None) -> None:
    """The acknowledged Action stands: started once and known to be, unknown with its reason, or proven unsent."""
    action = await w.action(w.told[0][1])
    started = w.hermes.sent("start")
    assert len(started) == len(w.hermes.created) <= 1
    assert {told.request.action_id for _, told in w.told} == {action.request.action_id}
    if action.state is State.UNKNOWN:
        assert fault is not None, "without a fault nothing is unknown"
        assert action.attempt is not None
        assert action.attempt.unknown is not None
        assert action.attempt.unknown.cause
        return
    assert action.settled is not None
    if action.effect is Effect.NONE:
        assert fault is not None, "without a fault it is started"
        assert action.settled.status == "failed"
        assert action.settled.code
        assert not started
        return
    assert (action.settled.status, action.effect) == ("completed", Effect.CONFIRMED)
    assert len(started) == 1
    assert (await w.run(w.hermes.created[0])).ended is not None


async def _views_equal_the_log(w: PostgresWorld) -> None:
    """What PostgreSQL has of the views is what the log folds to, row by row and as counted."""
    await w.views.catch_up()
    log = await w.events()
    for view in (ACTIONS, RUNS):
        assert await w.views.compare(view.name) == []
        for key, row in _rows(view, log).items():
            assert await w.views.get(view, key) == row, key


def _rows(view: Projection[object], log: Sequence[Recorded]) -> Mapping[str, object]:
    found: dict[str, list[Recorded]] = {}
    for event in log:
        if event.event.topic in view.topics:
            found.setdefault(view.key(event), []).append(event)
    return {key: folded(view, events) for key, events in found.items()}


async def strike(databases: Databases, fault: NamedFault) -> int:
    """Passes until the fault struck; how many."""
    for tried in range(1, TRIES + 1):
        try:
            first = await perform(databases, fault)
        except BaseException as error:
            error.add_note(f"{fault.kind} at {fault.point}, call {fault.at} of it")
            raise
        if first.process.hit:
            return tried
    raise AssertionError(f"{fault.point}, call {fault.at} of it, was not reached in {TRIES} passes")


async def points(databases: Databases) -> Counter[str]:
    """How often each point is passed in every undisturbed pass."""
    found = [Counter((await perform(databases, None)).process.trace) for _ in range(UNDISTURBED)]
    common = found[0]
    for other in found[1:]:
        common &= other
    return common


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.proves("A002", "A012")
async def test_no_fault_at_any_port_call_of_a_start_breaks_a_promise_on_postgresql(
    kind: str, databases: Databases
) -> None:
    passed = await points(databases)
    faults = [
        NamedFault(kind, at, point=point)
        for point, times in passed.items()
        for at in range(1, times + 1)
        if not (kind == "lost" and point == WITHOUT_ANSWER)
    ]
    places, passes = anyio.CapacityLimiter(AT_ONCE), 0

    async def one(fault: NamedFault) -> None:
        nonlocal passes
        async with places:
            tried = await strike(databases, fault)
            passes += tried

    async with anyio.create_task_group() as tasks:
        for fault in faults:
            tasks.start_soon(one, fault)
    print(f"start on PostgreSQL, {kind}: {passed.total()} points, {len(faults)} faults, {passes} passes")
    for needed in ("provider.send", "provider.stream", "vault.open", "store.confirm", "store.load_many", "clock.sleep"):
        assert passed[needed], needed
    assert passes >= len(faults) > 20
