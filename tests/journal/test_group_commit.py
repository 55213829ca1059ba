"""Many callers share a commit, and each command stands or falls alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import psycopg
import pytest

from adapters.clock import SystemClock
from adapters.command import Stored, Takeover, Verdict, fence_history, pack
from adapters.journal import Fence, Journal
from adapters.writer import Pending
from tests.contract.journal import observe, row

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]


def trigger(database: str, body: str) -> None:
    """Something in the database that goes wrong with rows of some topics."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "create sequence meetings; "
            "create function meet() returns trigger language plpgsql security definer as "
            f"$$ begin {body} return new; end $$; "
            "create trigger meet before insert on stored_events for each row execute function meet()"
        )


class Gate:
    """Holds the appends of a database while commands queue, so that they end up in one batch."""

    def __init__(self, database: str) -> None:
        self._connection = psycopg.connect(database)
        self._connection.execute("lock table stored_events in exclusive mode")

    def open(self) -> None:
        self._connection.rollback()
        self._connection.close()


async def in_one_batch(journal: Journal, database: str, submit: Callable[[], list[Pending]]) -> list[Verdict]:
    """Queue behind a held lock, let go, and wait for the verdicts."""
    gate = Gate(database)
    first = journal.submit([row("first")], fence=None)
    with anyio.fail_after(10):
        while not first.tried:  # noqa: ASYNC110 - the writer's thread sets no event of this loop
            await anyio.sleep(0.005)
    waiting = submit()
    gate.open()
    return [(await anyio.to_thread.run_sync(one.wait, 20)).verdict for one in waiting]


def transactions(database: str) -> int:
    """How many transactions wrote to the journal."""
    with psycopg.connect(database) as connection:
        found = connection.execute("select count(distinct xmin::text) from stored_events").fetchone()
    assert found is not None
    return int(found[0])


async def test_commands_that_queue_during_a_commit_share_the_next_one(journal: Journal, database: str) -> None:
    verdicts = await in_one_batch(
        journal, database, lambda: [journal.submit([row(f"h/{n}"), row(f"k/{n}")], fence=None) for n in range(50)]
    )
    assert verdicts == [Verdict.COMMITTED] * 50
    assert transactions(database) == 2
    log = await journal.read_log(0, 200)
    assert [r.history for r in log[1:5]] == ["h/0", "k/0", "h/1", "k/1"]


async def test_each_kind_of_failing_command_fails_alone(journal: Journal, database: str) -> None:
    await journal.take_sequence("one", b"a", "lease.taken")
    await journal.take_sequence("one", b"b", "lease.taken")
    await observe(journal, row("taken", 1, b"old"))

    def submit() -> list[Pending]:
        return [
            journal.submit([row("a")], fence=Fence("one", 2)),
            journal.submit([row("taken", 1, b"new"), row("b")], fence=None),
            journal.submit([row("c")], fence=Fence("one", 1)),
            journal.submit([row("d")], fence=Fence("two", 1)),
            journal.submit([row("taken", 1, b"old")], fence=None),
            journal.submit([row("e")], fence=None),
        ]

    verdicts = await in_one_batch(journal, database, submit)
    assert verdicts == [
        Verdict.COMMITTED,
        Verdict.CONFLICT,
        Verdict.FENCED,
        Verdict.UNLEASED,
        Verdict.COMMITTED,
        Verdict.COMMITTED,
    ]
    assert [r.history for r in await journal.read_log(4, 10)] == ["a", "e"]


async def test_a_history_appears_once_in_a_batch_and_keeps_its_order(journal: Journal, database: str) -> None:
    verdicts = await in_one_batch(
        journal, database, lambda: [journal.submit([row("h", n)], fence=None) for n in range(1, 6)]
    )
    assert verdicts == [Verdict.COMMITTED] * 5
    assert [r.version for r in await journal.read("h")] == [1, 2, 3, 4, 5]
    assert transactions(database) == 6


async def test_a_takeover_has_a_higher_position_than_every_decision_under_the_old_sequence(
    journal: Journal, database: str
) -> None:
    await journal.take_sequence("one", b"a", "lease.taken")

    def submit() -> list[Pending]:
        takeover = [Stored(history=fence_history("one"), version=2, topic="lease.expired", state=b"b")]
        before = [journal.submit([row(f"before/{n}")], fence=Fence("one", 1)) for n in range(5)]
        over = journal._writer.submit(pack(takeover, None, Takeover("one", 1), None))
        return [*before, over, *(journal.submit([row(f"after/{n}")], fence=Fence("one", 1)) for n in range(5))]

    verdicts = await in_one_batch(journal, database, submit)
    assert verdicts == [Verdict.COMMITTED] * 6 + [Verdict.FENCED] * 5
    assert (await journal.read_log(0, 100))[-1].history == fence_history("one")


async def test_a_command_that_the_server_cannot_store_is_rejected_alone(journal: Journal, database: str) -> None:
    trigger(database, "if new.topic = 'test.poison' then raise 'no' using errcode = '22000'; end if;")

    def submit() -> list[Pending]:
        topics = ["test.poison" if n == 13 else "test.fine" for n in range(40)]
        return [journal.submit([row(f"h/{n}", topic=topic)], fence=None) for n, topic in enumerate(topics)]

    verdicts = await in_one_batch(journal, database, submit)
    assert verdicts == [Verdict.REJECTED if n == 13 else Verdict.COMMITTED for n in range(40)]
    assert await journal.read("h/13") == []


async def test_a_command_that_kills_connections_is_cornered_and_the_others_go_on(
    journal: Journal, database: str
) -> None:
    trigger(
        database,
        "if new.topic = 'test.kill' and nextval('public.meetings') < 20 then "
        "perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(5); end if;",
    )
    killer: list[Pending] = []

    def submit() -> list[Pending]:
        killer.append(journal.submit([row("killer", topic="test.kill")], fence=None))
        return [journal.submit([row(f"h/{n}")], fence=None) for n in range(40)]

    verdicts = await in_one_batch(journal, database, submit)
    assert verdicts == [Verdict.COMMITTED] * 40
    assert killer[0].outcome is None
    assert journal.in_doubt == 1
    after_it = journal.submit([row("killer", 2)], fence=None)
    assert (await observe(journal, row("others"))).verdict is Verdict.COMMITTED
    assert after_it.give_up().verdict is Verdict.NOT_APPENDED
    await journal.stop(grace_s=0)


async def test_threads_may_submit_at_the_same_time(journal: Journal) -> None:
    verdicts: list[Verdict] = []

    def work(thread: int) -> None:
        verdicts.extend(journal.submit([row(f"{thread}/{n}")], fence=None).wait(20).verdict for n in range(25))

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join)
    assert verdicts == [Verdict.COMMITTED] * 200
    assert len(await journal.read_log(0, 300)) == 200


async def test_a_command_of_more_bytes_than_a_batch_goes_alone_and_one_of_more_events_is_refused(database: str) -> None:
    small = Journal(database, clock=SystemClock(), batch_events=2, batch_bytes=100)
    await small.start()
    with pytest.raises(ValueError, match="2 events"):
        await observe(small, row("a", 1), row("a", 2), row("a", 3))
    verdicts = await in_one_batch(
        small, database, lambda: [small.submit([row(f"h/{n}", 1, bytes(200))], fence=None) for n in range(3)]
    )
    await small.stop()
    assert verdicts == [Verdict.COMMITTED] * 3
    assert transactions(database) == 4
