"""What a host costs when it does nothing, and how fast a journal is read again."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import psycopg
from benchmarks.admission import Load
from benchmarks.stand import Host, host
from benchmarks.streams import MIB, provider, resident
from benchmarks.table import Benchmark, Measure, World

from adapters.serve import Addresses, serve
from adapters.settings import load as load_settings
from adapters.store import Unreadable
from projections.actions import ACTIONS

EVENTS = 20_000
PAGE = 500
SETTLE_S = 1.0


@contextmanager
def replay(world: World) -> Iterator[tuple[Measure, Measure]]:
    """Events read and folded into rows of Actions, against the same rows copied out as raw blocks."""
    dsn = world.database()
    with host(dsn) as running, psycopg.connect(dsn, autocommit=True) as connection:
        ours, count = Load(running), 0
        while count < EVENTS:
            ours.admit(0.5)
            found = connection.execute("select count(*) from stored_events").fetchone()
            count = int(found[0]) if found else 0

        def fold(_: float) -> float:
            began = time.perf_counter()
            read = running.portal.call(_fold, running)
            return read / (time.perf_counter() - began)

        def copy(_: float) -> float:
            began = time.perf_counter()
            with connection.cursor().copy("copy stored_events to stdout (format binary)") as blocks:
                for _block in blocks:
                    pass
            return count / (time.perf_counter() - began)

        yield fold, copy


async def _fold(running: Host) -> int:
    rows: dict[str, Any] = {}
    read = after = 0
    while events := await running.store.read_log(after, PAGE):
        read, after = read + len(events), events[-1].position
        for event in events:
            if isinstance(event, Unreadable):
                raise RuntimeError(f"not what this measures: {event.reason}")
            if event.event.topic in ACTIONS.topics and (key := ACTIONS.key(event)) is not None:
                rows[key] = ACTIONS.fold(rows.get(key), event)
    return read


def idle_memory(dsn: str, folder: Path, origin: str) -> float:
    """MiB of this process as a whole host with its listeners and without work."""
    key = folder / "key"
    key.write_text("bench-endpoint-key")
    key.chmod(0o600)
    environment = {
        "POSTGRES__DSN": dsn,
        "STATE__DIR": str(folder / "state"),
        "PUBLIC__PORT": "0",
        "OPERATIONAL__PORT": "0",
        "ENDPOINTS__0__ID": "main",
        "ENDPOINTS__0__BASE_URL": origin,
        "ENDPOINTS__0__API_KEY_FILE": str(key),
    }
    settings = load_settings(None, {f"HERMES_RECONCILER_{name}": text for name, text in environment.items()})
    found: list[float] = []

    async def run() -> None:
        stop, ready = anyio.Event(), anyio.Event()

        def take(_: Addresses) -> None:
            ready.set()

        def say(_: str) -> None:
            """Nobody reads it."""

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: serve(settings, environ={}, progress=say, ready=take, stop=stop))
            await ready.wait()
            await anyio.sleep(SETTLE_S)
            found.append(resident() / MIB)
            stop.set()

    anyio.run(run)
    return found[0]


@contextmanager
def idle(world: World) -> Iterator[tuple[Measure, None]]:
    """Memory of an idle host; each measure is a process of its own."""
    names = itertools.count()
    with provider() as origin:

        def run(_: float) -> float:
            folder = world.folder / f"idle-{next(names)}"
            folder.mkdir()
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                return pool.submit(idle_memory, world.database(), folder, origin).result()

        yield run, None


BENCHMARKS = [
    Benchmark(
        "replay", "events read again and folded, one process", "COPY of the rows, raw", 0.35, replay, 0.5, "events/s"
    ),
    Benchmark("idle-memory", "a host without work, with its listeners", "", 120, idle, unit="MiB", lower=True),
]
