"""Event streams stored by the real observer, beside the same client that only parses them.

A hundred runs at once. All subscriptions wait at the provider before it releases them, and the time is over when every
stream is stored to its end; a stream that is not complete and in order ends the benchmark with an error. The thing
beside it reads the same streams with the same client on the same event loop and forgets them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, aclosing, contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import psycopg
from benchmarks import stream_server
from benchmarks.stand import ENDPOINT, WHO, Host, host
from benchmarks.table import Benchmark, Measure, World

from adapters.notices import Notices, Placed
from domain import stream
from domain.events import FramesStored, RunBound
from domain.history import Change, Command, run_history, run_token, stream_history
from domain.provider import RawFrame
from domain.requests import Trusted, events_request

STREAMS = 100
FRAMES = 1000
PACE = 50.0
POLL_S = 0.005
CALL_S = 30.0
MIB = 2**20


@contextmanager
def provider() -> Iterator[str]:
    """The origin of a running stream server."""
    command = [sys.executable, str(Path(stream_server.__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class Times(Notices):
    """Notices that keep when each event was told as stored: milliseconds of the wall clock, by history and version."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, dict[int, float]] = {}

    def tell(self, *stored: Placed) -> None:
        """These events are stored."""
        for event in stored:
            self.heard.setdefault(event.history, {})[event.version] = time.time() * 1000
        super().tell(*stored)


class Load:
    """Groups of runs of one host at one provider."""

    def __init__(self, host: Host, origin: str, times: Times | None = None, first_group: int = 1) -> None:
        self._host, self._origin, self._times = host, origin, times or Times()
        self._groups = itertools.count(first_group)
        self.peak = 0

    def observe(self, frames: int, rate: float = 0, streams: int = STREAMS) -> float:
        """Frames stored in a second."""
        return self._host.portal.call(self._observe, frames, rate, streams)

    def parse(self, frames: int, rate: float = 0, streams: int = STREAMS) -> float:
        """Frames parsed in a second, and forgotten."""
        return self._host.portal.call(self._parse, frames, rate, streams)

    def delays_ms(self) -> list[float]:
        """For each frame of the last group, how long after it was received it was stored."""
        return self._host.portal.call(self._delays_ms)

    async def _delays_ms(self) -> list[float]:
        found: list[float] = []
        for history, heard in self._times.heard.items():
            for item in await self._host.store.load(history):
                if isinstance(item.event, FramesStored):
                    opened = await self._host.vault.open(item.event.frames)
                    texts = msgspec.json.decode(opened, type=list[tuple[int, str]])
                    last = item.event.at.timestamp() * 1000
                    found += [heard[item.version] - last + texts[-1][0] - offset for offset, _ in texts]
        return found

    async def _observe(self, frames: int, rate: float, streams: int) -> float:
        group, host = next(self._groups), self._host
        names = [stream_server.run_id(group, frames, number) for number in range(streams)]
        self._times.heard.clear()
        for name in names:
            await self._bind(name)
        async with anyio.create_task_group() as tasks:
            host.observer.attach(tasks)
            for name in names:
                host.observer.observe(WHO.tenant, ENDPOINT, name)
            await self._call(f"/waiting/{group}/{streams}")
            began = time.perf_counter()
            await self._call(f"/release/{group}/{rate}")
            while host.observer.following:
                self.peak = max(self.peak, resident())
                await anyio.sleep(POLL_S)
            took = time.perf_counter() - began
            tasks.cancel_scope.cancel()
        for name in names:
            await self._check(name, frames)
        return frames * streams / took

    async def _parse(self, frames: int, rate: float, streams: int) -> float:
        group = next(self._groups)
        read = [0] * streams

        async def one(number: int) -> None:
            trusted = Trusted(principal=WHO.id, tenant=WHO.tenant, issuer="bench")
            out = events_request(stream_server.run_id(group, frames, number), None, trusted)
            async with aclosing(self._host.provider.stream(out)) as opened:
                async for item in opened:
                    read[number] += isinstance(item, RawFrame)

        async with anyio.create_task_group() as tasks:
            for number in range(streams):
                tasks.start_soon(one, number)
            await self._call(f"/waiting/{group}/{streams}")
            began = time.perf_counter()
            await self._call(f"/release/{group}/{rate}")
        took = time.perf_counter() - began
        if read != [frames] * streams:
            raise RuntimeError("not what this measures: frames are missing")
        return frames * streams / took

    async def _bind(self, name: str) -> None:
        """The run as the receipt of its start would have bound it."""
        host, at = self._host, self._host.clock.now()
        bound = RunBound(
            at=at,
            tenant=WHO.tenant,
            endpoint_id=ENDPOINT,
            run_id=name,
            action_id=f"act_{name}",
            attempt_id=f"att_{name}",
            principal=WHO.id,
            target=host.provider.target,
            owner=host.lease.fence,
            started_at=at,
        )
        history = run_history(WHO.tenant, ENDPOINT, run_token(name))
        await host.store.append(Command(changes=(Change(history=history, expected=0, events=(bound,)),)))

    async def _check(self, name: str, frames: int) -> None:
        found = await self._host.store.load(stream_history(WHO.tenant, ENDPOINT, run_token(name)))
        seen = stream.replay(found)
        if seen.last_seq != frames or seen.gaps or seen.terminal_seq != frames or seen.open:
            raise RuntimeError(f"a stream is not complete: {seen.last_seq} of {frames}, gaps {len(seen.gaps)}")

    async def _call(self, path: str) -> bytes:
        def read() -> bytes:
            with urllib.request.urlopen(self._origin + path, timeout=CALL_S) as answer:
                content: bytes = answer.read()
                return content

        return await anyio.to_thread.run_sync(read)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def load(dsn: str) -> Iterator[Load]:
    """A load on a host and a provider of its own."""
    times = Times()
    with provider() as origin, host(dsn, origin, times) as running:
        yield Load(running, origin, times)


def length(seconds: float) -> int:
    """Frames of each stream: fewer for a quick look."""
    return FRAMES if seconds >= 1 else FRAMES // 4


@contextmanager
def beside_parsing(world: World) -> Iterator[tuple[Measure, Measure]]:
    """Streams stored against streams parsed."""
    with load(world.database()) as ours:
        yield lambda seconds: ours.observe(length(seconds)), lambda seconds: ours.parse(length(seconds))


@contextmanager
def delay(world: World, rate: float) -> Iterator[tuple[Measure, None]]:
    """The 99th percentile, in ms, from a frame's receipt to its commit."""
    with load(world.database()) as ours:

        def run(seconds: float) -> float:
            ours.observe(int(rate * seconds) + 2 if rate else length(seconds), rate)
            return statistics.quantiles(ours.delays_ms(), n=100)[98]

        yield run, None


def peak_over_idle(dsn: str, origin: str, frames: int, group: int) -> float:
    """MiB by which this process grows at most while it stores; measured in a process of its own."""
    with host(dsn, origin) as running:
        ours = Load(running, origin, first_group=group)
        idle = resident()
        ours.observe(frames)
        return (ours.peak - idle) / MIB


@contextmanager
def memory(world: World) -> Iterator[tuple[Measure, None]]:
    """Peak memory over idle of a process that observes."""
    dsn, groups = world.database(), itertools.count(1)
    with provider() as origin:

        def run(seconds: float) -> float:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                return pool.submit(peak_over_idle, dsn, origin, length(seconds), next(groups)).result()

        yield run, None


@contextmanager
def bytes_of_runs(world: World, rate: float) -> Iterator[tuple[Measure, Measure]]:
    """Bytes that the table and its indexes grow by for each run of 500 frames, against the frames' own bytes."""
    dsn, runs, frames = world.database(), 20, 500
    with load(dsn) as ours, psycopg.connect(dsn, autocommit=True) as connection:

        def size() -> int:
            found = connection.execute("select pg_total_relation_size('stored_events')").fetchone()
            return int(found[0]) if found else 0

        def stored(_: float) -> float:
            before = size()
            ours.observe(frames, rate, runs)
            return (size() - before) / runs

        own = sum(map(len, stream_server.frames_of(stream_server.run_id(1, frames, 1))))
        yield stored, lambda _: float(own)


def _delay(rate: float) -> Callable[[World], AbstractContextManager[tuple[Measure, None]]]:
    return lambda world: delay(world, rate)


def _bytes(rate: float) -> Callable[[World], AbstractContextManager[tuple[Measure, Measure]]]:
    return lambda world: bytes_of_runs(world, rate)


BENCHMARKS = [
    Benchmark(
        "streams", "100 streams at full speed, stored", "the same, parsed only", 0.5, beside_parsing, 0.7, "frames/s"
    ),
    Benchmark("streams-delay", "the same, received to stored, p99", "", 1000, _delay(0), unit="ms", lower=True),
    Benchmark(
        "streams-paced",
        "100 streams of 50 frames/s, received to stored, p99",
        "",
        70,
        _delay(PACE),
        unit="ms",
        lower=True,
    ),
    Benchmark("streams-memory", "100 streams, peak memory over idle", "", 150, memory, unit="MiB", lower=True),
    Benchmark(
        "stored-bytes",
        "stored for a run of 500 frames at full speed",
        "the frames' own bytes",
        1.5,
        _bytes(0),
        unit="bytes",
        lower=True,
    ),
    Benchmark("stored-bytes-paced", "the same at 50 frames/s", "the same", 1.5, _bytes(PACE), unit="bytes", lower=True),
]
