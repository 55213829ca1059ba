"""Two writer processes on one log, stopped and killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from adapters.clock import SystemClock
from adapters.follower import Follower
from adapters.journal import Journal, Stored, Verdict
from adapters.migrate import migrate
from tests.contract.journal import observe, row
from tests.pg import fresh_database, shared_server

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]
ROOT = Path(__file__).parents[2]


def writer(database: str, name: str, count: int) -> subprocess.Popen[str]:
    """A process that appends `count` commands of two rows from 16 callers and prints each acknowledged history."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.journal.writer_process", database, name, str(count)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


async def follow(journal: Journal, until_quiet: anyio.Event, seen: list[Stored]) -> None:
    """Read until told and nothing more comes."""
    follower = Follower(journal)
    while True:
        last = until_quiet.is_set()
        rows = await follower.next_page(0.2)
        seen.extend(rows)
        if last and not rows:
            return


def acknowledged(output: str) -> list[tuple[str, int]]:
    """Histories and positions that a process was told are committed; a torn last line is nobody's word."""
    lines = output.split("\n")[:-1]
    return [(history, position) for history, position in map(json.loads, lines)]


async def test_two_processes_share_one_order_and_a_follower_sees_all_of_both(journal: Journal, database: str) -> None:
    quiet, seen = anyio.Event(), list[Stored]()
    async with anyio.create_task_group() as group:
        group.start_soon(follow, journal, quiet, seen)
        processes = [writer(database, name, 300) for name in ("one", "two")]
        outputs = [(await anyio.to_thread.run_sync(process.communicate))[0] for process in processes]
        quiet.set()
    assert [process.returncode for process in processes] == [0, 0]
    told = dict(entry for output in outputs for entry in acknowledged(output))
    assert len(told) == 600
    assert [r.position for r in seen] == sorted({r.position for r in seen})
    assert len(seen) == 1200
    assert {r.history: r.position for r in seen if r.history in told} == told


async def test_a_killed_process_loses_nothing_that_it_was_told(journal: Journal, database: str) -> None:
    quiet, seen = anyio.Event(), list[Stored]()
    async with anyio.create_task_group() as group:
        group.start_soon(follow, journal, quiet, seen)
        killed, other = writer(database, "one", 100_000), writer(database, "two", 300)
        assert killed.stdout is not None
        await anyio.to_thread.run_sync(killed.stdout.readline)
        output = (await anyio.to_thread.run_sync(other.communicate))[0]
        killed.send_signal(signal.SIGKILL)
        rest = (await anyio.to_thread.run_sync(killed.communicate))[0]
        assert (await observe(journal, row("next"))).position > 0
        quiet.set()
    told = dict(acknowledged(output) + acknowledged(rest))
    assert len(told) > 300
    places = {r.history: r.position for r in seen}
    assert len(places) == len(seen)
    assert {history: places.get(history) for history in told} == told
    pairs = [history for history in places if history.endswith("/b")]
    assert all(history.removesuffix("/b") in {h.removesuffix("/a") for h in places} for history in pairs)


async def test_a_stopped_process_delays_nobody(journal: Journal, database: str) -> None:
    stopped = writer(database, "one", 100_000)
    assert stopped.stdout is not None
    await anyio.to_thread.run_sync(stopped.stdout.readline)
    stopped.send_signal(signal.SIGSTOP)
    try:
        with anyio.fail_after(6):
            for number in range(50):
                await observe(journal, row("h", number + 1))
    finally:
        stopped.kill()
        await anyio.to_thread.run_sync(stopped.communicate)
    assert len(await journal.read("h")) == 50


async def test_a_killed_server_keeps_what_was_acknowledged_and_the_rest_is_resolved() -> None:
    with shared_server(fsync=True) as server:
        dsn = fresh_database(server)
        migrate(dsn)
        journal = Journal(dsn, clock=SystemClock())
        await journal.start()
        told: dict[str, int] = {}

        async def caller(number: int) -> None:
            for version in range(1, 101):
                outcome = await journal.append([row(f"h/{number}", version)], fence=None, deadline_s=60)
                assert outcome.verdict is Verdict.COMMITTED
                told[f"h/{number}/{version}"] = outcome.position

        async def kill() -> None:
            for goal in (100, 500, 1000):
                while len(told) < goal:  # noqa: ASYNC110 - how far the callers are
                    await anyio.sleep(0.005)
                server.kill()
                await anyio.to_thread.run_sync(server.start)

        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            for number in range(16):
                group.start_soon(caller, number)
        await journal.stop()
        again = Journal(dsn, clock=SystemClock())
        await again.start()
        rows = await again.read_log(0, 10_000)
        await again.stop()
    assert {f"{r.history}/{r.version}": r.position for r in rows} == told
    assert len(rows) == 1600
