"""Followers miss nothing, whatever becomes of the notifications."""

from __future__ import annotations

import anyio
import pytest

from adapters.clock import SystemClock
from adapters.follower import Follower
from adapters.journal import Journal, Verdict
from tests.contract.journal import observe, row
from tests.faults.pg_proxy import PgProxy

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]
LISTENER = "journal-listener"


async def drain(follower: Follower, seen: list[tuple[str, int]], expected: int) -> None:
    """Follow until the expected number of rows."""
    while len(seen) < expected:
        seen.extend((r.history, r.version) for r in await follower.next_page(2))


async def test_with_every_notification_lost_a_follower_is_at_most_five_seconds_behind(
    journal: Journal, database: str
) -> None:
    with PgProxy(database) as proxy:
        proxy.add(LISTENER, "notify", "drop", times=-1)
        blind = Journal(proxy.dsn, clock=SystemClock())
        await blind.start()
        follower = Follower(blind)
        await observe(journal, row("a"))
        with anyio.fail_after(5):
            assert [r.history for r in await follower.next_page(5)] == ["a"]
        await blind.stop()


@pytest.mark.parametrize("action", ["cut", "freeze", "drop"])
async def test_a_listening_connection_that_fails_hides_nothing(journal: Journal, database: str, action: str) -> None:
    with PgProxy(database) as proxy:
        proxy.add(LISTENER, "notify", action)
        other = Journal(proxy.dsn, clock=SystemClock())
        await other.start()
        follower, seen = Follower(other), list[tuple[str, int]]()
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(drain, follower, seen, 3)
                for number in range(3):
                    await observe(journal, row("h", number + 1))
        await other.stop()
    assert seen == [("h", 1), ("h", 2), ("h", 3)]


async def test_a_notification_wakes_a_follower_of_another_process_at_once(journal: Journal, database: str) -> None:
    other = Journal(database, clock=SystemClock())
    await other.start()
    woken: list[int] = []
    with anyio.fail_after(1.5):
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                woken.append(await other.wait_beyond(0, 10))

            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            outcome = await observe(journal, row("a"))
    await other.stop()
    assert woken == [outcome.position]


async def test_a_follower_that_starts_again_after_its_position_goes_on_without_loss(journal: Journal) -> None:
    for number in range(7):
        await observe(journal, row("h", number + 1))
    first = Follower(journal, page=3)
    seen = [r.version for r in await first.next_page(0)]
    seen += [r.version for r in await Follower(journal, first.position).next_page(0)]
    assert seen == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
async def test_followers_miss_none_of_20000_events_of_8_writers_while_listening_is_cut_frozen_and_delayed(
    journal: Journal, database: str
) -> None:
    done = anyio.Event()
    with PgProxy(database) as proxy:
        other = Journal(proxy.dsn, clock=SystemClock())
        await other.start()
        mine, theirs = list[tuple[str, int]](), list[tuple[str, int]]()
        fed = 0

        async def write(number: int) -> None:
            nonlocal fed
            for version in range(1, 2501, 5):
                rows = [row(f"h/{number}", version + step) for step in range(5)]
                assert (await observe(journal, *rows)).verdict is Verdict.COMMITTED
                fed += 1
                if fed == 8 * 500:
                    done.set()

        async def disturb() -> None:
            while not done.is_set():
                for action in ("cut", "freeze", "delay", "drop"):
                    proxy.add(LISTENER, "notify", action, seconds=0.3)
                await anyio.sleep(0.1)
                proxy.cut_all(LISTENER)
                await anyio.sleep(0.1)
                proxy.freeze_all(LISTENER)
                await anyio.sleep(0.1)

        with anyio.fail_after(90):
            async with anyio.create_task_group() as group:
                group.start_soon(drain, Follower(other), theirs, 20_000)
                group.start_soon(drain, Follower(journal), mine, 20_000)
                group.start_soon(disturb)
                for number in range(8):
                    group.start_soon(write, number)
        await other.stop()
    assert len(set(theirs)) == len(theirs) == 20_000
    assert mine == theirs
