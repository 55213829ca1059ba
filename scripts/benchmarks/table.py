"""What a benchmark is: two things measured in turn on the same server, and the figure that their ratio has to reach.

A module of this folder offers `BENCHMARKS`; `scripts/bench` names the modules.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from adapters.postgres import EmbeddedPostgres

Measure = Callable[[float], float]


@dataclass
class World:
    """The server of one run. Every measured thing works in a database of its own, or in one it shares on purpose."""

    server: EmbeddedPostgres
    folder: Path
    _databases: int = field(default=0)

    def database(self) -> str:
        """An empty database; its connection string."""
        self._databases += 1
        name = f"bench_{self._databases}"
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        return make_conninfo(self.server.dsn, dbname=name)


@dataclass(frozen=True)
class Benchmark:
    """One row of the table.

    `prepare` gives the measured thing and the thing beside it, each a function from seconds to a figure; without a
    second one the figure stands alone. With `lower` a smaller figure is better. `unit` is of the single figures.
    """

    name: str
    what: str
    beside: str
    goal: float
    prepare: Callable[[World], AbstractContextManager[tuple[Measure, Measure | None]]]
    aim: float | None = None
    unit: str = "commands/s"
    lower: bool = False


def measure(benchmark: Benchmark, world: World, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Interleaved rounds after one warm-up; medians, their ratio, and whether the goal is reached."""
    ours, others = [], []
    with benchmark.prepare(world) as (measured, beside):
        for round_ in range(rounds + 1):
            for turn in (0, 1) if round_ % 2 else (1, 0):
                length = seconds if round_ else min(seconds, 0.5)
                if turn == 0:
                    ours.append(measured(length))
                elif beside is not None:
                    others.append(beside(length))
    mine = statistics.median(ours[1:])
    other = statistics.median(others[1:]) if others else None
    figure = mine if other is None else mine / other
    return {
        "name": benchmark.name,
        "what": benchmark.what,
        "beside": benchmark.beside,
        "unit": benchmark.unit,
        "measured": mine,
        "measured_beside": other,
        "figure": figure,
        "goal": benchmark.goal,
        "lower": benchmark.lower,
        "aim": benchmark.aim,
        "reached": figure <= benchmark.goal if benchmark.lower else figure >= benchmark.goal,
        "spread": [min(ours[1:]), max(ours[1:])],
    }


@contextmanager
def world(state_in: Path | None) -> Iterator[World]:
    """A server with fsync on, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=state_in) as name:
        folder = Path(name)
        folder.chmod(0o711)
        with EmbeddedPostgres(folder / "state") as server:
            yield World(server, folder)


def disk_class(folder: Path) -> str:
    """How long this disk takes to keep 8 KiB, in words."""
    path = folder / "fsync"
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        times = []
        for _ in range(60):
            began = time.perf_counter()
            os.pwrite(file, bytes(8192), 0)
            os.fdatasync(file)
            times.append(time.perf_counter() - began)
    finally:
        os.close(file)
        path.unlink()
    middle = statistics.median(times) * 1000
    kind = (
        "keeps nothing for sure" if middle < 0.02 else "fast" if middle < 0.5 else "middling" if middle < 3 else "slow"
    )
    return f"{middle:.2f} ms for a synced page ({kind})"
