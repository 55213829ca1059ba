"""What an answer proves: every row of the table of appends, through a proxy that fails on the wire."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
import psycopg
import pytest

from adapters.clock import SystemClock
from adapters.journal import Journal, Outcome, Stored, Verdict
from tests.contract.journal import observe, row
from tests.faults.pg_proxy import PgProxy

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]
WRITER = "journal-writer"
POINTS = ["call", "sync", "row", "commit"]


@pytest.fixture
def proxy(database: str) -> Iterator[PgProxy]:
    with PgProxy(database) as running:
        yield running


@pytest.fixture
async def journal(proxy: PgProxy) -> AsyncIterator[Journal]:
    started = Journal(proxy.dsn, clock=SystemClock(), queue_limit=50, try_timeout_s=1.0)
    await started.start()
    yield started
    proxy.clear()
    proxy.refusing = False
    await started.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread brings about."""
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - threads of the journal set no event of this loop
            await anyio.sleep(0.01)


async def healthy(journal: Journal) -> None:
    """Wait until nothing is in doubt."""
    await until(lambda: journal.state == "healthy")


async def many(journal: Journal, count: int, state: bytes = b"x") -> list[Outcome]:
    """Commands of different histories at the same time."""
    outcomes: list[Outcome] = []

    async def one(number: int) -> None:
        outcomes.append(await observe(journal, row(f"h/{number}", 1, state), row(f"k/{number}", 1, state)))

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, number)
    return outcomes


async def many_named(journal: Journal, name: str, count: int) -> list[Outcome]:
    """Commands of one round, each in a history of its own."""
    outcomes: list[Outcome] = []

    async def one(number: int) -> None:
        outcomes.append(await observe(journal, row(f"{name}/{number}")))

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, number)
    return outcomes


async def rows_once(journal: Journal, expected: int) -> list[Stored]:
    """All rows; each was stored once."""
    log = await journal.read_log(0, 10_000)
    assert len(log) == expected
    return log


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("action", ["cut", "pass_cut", "freeze"])
async def test_a_lost_answer_is_resolved_with_the_same_bytes_and_stored_once(
    journal: Journal, proxy: PgProxy, point: str, action: str
) -> None:
    proxy.add(WRITER, point, action)
    outcomes = await many(journal, 20)
    assert {outcome.verdict for outcome in outcomes} == {Verdict.COMMITTED}
    assert (await observe(journal, row("next"))).verdict is Verdict.COMMITTED
    await rows_once(journal, 41)
    assert proxy.counts[WRITER, "connect"] >= 2


async def test_a_commit_whose_answer_was_lost_is_told_with_its_first_position(journal: Journal, proxy: PgProxy) -> None:
    proxy.add(WRITER, "commit", "cut")
    outcome = await observe(journal, row("a"))
    assert (outcome.verdict, outcome.detail) == (Verdict.COMMITTED, "by identity")
    assert outcome.position == (await rows_once(journal, 1))[0].position


async def test_a_commit_answered_with_a_warning_is_doubt_until_a_confirming_commit(
    journal: Journal, proxy: PgProxy, database: str
) -> None:
    await observe(journal, row("first"))
    calls = proxy.counts[WRITER, "call"]
    proxy.add(WRITER, "commit", "warn")
    outcome = await observe(journal, row("a"))
    assert (outcome.verdict, outcome.detail) == (Verdict.COMMITTED, "by identity")
    assert proxy.counts[WRITER, "call"] == calls + 2
    await rows_once(journal, 2)


async def test_an_answer_by_identity_alone_writes_a_record_of_its_own(journal: Journal, database: str) -> None:
    await observe(journal, row("a"))
    with psycopg.connect(database, autocommit=True) as connection:

        def written() -> int:
            found = connection.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone()
            assert found is not None
            return int(found[0])

        before = written()
        assert (await observe(journal, row("a"))).detail == "by identity"
        again = written()
        await journal.confirm()
        assert before < again < written()


async def test_other_bytes_after_a_lost_answer_are_a_conflict(journal: Journal, proxy: PgProxy) -> None:
    proxy.add(WRITER, "commit", "cut")
    assert (await observe(journal, row("a", 1, b"mine"))).verdict is Verdict.COMMITTED
    assert (await observe(journal, row("a", 1, b"theirs"))).verdict is Verdict.CONFLICT


async def test_a_deadline_in_doubt_is_unknown_now_and_resolved_later(journal: Journal, proxy: PgProxy) -> None:
    await observe(journal, row("first"))
    proxy.add(WRITER, "commit", "freeze", times=-1)
    proxy.add(WRITER, "connect", "freeze", times=-1)
    pending = journal.submit([row("a")], fence=None)
    await until(lambda: pending.tried and journal.state != "healthy")
    assert pending.give_up().verdict is Verdict.UNKNOWN
    assert journal.in_doubt == 1
    assert (await journal.append([row("b")], fence=None, deadline_s=0.1)).verdict is Verdict.NOT_APPENDED
    proxy.clear()
    await healthy(journal)
    assert pending.outcome is not None
    assert pending.outcome.verdict is Verdict.COMMITTED
    assert [r.history for r in await rows_once(journal, 2)] == ["first", "a"]


async def test_what_was_never_tried_is_certainly_not_appended(journal: Journal, proxy: PgProxy) -> None:
    await observe(journal, row("first"))
    proxy.refusing = True
    proxy.add(WRITER, "connect", "cut", times=-1)
    proxy.cut_all(WRITER)
    lost = journal.submit([row("lost")], fence=None)
    await until(lambda: journal.state == "away")
    assert (await journal.append([row("a")], fence=None, deadline_s=0.1)).verdict is Verdict.NOT_APPENDED
    proxy.clear()
    proxy.refusing = False
    await healthy(journal)
    assert lost.wait(10).verdict is Verdict.COMMITTED
    assert await journal.read("a") == []


async def test_a_cancelled_caller_leaves_a_command_that_is_stored_once_or_not_at_all(
    journal: Journal, proxy: PgProxy
) -> None:
    calls = proxy.counts[WRITER, "commit"]
    proxy.add(WRITER, "commit", "delay", seconds=0.3)
    async with anyio.create_task_group() as group:
        group.start_soon(observe, journal, row("a"))
        await until(lambda: proxy.counts[WRITER, "commit"] > calls)
        group.cancel_scope.cancel()
    assert (await observe(journal, row("a"))).verdict is Verdict.COMMITTED
    await rows_once(journal, 1)


async def test_a_full_queue_refuses_at_once(journal: Journal, proxy: PgProxy) -> None:
    proxy.add(WRITER, "commit", "delay", seconds=0.5)
    waiting = [journal.submit([row(f"h/{number}")], fence=None) for number in range(60)]
    refused = [one for one in waiting if one.outcome is not None and one.outcome.detail == "the queue is full"]
    assert refused
    assert all(one.outcome.verdict is Verdict.NOT_APPENDED for one in refused if one.outcome)
    stored = [one for one in waiting if one not in refused]
    for one in stored:
        assert (await anyio.to_thread.run_sync(one.wait, 10)).verdict is Verdict.COMMITTED
    await rows_once(journal, len(stored))


@pytest.mark.proves("B002", "B031")
async def test_a_read_only_database_stores_nothing_and_the_journal_recovers_with_it(
    journal: Journal, database: str
) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        name = connection.info.dbname
        await observe(journal, row("first"))
        connection.execute(f"alter database {name} set default_transaction_read_only = on")
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", [WRITER]
        )
        sent = journal.submit([row("sent")], fence=None)
        await until(lambda: journal.state == "away")
        assert sent.give_up().verdict is Verdict.UNKNOWN
        assert (await journal.append([row("queued")], fence=None, deadline_s=0.2)).verdict is Verdict.NOT_APPENDED
        assert await journal.read("sent") == []
        connection.execute("set default_transaction_read_only = off")
        connection.execute(f"alter database {name} reset default_transaction_read_only")
    await healthy(journal)
    assert [r.history for r in await rows_once(journal, 2)] == ["first", "sent"]


@pytest.mark.parametrize("errcode", ["53100", "53300", "57P01", "58030", "40001", "40P01", "55P03"])
async def test_an_error_of_the_environment_is_tried_again_and_hits_no_command(
    journal: Journal, database: str, errcode: str
) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "create sequence tries; "
            "create function fail() returns trigger language plpgsql security definer as $$ begin "
            f"if nextval('public.tries') <= 2 then raise exception 'no' using errcode = '{errcode}'; end if; "
            "return new; end $$; "
            "create trigger fail before insert on stored_events for each row execute function fail()"
        )
    outcomes = await many(journal, 10)
    assert {outcome.verdict for outcome in outcomes} == {Verdict.COMMITTED}
    await rows_once(journal, 20)


async def test_ended_backends_lose_and_double_nothing(journal: Journal, database: str) -> None:
    done = anyio.Event()
    kills = 0

    async def kill() -> None:
        nonlocal kills
        with psycopg.connect(database, autocommit=True) as connection:
            while not done.is_set():
                ended = connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s "
                    "and query like 'select%%append_events%%'",
                    [WRITER],
                ).fetchall()
                kills += len(ended)
                await anyio.sleep(0.02)

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        for round_ in range(15):
            outcomes = (
                await many(journal, 20, b"%d" % round_)
                if round_ == 0
                else [await observe(journal, row("h", round_, b"%d" % round_))]
            )
            assert {outcome.verdict for outcome in outcomes} == {Verdict.COMMITTED}
        done.set()
    assert kills > 0
    await rows_once(journal, 40 + 14)


async def test_closing_answers_everyone(journal: Journal, proxy: PgProxy) -> None:
    await observe(journal, row("first"))
    proxy.add(WRITER, "commit", "freeze", times=-1)
    tried = journal.submit([row("a")], fence=None)
    await until(lambda: tried.tried)
    queued = journal.submit([row("b")], fence=None)
    await journal.stop(grace_s=0.0)
    assert tried.outcome is not None
    assert tried.outcome.verdict is Verdict.UNKNOWN
    assert queued.outcome is not None
    assert queued.outcome.verdict is Verdict.NOT_APPENDED
    assert journal.submit([row("c")], fence=None).outcome is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_of_hundreds_of_commits_cut_anywhere_none_is_lost_doubled_or_a_false_conflict(
    journal: Journal, proxy: PgProxy, seed: int
) -> None:
    chance = random.Random(seed)
    for round_ in range(40):
        for _ in range(chance.randint(1, 3)):
            proxy.add(WRITER, chance.choice(POINTS), chance.choice(["cut", "pass_cut", "warn"]))
        outcomes = await many_named(journal, f"{round_}", chance.randint(1, 8))
        assert {outcome.verdict for outcome in outcomes} == {Verdict.COMMITTED}
    rows = await journal.read_log(0, 10_000)
    assert len({(r.history, r.version) for r in rows}) == len(rows)
    assert proxy.counts[WRITER, "connect"] > 40
