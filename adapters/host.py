"""The composition root and the life of one host process: wire, recover, serve, drain.

Order of start: database, schema, journal, keys, sequence, endpoints, views, recovery, listeners. Nothing is taken in
before recovery is over. Order of end: drain, listeners, work, release of the sequence, journal, database.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import psycopg
from anyio.abc import TaskGroup

from adapters.clock import SystemClock
from adapters.credentials import master_key
from adapters.database_check import DatabaseRefused, check_database
from adapters.driver import Driver, DriverLimits
from adapters.echo import Echo
from adapters.endpoints import RELEASE, Endpoints
from adapters.hermes import HermesLimits
from adapters.intake import EndpointPolicy, Gates, Intake
from adapters.journal import Journal
from adapters.lease import HostLease, LeaseTimes, Watch
from adapters.migrate import MigrationRefused, migrate
from adapters.notices import Notices
from adapters.observer import Observer, ObserverLimits
from adapters.postgres import EmbeddedPostgres
from adapters.postgres_folders import PostgresError
from adapters.practice import PracticeProcess, default_principals
from adapters.principals import Policies, Principals
from adapters.probes import Counters, Probes
from adapters.sender import Sender
from adapters.settings import Endpoint, Settings
from adapters.sse import SseLimits
from adapters.store import JournalStore
from adapters.takeover import Takeover
from adapters.vault import PostgresKeys, Vault
from adapters.view_postgres import PostgresTables
from adapters.views import Views
from domain.action import State
from domain.errors import HostError
from domain.events import RecoverySummed
from domain.ports import Unfinished
from projections.actions import ACTIONS
from projections.runs import RUNS

log = logging.getLogger(__name__)

FEATURES_EVERY_S = 60.0
LEASE_MARGIN_MS = 1_000
PAGE = 500


class ViewFinder:
    """Unfinished work as the views have it, after they caught up with the log."""

    def __init__(self, views: Views) -> None:
        self._views = views

    async def unfinished(self) -> list[Unfinished]:
        """Every Action that is not settled and every run whose observation is not over."""
        await self._views.catch_up()
        found: list[Unfinished] = []
        after = 0
        while rows := await self._views.unfinished(ACTIONS, after, PAGE):
            after = rows[-1].position
            for row in rows:
                request, owner = row.action.request, row.action.owner
                if owner is not None:
                    kind = "approval" if row.action.state is State.AWAITING else "action"
                    found.append(Unfinished(kind=kind, tenant=request.tenant, id=request.action_id, owner=owner))
        after = 0
        while runs := await self._views.unfinished(RUNS, after, PAGE):
            after = runs[-1].position
            for run in runs:
                tie, owner = run.run.bound, run.run.owner
                if tie is not None and owner is not None:
                    found.append(
                        Unfinished(
                            kind="run", tenant=tie.tenant, id=tie.run_id, owner=owner, endpoint_id=tie.endpoint_id
                        )
                    )
        return found


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a running host, for the listeners and for commands that work in the same process."""

    settings: Settings
    clock: SystemClock
    journal: Journal
    vault: Vault
    store: JournalStore
    standby: bool
    views: Views
    lease: HostLease
    endpoints: Endpoints
    principals: Principals
    policies: Policies
    notices: Notices
    gates: Gates
    counters: Counters
    probes: Probes
    observer: Observer
    driver: Driver
    intake: Intake
    takeover: Takeover
    echo: Echo
    recovery: RecoverySummed
    practice: PracticeProcess | None = None


@asynccontextmanager
async def engine(
    settings: Settings, *, environ: Mapping[str, str], progress: Callable[[str], None]
) -> AsyncIterator[Wiring]:
    """A recovered host without listeners; it drains and ends with the block."""
    clock = SystemClock()
    state = settings.state.dir
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        dsn, standby = await _database(settings, state, stack, environ, progress)
        journal = Journal(dsn, clock=clock)
        await _open(journal, stack)
        keys = PostgresKeys(dsn)
        stack.push_async_callback(keys.close)
        vault = Vault(master_key(state / "master-key", clock.entropy), keys, clock.entropy)
        await vault.admit()
        store = JournalStore(
            journal,
            vault,
            clock.new_id,
            deadline_s=settings.limits.append_deadline_ms / 1000,
            standby=standby,
        )
        tables = PostgresTables(dsn)
        stack.push_async_callback(tables.close)
        views = Views(tables, store, clock, wait_beyond=journal.wait_beyond)

        practice = None
        admitted: tuple[Endpoint, ...] = settings.endpoints
        if not admitted:
            progress("starting a practice Hermes")
            practice = PracticeProcess(state, clock.entropy)
            stack.callback(practice.stop)
            admitted = (await practice.start(),)
        endpoints = Endpoints(admitted, vault.digest, settings.revision(), _hermes_limits(settings))
        stack.push_async_callback(endpoints.close)

        host = settings.host
        times = LeaseTimes(ttl_ms=host.lease_ttl_ms, heartbeat_ms=host.heartbeat_ms, margin_ms=_margin(settings))
        lease = HostLease(store, clock, host.replica, clock.new_id("proc_"), RELEASE, times)
        notices, gates, watch = Notices(), Gates(), Watch(clock, host.lease_ttl_ms)
        observer = Observer(
            store,
            vault,
            clock,
            lease,
            endpoints.providers,
            notices,
            ObserverLimits(
                batch_ms=settings.stream.batch_ms,
                batch_frames=settings.stream.batch_frames,
                idle_s=float(settings.stream.idle_s),
            ),
        )
        policies = Policies(file=settings.policy.file)
        sender = Sender(store, vault, clock, lease, endpoints.providers, notices, observer.observe, policies.of)
        driver = Driver(
            store,
            clock,
            lease,
            endpoints.providers,
            notices,
            observer,
            sender,
            DriverLimits(max_in_flight=host.max_in_flight, approval_timeout_ms=endpoints.approval_timeouts_ms),
        )
        principals = (
            Principals(file=settings.principals.file)
            if settings.principals.file
            else Principals(default_principals(state, clock.entropy))
        )
        intake = Intake(
            store,
            vault,
            clock,
            lease,
            endpoints.providers,
            {
                name: EndpointPolicy(
                    run_deadline_ms=endpoints.setting(name).run_deadline_ms,
                    approvals_manual=endpoints.setting(name).approvals_mode == "manual",
                )
                for name in endpoints.providers
            },
            policies.of,
            driver,
            notices,
            gates,
        )
        finder = ViewFinder(views)
        takeover = Takeover(store, clock, lease, finder, driver, observer, watch, host.replica)
        probes = Probes(journal, endpoints.providers, gates, clock, health_timeout_ms=host.health_timeout_ms)
        echo = Echo(store, clock, notices, watch, journal.wait_beyond, await journal.last_position())

        progress("reading what the endpoints offer")
        await _refresh_all(endpoints)
        await probes.probe()
        async with anyio.create_task_group() as work:
            driver.attach(work)
            observer.attach(work)
            await lease.take()
            progress(f"recovering as {lease.fence.replica}, sequence {lease.fence.sequence}")
            recovery = await takeover.recover()
            _keep(work, lease, views, echo, takeover, probes, endpoints, host.heartbeat_ms, clock)
            try:
                yield Wiring(
                    settings=settings,
                    clock=clock,
                    journal=journal,
                    vault=vault,
                    store=store,
                    standby=standby,
                    views=views,
                    lease=lease,
                    endpoints=endpoints,
                    principals=principals,
                    policies=policies,
                    notices=notices,
                    gates=gates,
                    counters=Counters(),
                    probes=probes,
                    observer=observer,
                    driver=driver,
                    intake=intake,
                    takeover=takeover,
                    echo=echo,
                    recovery=recovery,
                    practice=practice,
                )
            finally:
                with anyio.CancelScope(shield=True):
                    await _drain(gates, driver, clock, settings.host.drain_timeout_ms)
                    sender.end()
                    work.cancel_scope.cancel()
                    await lease.release()


async def _open(journal: Journal, stack: AsyncExitStack) -> None:
    await journal.start()
    stack.push_async_callback(journal.stop)


def _margin(settings: Settings) -> int:
    return min(LEASE_MARGIN_MS, settings.host.lease_ttl_ms // 5)


def _hermes_limits(settings: Settings) -> HermesLimits:
    return HermesLimits(
        mutations=settings.host.max_in_flight,
        body=settings.limits.answer_bytes,
        sse=SseLimits(frame=settings.stream.frame_bytes, stream=settings.stream.stream_bytes),
    )


async def _database(
    settings: Settings,
    state: Path,
    stack: AsyncExitStack,
    environ: Mapping[str, str],
    progress: Callable[[str], None],
) -> tuple[str, bool]:
    """The database's DSN, and whether it has a synchronous standby.

    The configured database, or an embedded server which ends with the host.
    """
    secret = settings.dsn()
    if secret is None:
        progress("starting the embedded PostgreSQL")
        server = EmbeddedPostgres(state / "postgres", progress=progress)
        try:
            dsn = await anyio.to_thread.run_sync(server.start)
        except PostgresError as error:
            raise HostError("storage.unavailable", f"{error.code}: {error}") from error
        stack.push_async_callback(anyio.to_thread.run_sync, server.stop)
    else:
        dsn = secret.reveal()
    try:
        await anyio.to_thread.run_sync(migrate, dsn)
        standby = await anyio.to_thread.run_sync(lambda: check_database(dsn, environ=environ))
    except (DatabaseRefused, MigrationRefused) as error:
        raise HostError("storage.unsuitable", str(error)) from error
    except psycopg.Error as error:
        raise HostError("storage.unavailable", f"The database cannot be used: {type(error).__name__}.") from error
    return dsn, standby


async def _refresh_all(endpoints: Endpoints) -> None:
    async with anyio.create_task_group() as tasks:
        for endpoint_id in endpoints.providers:
            tasks.start_soon(endpoints.refresh, endpoint_id)


def _keep(
    work: TaskGroup,
    lease: HostLease,
    views: Views,
    echo: Echo,
    takeover: Takeover,
    probes: Probes,
    endpoints: Endpoints,
    heartbeat_ms: int,
    clock: SystemClock,
) -> None:
    """Everything that goes on for as long as the host lives."""

    async def probe() -> None:
        while True:
            await clock.sleep(heartbeat_ms / 1000)
            await probes.probe()

    async def refresh() -> None:
        while True:
            await clock.sleep(FEATURES_EVERY_S)
            await _refresh_all(endpoints)

    def regained() -> None:
        work.start_soon(takeover.round)

    work.start_soon(views.run)
    work.start_soon(echo.keep)
    work.start_soon(takeover.keep)
    work.start_soon(probe)
    work.start_soon(refresh)
    work.start_soon(lease.keep, regained)


async def _drain(gates: Gates, driver: Driver, clock: SystemClock, timeout_ms: int) -> None:
    """Take nothing new and let calls in hand end, within the limit; runs at the provider are not waited for."""
    gates.draining = True
    with anyio.move_on_after(timeout_ms / 1000):
        while driver.in_flight:
            await clock.sleep(0.01)
