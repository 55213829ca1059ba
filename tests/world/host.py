"""A world: one journal, one provider, any number of hosts on virtual time, and callers that live through crashes."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, TypeVar, cast

import anyio
import trio
from anyio.abc import TaskGroup
from trio.testing import MockClock

from adapters.driver import Driver, DriverLimits
from adapters.echo import Echo
from adapters.intake import EndpointPolicy, Gates, Intake
from adapters.lease import HostLease, LeaseTimes, Watch
from adapters.memory_journal import MemoryJournal
from adapters.notices import Notices
from adapters.observer import Observer
from adapters.sender import Sender
from adapters.store import JournalStore
from adapters.submission import Submission
from adapters.takeover import Takeover
from adapters.vault import MemoryKeys, Vault
from domain import action as actions
from domain import binding, stream
from domain.action import Action, State
from domain.approval import TenantPolicy
from domain.binding import Run
from domain.contracts import capability_id
from domain.errors import HostError
from domain.events import RecoverySummed, Target
from domain.history import Recorded, action_history, run_history, run_token, stream_history
from domain.ports import Unfinished
from domain.provider import TERMINAL_STATES, Features
from domain.stream import RunStream
from domain.values import Actor, Mode, Operation
from projections import folded
from projections.actions import ACTIONS, ActionRow
from projections.runs import RUNS, RunRow, run_key
from tests.world.hermes import SimHermes
from tests.world.process import BEGAN, Died, Fault, Process, SimClock, SimLink, SimStore, SimVault

T = TypeVar("T")
ENDPOINT = "main"
ADA = Actor(id="user:ada", tenant="acme", scopes=("action:write", "action:read"))
BO = Actor(
    id="user:bo", kind="person", tenant="acme", scopes=("approval:write", "action:write:any"), roles=("approver",)
)
MASTER = bytes(range(32))
TIMES = LeaseTimes(ttl_ms=30_000, heartbeat_ms=10_000, margin_ms=1_000)


class Gone(Exception):
    """The process that was asked ended before it answered."""


class LogFinder:
    """Unfinished work as a fold of the log; the same rule as the views', without tables."""

    def __init__(self, process: Process, store: SimStore) -> None:
        self._process, self._store, self._position = process, store, 0
        self._actions: dict[str, Action] = {}
        self._runs: dict[str, Run] = {}
        self._streams: dict[str, RunStream] = {}

    async def unfinished(self) -> Sequence[Unfinished]:
        """See `Finder`."""
        for event in await self._store.read_log(self._position, 1_000_000):
            self._position = event.position
            kind = event.history.split("/")[1]
            if kind == "act":
                known = self._actions.get(event.history, Action())
                self._actions[event.history] = actions.evolve(known, event.event, event.version)
            elif kind == "run":
                run = self._runs.get(event.history, Run())
                self._runs[event.history] = binding.evolve(run, event.event, event.version)
            elif kind == "str":
                seen = self._streams.get(event.history, RunStream())
                self._streams[event.history] = stream.evolve(seen, event.event, event.version)
        found = []
        for action in self._actions.values():
            if action.state is not State.SETTLED and action.owner is not None:
                word = "approval" if action.state is State.AWAITING else "action"
                request = action.request
                found.append(Unfinished(kind=word, tenant=request.tenant, id=request.action_id, owner=action.owner))
        for name, run in self._runs.items():
            seen = self._streams.get(name.replace("/run/", "/str/"), RunStream())
            if RunRow(run=run, stream=seen).open and run.bound is not None and run.owner is not None:
                tie = run.bound
                found.append(
                    Unfinished(
                        kind="run", tenant=tie.tenant, id=tie.run_id, owner=run.owner, endpoint_id=tie.endpoint_id
                    )
                )
        return found


class Host:
    """One process of one replica."""

    def __init__(self, world: World, replica: str) -> None:
        self.world, self.replica = world, replica
        self.process = process = Process()
        self.clock = clock = SimClock(process, world.ids)
        vault = Vault(MASTER, world.keys, world.entropy)
        self.store = store = world.store_class(process, JournalStore(world.journal, vault, clock.new_id))
        self.vault = SimVault(process, vault)
        self.lease = HostLease(store, clock, replica, clock.new_id("proc_"), "test", TIMES)
        self.notices, self.gates, watch = Notices(), Gates(), Watch(clock, TIMES.ttl_ms)
        links = {ENDPOINT: world.link_class(process, world.hermes, world.target)}
        self.observer = Observer(store, self.vault, clock, self.lease, links, self.notices)
        self.sender = sender = Sender(
            store, self.vault, clock, self.lease, links, self.notices, self.observer.observe, lambda _: world.policy
        )
        limits = DriverLimits(approval_timeout_ms={ENDPOINT: world.approval_timeout_ms})
        self.driver = Driver(store, clock, self.lease, links, self.notices, self.observer, sender, limits)
        self.intake = Intake(
            store,
            self.vault,
            clock,
            self.lease,
            links,
            {ENDPOINT: EndpointPolicy(run_deadline_ms=world.run_deadline_ms, approvals_manual=True)},
            lambda tenant: world.policy,
            self.driver,
            self.notices,
            self.gates,
        )
        finder = LogFinder(process, store)
        self.takeover = Takeover(store, clock, self.lease, finder, self.driver, self.observer, watch, replica)
        position = len(world.journal._log)
        self.echo = Echo(store, clock, self.notices, watch, world.journal.wait_beyond, position)
        self.recovery: RecoverySummed | None = None
        self.ready, self.over = anyio.Event(), anyio.Event()
        self.tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Its whole life."""
        try:
            async with anyio.create_task_group() as tasks:
                self.tasks, self.process.cancel = tasks, tasks.cancel_scope.cancel
                self.driver.attach(tasks)
                self.observer.attach(tasks)
                await self._begin(tasks)
        except* Died:
            pass
        finally:
            self.process.dead = True
            self.ready.set()
            self.over.set()

    async def _begin(self, tasks: TaskGroup) -> None:
        while True:
            try:
                await self.lease.take()
                self.recovery = await self.takeover.recover()
                break
            except Exception as error:  # noqa: BLE001  a start that fails is repeated by whoever supervises the host
                self.world.failed_starts.append(type(error).__name__)
                await anyio.sleep(1)
        tasks.start_soon(self.echo.keep)
        tasks.start_soon(self.takeover.keep)
        tasks.start_soon(self.lease.keep, self._regained)
        self.ready.set()

    def _regained(self) -> None:
        if self.tasks is not None:
            self.tasks.start_soon(self.takeover.round)

    async def ask(self, call: Callable[[Intake], Awaitable[T]]) -> T:
        """Call this process as a client does; `Gone` if it ends without an answer."""
        await self.ready.wait()
        if self.process.dead or self.tasks is None or self.tasks.cancel_scope.cancel_called:
            await self.over.wait()
            raise Gone
        outcome: list[Any] = []
        answered = anyio.Event()

        async def serve() -> None:
            try:
                outcome.append(await call(self.intake))
            except HostError as error:
                outcome.append(error)
            finally:
                answered.set()

        self.tasks.start_soon(serve)
        await answered.wait()
        if not outcome:
            raise Gone
        if isinstance(outcome[0], HostError):
            raise outcome[0]
        return cast("T", outcome[0])

    async def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        await self.over.wait()

    async def stop(self) -> None:
        """A clean end: tasks are cancelled, the sequence is released."""
        if self.tasks is not None:
            self.tasks.cancel_scope.cancel()
        await self.over.wait()
        self.process.dead = False
        await self.lease.release()
        self.process.dead = True


class World:
    """Everything outside the hosts."""

    def __init__(self, tasks: TaskGroup, *, replay: bool = False, policy: TenantPolicy | None = None) -> None:
        self._tasks = tasks
        self.ids, self._drawn = count(1), count()
        self.keys = MemoryKeys()
        clock = SimClock(Process(), self.ids)
        self.journal = MemoryJournal(clock=clock, now=clock.now)
        self.log = JournalStore(self.journal, Vault(MASTER, self.keys, self.entropy), clock.new_id)
        self.vault = Vault(MASTER, self.keys, self.entropy)
        self.hermes = SimHermes(tasks, replay=replay)
        features = (
            Features(version="0.22.0", replay=True, durable_keys=True, request_ids=True) if replay else Features()
        )
        self.target = Target(endpoint_id=ENDPOINT, origin="http://hermes.test", features=features)
        self.policy = policy or TenantPolicy(id="acme", direct=("run_approval", "run_stop"))
        self.approval_timeout_ms = 60_000
        self.run_deadline_ms = 900_000
        self.supervised = False
        self.store_class, self.link_class = SimStore, SimLink
        self.failed_starts: list[str] = []
        self.hosts: list[Host] = []
        self.told: list[tuple[str, Action]] = []

    def entropy(self, size: int) -> bytes:
        """Bytes that differ from call to call and are the same in each run."""
        return hashlib.shake_128(b"%d" % next(self._drawn)).digest(size)

    def start(self, replica: str = "a", fault: Fault | None = None) -> Host:
        """A new process."""
        host = Host(self, replica)
        host.process.fault = fault
        self.hosts.append(host)
        self._tasks.start_soon(host.run)
        self._tasks.start_soon(self._supervise, host)
        return host

    async def _supervise(self, host: Host) -> None:
        """What systemd does: a process that ended is followed by a new one of its replica."""
        await host.over.wait()
        await anyio.sleep(0.5)
        if self.supervised:
            self.current(host.replica)

    async def ask(self, call: Callable[[Intake], Awaitable[T]], replica: str = "a", *, tries: int = 60) -> T:
        """A patient caller: repeats while the answer is lost or says *not now*, at whichever process runs then."""
        for _ in range(tries):
            host = self.current(replica)
            try:
                return await host.ask(call)
            except (Gone, HostError) as error:
                if isinstance(error, HostError) and not error.retryable:
                    raise
                await anyio.sleep(1)
        raise AssertionError("no answer")

    def current(self, replica: str = "a") -> Host:
        """The living process of a replica; a dead one is followed by a new one."""
        last = next((host for host in reversed(self.hosts) if host.replica == replica), None)
        return self.start(replica) if last is None or last.process.dead else last

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def begin(self, key: str = "k1", prompt: str = "plain", *, replica: str = "a", **more: Any) -> Action:
        """Start a run; the Action as it was admitted."""
        return await self.submit(Operation.RUN_START, {"input": prompt}, key=key, replica=replica, **more)

    async def submit(
        self,
        operation: Operation,
        given: dict[str, Any],
        *,
        key: str | None = None,
        replica: str = "a",
        mode: Mode = Mode.SYNC,
        actor: Actor = ADA,
        **more: Any,
    ) -> Action:
        """Submit and remember what was told."""
        submission = Submission(
            capability_id=capability_id(ENDPOINT, operation), input=given, mode=mode, idempotency_key=key, **more
        )
        admitted = await self.ask(lambda intake: intake.submit(actor, submission), replica)
        self.told.append((key or "", admitted.action))
        return admitted.action

    async def answered(self, action: Action, seconds: float = 90, replica: str = "a") -> Action:
        """Wait as a synchronous caller does."""
        request = action.request
        found = await self.ask(lambda intake: intake.settled(request.tenant, request.action_id, seconds), replica)
        self.told.append((request.key, found))
        return found

    async def bound(self, action: Action) -> str:
        """Wait for a start's handle."""
        return actions.started_run(await self.answered(action))

    # ---- what is stored ----------------------------------------------------------------------------------------------

    async def events(self) -> list[Recorded]:
        """The whole log."""
        return [event for event in await self.log.read_log(0, 1_000_000) if isinstance(event, Recorded)]

    async def action(self, known: Action | str) -> Action:
        """An Action as stored now."""
        name = known if isinstance(known, str) else known.request.action_id
        return actions.replay(await self.log.load(action_history(ADA.tenant, name)))

    async def run(self, run_id: str) -> Run:
        """A run as stored now."""
        return binding.replay(await self.log.load(run_history(ADA.tenant, ENDPOINT, run_token(run_id))))

    async def stream(self, run_id: str) -> RunStream:
        """A run's stream as stored now."""
        return stream.replay(await self.log.load(stream_history(ADA.tenant, ENDPOINT, run_token(run_id))))

    async def row(self, action: Action) -> ActionRow:
        """An Action as the views fold it."""
        history = action_history(ADA.tenant, action.request.action_id)
        row = folded(ACTIONS, [event for event in await self.events() if event.history == history])
        assert row is not None
        return row

    async def run_row(self, run_id: str) -> RunRow:
        """A run as the views fold it."""
        key = run_key(ADA.tenant, ENDPOINT, run_id)
        found = [item for item in await self.events() if item.event.topic in RUNS.topics and RUNS.key(item) == key]
        row = folded(RUNS, found)
        assert row is not None
        return row

    async def until(self, met: Callable[[], Awaitable[bool]], seconds: float = 600, step: float = 0.5) -> None:
        """Wait, in virtual time, until a condition is met."""
        give_up = anyio.current_time() + seconds
        while not await met():
            assert anyio.current_time() < give_up, "the condition was not met in time"
            await anyio.sleep(step)

    async def pending(self, run_id: str, number: int = 1) -> list[str]:
        """Wait for pending provider requests; their digests, oldest first."""

        async def met() -> bool:
            return len((await self.stream(run_id)).pending) >= number

        await self.until(met)
        return [item.ask.digest for item in (await self.stream(run_id)).pending]

    async def ended(self, run_id: str, seconds: float = 600) -> Run:
        """Wait for a run's proven end."""

        async def met() -> bool:
            return (await self.run(run_id)).ended is not None

        await self.until(met, seconds)
        return await self.run(run_id)

    async def settle(self, seconds: float = 300) -> None:
        """Let time pass until nothing moves any more: Actions settled or unknown, known runs ended or lost."""

        async def met() -> bool:
            found: dict[str, Action] = {}
            runs: dict[str, Run] = {}
            for event in await self.events():
                kind = event.history.split("/")[1]
                if kind == "act":
                    found[event.history] = actions.evolve(
                        found.get(event.history, Action()), event.event, event.version
                    )
                elif kind == "run":
                    runs[event.history] = binding.evolve(runs.get(event.history, Run()), event.event, event.version)
            return all(item.state in (State.SETTLED, State.UNKNOWN, State.AWAITING) for item in found.values()) and all(
                run.ended is not None or run.unread is not None for run in runs.values()
            )

        await self.until(met, seconds, 5)


@asynccontextmanager
async def world(**options: Any) -> AsyncIterator[World]:
    """A world for one test; everything in it ends with the block."""
    async with anyio.create_task_group() as tasks:
        made = World(tasks, **options)
        yield made
        made.supervised = False
        for host in made.hosts:
            if not host.process.dead:
                await host.kill()
        tasks.cancel_scope.cancel()


def play(story: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run a story on trio with virtual time that jumps whenever everybody waits."""
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio._core._run._r.seed(0)
    return trio.run(story, *args, clock=MockClock(autojump_threshold=0))


__all__ = ["ADA", "BEGAN", "BO", "ENDPOINT", "TERMINAL_STATES", "Gone", "Host", "World", "play", "world"]
