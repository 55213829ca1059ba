"""Appends go on while the table is maintained, and the role that appends can change nothing."""

from __future__ import annotations

import anyio
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from adapters.clock import SystemClock
from adapters.journal import Journal, Verdict
from adapters.migrate import migrate
from tests.contract.journal import observe, row

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]


def run(database: str, *statements: str) -> None:
    """Statements outside any transaction."""
    with psycopg.connect(database, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@pytest.mark.parametrize(
    "work",
    [
        ("delete from stored_events where originator_id like 'old/%'", "vacuum stored_events"),
        ("create index concurrently extra on stored_events (topic)", "drop index concurrently extra"),
        ("reindex index concurrently stored_events_notification_id_idx",),
        ("analyze stored_events",),
    ],
    ids=["vacuum", "index", "reindex", "analyze"],
)
async def test_maintenance_delays_no_append_by_more_than_a_moment(
    journal: Journal, database: str, work: tuple[str, ...]
) -> None:
    fill = "insert into stored_events select 'old/' || n, 1, 't', 'x' from generate_series(1, 30000) n"
    await anyio.to_thread.run_sync(run, database, fill)
    clock = SystemClock()
    longest, count, done = 0.0, 0, anyio.Event()

    async def append(caller: int) -> None:
        nonlocal longest, count
        version = 0
        while not done.is_set():
            version += 1
            began = clock.monotonic()
            assert (await observe(journal, row(f"h/{caller}", version))).verdict is Verdict.COMMITTED
            longest, count = max(longest, clock.monotonic() - began), count + 1

    async with anyio.create_task_group() as group:
        for caller in range(8):
            group.start_soon(append, caller)
        for _ in range(3):
            await anyio.to_thread.run_sync(run, database, *work)
        done.set()
    assert count > 8
    assert longest < 1.0, "a table lock makes appends wait for a second and more"


async def test_a_restricted_role_appends_and_reads_and_cannot_change_events(database: str) -> None:
    run(
        database,
        "do $$ begin create role guest login in role hermes_application; exception when others then null; end $$",
    )
    dsn = make_conninfo(database, user="guest")
    journal = Journal(dsn, clock=SystemClock())
    await journal.start()
    assert (await observe(journal, row("a"))).verdict is Verdict.COMMITTED
    assert [r.history for r in await journal.read_log(0, 10)] == ["a"]
    await journal.stop()
    with psycopg.connect(dsn, autocommit=True) as guest:
        for statement in (
            "update stored_events set topic = 'x'",
            "delete from stored_events",
            "truncate stored_events",
            "insert into stored_events values ('b', 1, 't', 'x')",
            "alter table stored_events disable trigger all",
            "drop function append_events",
            "set role hermes_journal",
            "update schema_migrations set checksum = ''",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                guest.execute(statement.encode())


async def test_the_function_belongs_to_an_owner_that_cannot_log_in_and_ignores_the_callers_search_path(
    journal: Journal, database: str
) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        owner = connection.execute(
            "select r.rolcanlogin, r.rolsuper, p.prosecdef, p.proconfig from pg_proc p "
            "join pg_roles r on r.oid = p.proowner where p.proname = 'append_events'"
        ).fetchone()
        assert owner is not None
        assert owner[:3] == (False, False, True)
        assert "search_path=public, pg_temp" in owner[3]
        for privilege in ("update", "delete", "truncate"):
            held = connection.execute("select has_table_privilege('hermes_journal', 'stored_events', %s)", [privilege])
            assert held.fetchone() == (False,)
        empty = "'{}'"
        connection.execute("create temp table stored_events (like public.stored_events)")
        call = (
            "select verdicts from append_events('{null}', '{null}', '{null}', '{null}', '{null}', '{1}', "
            "'{1}', '{a}', '{1}', '{t}', array[''::bytea])"
        )
        assert connection.execute(call.encode()).fetchone() == ([0],), empty
    assert [r.history for r in await journal.read_log(0, 10)] == ["a"]


async def test_row_security_guards_readers_and_not_the_append(journal: Journal, database: str) -> None:
    run(
        database,
        "alter table stored_events enable row level security",
        "alter table stored_events force row level security",
        "create policy own on stored_events for select using (originator_id like 'mine/%')",
        "do $$ begin create role guest login in role hermes_application; exception when others then null; end $$",
    )
    guest = Journal(make_conninfo(database, user="guest"), clock=SystemClock())
    await guest.start()
    assert (await observe(guest, row("mine/a"), row("yours/b"))).verdict is Verdict.COMMITTED
    assert (await observe(guest, row("yours/b", 1, b"other"))).verdict is Verdict.CONFLICT
    assert [r.history for r in await guest.read_log(0, 10)] == ["mine/a"]
    await guest.stop()


async def test_journals_in_two_schemas_are_apart(dsn: str) -> None:
    for schema in ("one", "two_2"):
        migrate(dsn, schema=schema)
    journals = [Journal(dsn, schema=schema, clock=SystemClock()) for schema in ("one", "two_2")]
    for number, journal in enumerate(journals):
        await journal.start()
        assert (await observe(journal, row("same", 1, b"%d" % number))).verdict is Verdict.COMMITTED
    assert [(await journal.read("same"))[0].state for journal in journals] == [b"0", b"1"]
    for journal in journals:
        await journal.stop()
    with pytest.raises(ValueError, match="schema"):
        await Journal(dsn, schema="two and more", clock=SystemClock()).start()
    with psycopg.connect(dsn) as connection:
        found = connection.execute(sql.SQL("select count(*) from {}.stored_events").format(sql.Identifier("one")))
        assert found.fetchone() == (1,)
