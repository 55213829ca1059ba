"""Stored views on PostgreSQL: damage is found and repaired, nothing private in clear, indexes, lost connections."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import msgspec
import psycopg
import pytest

from adapters.clock import SystemClock
from adapters.journal import Journal
from adapters.memory_journal import MemoryJournal
from adapters.store import JournalStore
from adapters.vault import MemoryKeys, Vault
from adapters.view_postgres import PostgresTables
from adapters.view_tables import Filters
from adapters.views import Views, decode_row
from domain.errors import HostError
from domain.history import Change, Command
from domain.values import Plain, PrivateScope
from projections.actions import ACTIONS
from projections.runs import RUNS
from tests.golden.event_samples import MASTER
from tests.recorded import Log, busy

pytestmark = pytest.mark.anyio
ACME = Filters(tenant="acme")


@pytest.fixture
async def tables(database: str) -> AsyncIterator[PostgresTables]:
    kept = PostgresTables(database)
    yield kept
    await kept.close()


async def test_the_drill_finds_a_damaged_a_deleted_and_an_added_row_and_a_rebuild_repairs_them(
    database: str, tables: PostgresTables
) -> None:
    log = Log()
    busy(log, 24)
    views = Views(tables, log, SystemClock())
    await views.catch_up()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("update view_rows set state = 'completed' where view = 'actions' and key = 'acme/act_1'")
        connection.execute("delete from view_rows where view = 'actions' and key = 'acme/act_3'")
        connection.execute(
            "insert into view_rows select view, generation, 'acme/act_more', 7, listed, tenant, state, principal,"
            " capability_id, endpoint_id, session, run_id, approval_id, approval, reason, person, open, needed, at, doc"
            " from view_rows where view = 'actions' and key = 'acme/act_1'"
        )
        connection.execute("update view_counts set n = n + 1 where view = 'actions' and state = 'unknown'")
    log.accept("act_traffic")
    await views.catch_up()
    found = await views.compare("actions")
    assert {(one.key, one.kind) for one in found if one.kind != "count"} == {
        ("acme/act_1", "changed"),
        ("acme/act_3", "missing"),
        ("acme/act_more", "extra"),
    }
    assert [one for one in found if one.kind == "count"]
    assert all(one.journal_position for one in found if one.kind in ("changed", "missing"))
    assert await views.compare("actions") == found, "the drill changes nothing"
    await views.rebuild("actions")
    assert await views.compare("actions") == []


ODD = ("a\0b", "".join(chr(33 + number % 90) for number in range(0, 90_000, 7)), "ä" * 300)


@pytest.mark.parametrize("session", ODD, ids=["nul", "long", "long in bytes"])
async def test_whatever_a_session_is_named_the_views_go_on_and_find_it(
    database: str, tables: PostgresTables, session: str
) -> None:
    log = Log()
    log.start("act_1", "run_1")
    log.see("run_1", session_id=session)
    views = Views(tables, log, SystemClock())
    await views.catch_up()
    found = await views.list(RUNS, Filters(tenant="acme", session=session))
    assert [row.run.tie.run_id for row in found.rows] == ["run_1"]
    assert (await views.list(RUNS, Filters(tenant="acme", session=session[:1] + "else"))).rows == ()
    assert await views.compare("runs") == []


@pytest.mark.proves("A032")
async def test_no_plain_private_text_is_in_any_table_of_the_views(database: str, tables: PostgresTables) -> None:
    clock = SystemClock()
    journal = MemoryJournal(clock=clock, now=clock.now)
    store = JournalStore(journal, Vault(MASTER, MemoryKeys(), clock.entropy), clock.new_id)
    log, canary = Log(), b'"canary-93c1f0aa"'
    busy(log, 12)
    for recorded in log.recorded():
        event = recorded.event
        private = {
            name: Plain(content=canary)
            for name in ("input", "answer", "output", "result", "frames", "session_key")
            if getattr(event, name, None) is not None
        }
        change = Change(
            history=recorded.history,
            expected=recorded.version - 1,
            events=(msgspec.structs.replace(event, **private),),
            scope=PrivateScope(tenant="acme", principal="alice"),
        )
        await store.append(Command(changes=(change,)))
    views = Views(tables, store, clock)
    await views.catch_up()
    assert await views.compare("runs") == []
    with psycopg.connect(database) as connection:
        for table in ("view_rows", "view_counts", "view_places", "view_faults"):
            for (text,) in connection.execute(f"select t::text from {table} t"):
                assert "canary-93c1f0aa" not in text
                assert canary.hex() not in text
        docs = [doc for (doc,) in connection.execute("select doc from view_rows where view = 'actions'")]
    assert docs
    assert all(b"canary" not in doc and b'"box"' in doc for doc in docs)
    assert all(decode_row(ACTIONS, doc).action.accepted is not None for doc in docs)


async def test_views_follow_sixteen_writers_through_lost_connections_and_equal_the_journal(
    database: str, tables: PostgresTables
) -> None:
    clock = SystemClock()
    journal = Journal(database, clock=clock)
    await journal.start()
    store = JournalStore(journal, Vault(MASTER, MemoryKeys(), clock.entropy), clock.new_id)
    views = Views(tables, store, clock, wait_beyond=journal.wait_beyond, batch=50)
    written = 0

    async def write(number: int) -> None:
        nonlocal written
        log = Log()
        log.start(f"act_{number}", f"run_{number}")
        for recorded in log.recorded():
            event = recorded.event
            private = {
                name: Plain(content=b"{}") for name in ("input", "answer", "output") if getattr(event, name, None)
            }
            change = Change(
                history=recorded.history,
                expected=recorded.version - 1,
                events=(msgspec.structs.replace(event, **private),),
                scope=PrivateScope(tenant="acme", principal="alice"),
            )
            for stored_event in await store.append(Command(changes=(change,))):
                written = max(written, stored_event.position)

    async with anyio.create_task_group() as following:
        following.start_soon(views.run)
        for wave in range(3):
            async with anyio.create_task_group() as writers:
                for number in range(16):
                    writers.start_soon(write, wave * 16 + number)
            with psycopg.connect(database, autocommit=True) as connection:
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and pid <> pg_backend_pid() and application_name ~ 'views'"
                )
        assert await views.wait_for(written, 30)
        assert await views.compare("actions") == []
        assert await views.compare("runs") == []
        following.cancel_scope.cancel()
    assert (await views.list(ACTIONS, ACME, "", 1000)).total == 48
    await journal.stop()


async def test_lists_of_one_tenant_use_an_index_and_their_size_comes_from_the_counts(
    database: str, tables: PostgresTables
) -> None:
    log = Log()
    for number in range(1500):
        log.accept(f"act_{number}")
        log.settle(f"act_{number}", "cancelled", "action.cancelled")
    await Views(tables, log, SystemClock()).catch_up()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("analyze view_rows")
        plan = connection.execute(
            "explain select position, doc from view_rows where listed and view = 'actions' and generation = 1"
            " and tenant = 'acme' and state = 'cancelled' order by position desc limit 51"
        ).fetchall()
        counts = connection.execute("select count(*) from view_counts where view = 'actions' and n <> 0").fetchone()
    assert "Index Scan" in plan[1][0]
    assert "view_rows_state_idx" in plan[1][0] or "view_rows_position_idx" in plan[1][0]
    assert counts == (1,)


async def test_views_that_cannot_be_reached_say_so() -> None:
    tables = PostgresTables("host=127.0.0.1 port=1 dbname=none connect_timeout=1")
    with pytest.raises(HostError) as caught:
        await Views(tables, Log(), SystemClock()).get(ACTIONS, "acme/act_1")
    assert caught.value.code == "storage.unavailable"
