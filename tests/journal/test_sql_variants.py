"""Broken variants of append_events, each of which its test must notice: a suite that passes on them proves nothing."""

from __future__ import annotations

from pathlib import Path

import anyio
import psycopg
import pytest

from adapters.clock import SystemClock
from adapters.journal import Fence, Journal, Verdict
from adapters.migrate import FOLDER, migrate
from adapters.writer import Pending
from tests.contract.journal import observe, row
from tests.faults.pg_proxy import PgProxy

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]

NO_IDENTITY = ("when c.same = c.size then 1", "when c.size = 0 then 1")
LOCKS = (
    "    lock table stored_events in row exclusive mode;\n"
    "    perform pg_advisory_xact_lock(1751478637, 'stored_events'::regclass::oid::integer);\n"
)


def variant(dsn: str, folder: Path, *changes: tuple[str, str]) -> None:
    """Migrate with a changed function; each change must apply."""
    text = (FOLDER / "001_journal.sql").read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "001_journal.sql").write_text(text)
    migrate(dsn, folder=folder)


def fence_before_lock() -> tuple[tuple[str, str], ...]:
    """Move the locks behind the reading of fences."""
    marker = "    -- verdicts: identity before the fence"
    return ((LOCKS, ""), (marker, LOCKS + marker))


async def lost_answer(dsn: str) -> Verdict:
    """The verdict of a command whose committed answer was lost."""
    with PgProxy(dsn) as proxy:
        journal = Journal(proxy.dsn, clock=SystemClock())
        await journal.start()
        proxy.add("journal-writer", "commit", "cut")
        verdict = (await observe(journal, row("a"))).verdict
        await journal.stop()
    return verdict


async def old_decision(dsn: str) -> Verdict:
    """The verdict of a decision that waits at the locks while a takeover commits."""
    journal = Journal(dsn, clock=SystemClock())
    await journal.start()
    await journal.take_sequence("one", b"a", "lease.taken")
    with psycopg.connect(dsn) as takeover, psycopg.connect(dsn, autocommit=True) as watch:
        takeover.execute("lock table stored_events in exclusive mode")
        pending: Pending = journal.submit([row("decision")], fence=Fence("one", 1))
        with anyio.fail_after(10):
            while not watch.execute("select from pg_locks where not granted").fetchall():  # noqa: ASYNC110 - the server
                await anyio.sleep(0.01)
        takeover.execute(
            "insert into stored_events (originator_id, originator_version, topic, state) values (%s, 2, %s, %s)",
            ["-/fence/one", "lease.taken", b"b"],
        )
        takeover.commit()
    verdict = (await anyio.to_thread.run_sync(pending.wait, 10)).verdict
    await journal.stop()
    return verdict


async def test_identity_keeps_a_lost_answer_from_becoming_a_conflict_with_oneself(database: str) -> None:
    assert await lost_answer(database) is Verdict.COMMITTED


async def test_without_identity_a_lost_answer_is_a_false_conflict(dsn: str, tmp_path: Path) -> None:
    variant(dsn, tmp_path, NO_IDENTITY)
    assert await lost_answer(dsn) is Verdict.CONFLICT


async def test_a_decision_that_waited_through_a_takeover_is_fenced(database: str) -> None:
    assert await old_decision(database) is Verdict.FENCED


async def test_a_fence_read_before_the_lock_lets_an_old_decision_pass(dsn: str, tmp_path: Path) -> None:
    variant(dsn, tmp_path, *fence_before_lock())
    assert await old_decision(dsn) is Verdict.COMMITTED


async def test_repeatable_read_is_refused(database: str) -> None:
    empty = "'{}'"
    call = f"select * from append_events({', '.join([empty] * 11)})"
    with psycopg.connect(database) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            connection.execute(call)


async def test_no_append_scans_the_table(database: str) -> None:
    journal = Journal(database, clock=SystemClock())
    await journal.start()
    await journal.take_sequence("one", b"a", "lease.taken")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "insert into stored_events select 'old/' || n, 1, 't', 'x' from generate_series(1, 20000) n; "
            "analyze stored_events"
        )
        await journal.stop()

        def scans() -> int:
            found = connection.execute(
                "select seq_scan from pg_stat_user_tables where relname = 'stored_events'"
            ).fetchone()
            assert found is not None
            return int(found[0])

        before = scans()
        await journal.start()
        for number in range(20):
            outcome = await journal.append([row(f"h/{number}")], fence=Fence("one", 1), deadline_s=10)
            assert outcome.verdict is Verdict.COMMITTED
        await journal.stop()
        with anyio.fail_after(10):
            while not connection.execute(  # noqa: ASYNC110 - statistics of the server
                "select from pg_stat_user_tables where relname = 'stored_events' and n_tup_ins >= 20021"
            ).fetchall():
                await anyio.sleep(0.05)
        assert scans() == before
