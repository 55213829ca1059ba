"""The host as a process: listeners around the engine, signals, and the order in which it ends.

At the first SIGTERM or SIGINT nothing new is taken, calls in hand end within the drain limit while the listeners still
answer, then the listeners close and the engine ends. A second signal ends the process at once. SIGHUP reads principals
and policies again.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from starlette.types import ASGIApp

from adapters.host import Wiring, engine
from adapters.http import PublicApp
from adapters.http_ports import HttpPorts
from adapters.http_server import serve as listen
from adapters.operational import OperationalApp
from adapters.settings import Public, Settings
from domain.errors import HostError
from domain.values import rfc3339
from projections.metrics import HostMetrics
from projections.readiness import Gates

log = logging.getLogger(__name__)

SECOND_SIGNAL = 130


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where the listeners are, as origins."""

    public: str
    operational: str


async def serve(
    settings: Settings,
    *,
    environ: Mapping[str, str],
    progress: Callable[[str], None],
    ready: Callable[[Addresses], None],
    stop: anyio.Event | None = None,
) -> None:
    """Run a host until a signal or ``stop``. ``ready`` is called once requests are taken.

    HostError for a database, settings or an address that cannot be used.
    """
    try:
        await _run(settings, environ, progress, ready, stop or anyio.Event())
    except BaseExceptionGroup as group:
        refusals, others = group.split(HostError)
        if refusals is None or others is not None:
            raise
        raise _first(refusals) from group


async def _run(
    settings: Settings,
    environ: Mapping[str, str],
    progress: Callable[[str], None],
    ready: Callable[[Addresses], None],
    stop: anyio.Event,
) -> None:
    running: list[Wiring] = []
    starting, giving_up = anyio.CancelScope(), anyio.CancelScope()

    async def give_up() -> None:
        """A stop before the host is ready ends the start wherever it is."""
        with giving_up:
            await stop.wait()
            starting.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_heed_signals, stop, running, progress)
        tasks.start_soon(give_up)
        with starting:
            async with engine(settings, environ=environ, progress=progress) as wiring:
                running.append(wiring)
                async with _listeners(wiring) as addresses:
                    giving_up.cancel()
                    ready(addresses)
                    await stop.wait()
                    progress("draining: calls in hand end, nothing new is taken")
                    await _drain(wiring)
        tasks.cancel_scope.cancel()


def _first(group: BaseExceptionGroup[HostError]) -> HostError:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


@asynccontextmanager
async def _listeners(wiring: Wiring) -> AsyncIterator[Addresses]:
    settings = wiring.settings
    public: ASGIApp = PublicApp(_ports(wiring))
    operational: ASGIApp = OperationalApp(lambda: _probe(wiring), lambda: _metrics(wiring), wiring.clock.new_id)
    async with anyio.create_task_group() as tasks:
        origins = []
        for app, where in ((public, settings.public), (operational, settings.operational)):
            origins.append(await _listen(tasks, app, where, settings))
        yield Addresses(public=origins[0], operational=origins[1])
        tasks.cancel_scope.cancel()


async def _listen(tasks: Any, app: ASGIApp, where: Any, settings: Settings) -> str:
    tls = settings.tls
    pair = (tls.cert_file, tls.key_file) if tls.cert_file and tls.key_file else None
    try:
        port = await tasks.start(listen, app, where.host, where.port, pair)
    except OSError as error:
        name = "public" if isinstance(where, Public) else "operational"
        message = f"[{name}] {where.host} port {where.port} cannot be used: {error.strerror}"
        raise HostError("settings.invalid", message) from error
    host = f"[{where.host}]" if ":" in where.host and not where.host.startswith("[") else where.host
    return f"{'https' if pair else 'http'}://{host}:{port}"


def _ports(wiring: Wiring) -> HttpPorts:
    summary = {
        name: rfc3339(value) if hasattr(value, "tzinfo") else value
        for name, value in msgspec.structs.asdict(wiring.recovery).items()
    }
    return HttpPorts(
        intake=wiring.intake,
        callers=wiring.principals,
        journal=wiring.journal,
        confirm_reads=wiring.standby,
        vault=wiring.vault,
        views=wiring.views,
        notices=wiring.notices,
        clock=wiring.clock,
        counts=wiring.counters,
        endpoints=wiring.endpoints.published,
        at_start=lambda: summary,
        approval_timeouts_ms=wiring.endpoints.approval_timeouts_ms,
    )


async def _probe(wiring: Wiring) -> Gates:
    await wiring.probes.probe()
    return wiring.probes.gates(wiring.recovery, lease_valid=wiring.lease.valid())


def _metrics(wiring: Wiring) -> HostMetrics:
    gates, renewals = wiring.gates, wiring.lease.counts
    return HostMetrics(
        lease_valid=wiring.lease.valid(),
        draining=gates.draining,
        storage_ready=gates.storage_ready,
        connector_ready=gates.connector_ready,
        in_flight=wiring.driver.in_flight,
        requests_total=wiring.counters.requests_total,
        rejected_total=wiring.counters.rejected_total,
        heartbeat_failures_total=renewals.heartbeat_failures,
        lease_recovery_attempts_total=renewals.recovery_attempts,
        lease_recoveries_total=renewals.recoveries,
    )


async def _drain(wiring: Wiring) -> None:
    """Take nothing new; wait for calls in hand while the listeners still answer."""
    wiring.gates.draining = True
    with anyio.move_on_after(wiring.settings.host.drain_timeout_ms / 1000):
        while wiring.driver.in_flight:
            await wiring.clock.sleep(0.02)


async def _heed_signals(stop: anyio.Event, running: list[Wiring], progress: Callable[[str], None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for number in signals:
            if number == signal.SIGHUP:
                _reload(running)
            elif stop.is_set():
                for wiring in running:
                    if wiring.practice is not None and wiring.practice.pid is not None:
                        os.kill(wiring.practice.pid, signal.SIGKILL)
                os._exit(SECOND_SIGNAL)
            else:
                progress(f"{number.name}: ending")
                stop.set()


def _reload(running: list[Wiring]) -> None:
    for wiring in running:
        for name, part in (("principals", wiring.principals), ("policy", wiring.policies)):
            try:
                part.reload()
                log.info("settings.read_again", extra={"part": name})
            except HostError as error:
                log.error("settings.not_read_again", extra={"part": name, "code": error.code})
