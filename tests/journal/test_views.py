"""Stored views: equal to a fresh fold, paged exactly, rebuilt while events come, and a drill that finds damage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from adapters.clock import SystemClock
from adapters.migrate import migrate
from adapters.view_postgres import PostgresTables
from adapters.view_tables import Filters, MemoryTables, Tables
from adapters.views import Views, make_cursor
from domain.errors import HostError
from domain.events import CancelWished, StreamClosed
from projections import Facets, Projection, Row, folded
from projections.actions import ACTIONS, ActionRow, action_key
from projections.recovery import needs_person
from projections.runs import RUNS, run_key
from tests.pg import dsn, postgres_server
from tests.recorded import Log, at, busy

__all__ = ["dsn", "postgres_server"]
pytestmark = pytest.mark.anyio
ACME = Filters(tenant="acme")
Damage = Callable[[str], Awaitable[None]]


@pytest.fixture(params=["memory", "postgres"])
async def tables(request: pytest.FixtureRequest) -> AsyncIterator[Tables]:
    if request.param == "memory":
        yield MemoryTables()
        return
    database = request.getfixturevalue("dsn")
    migrate(database)
    kept = PostgresTables(database)
    yield kept
    await kept.close()


@pytest.fixture
def log() -> Log:
    return Log()


def views_of(tables: Tables, log: Any, **more: Any) -> Views:
    return Views(tables, log, SystemClock(), **more)


async def stored(views: Views, projection: Projection[Any], filters: Filters = ACME) -> dict[str, Row]:
    """Every listed row, by key."""
    found: dict[str, Row] = {}
    cursor = ""
    while True:
        page = await views.list(projection, filters, cursor, 1000)
        for row in page.rows:
            key = row.history.removeprefix("acme/act/") if isinstance(row, ActionRow) else row.run.tie.run_id
            found[key] = row
        cursor = page.cursor
        if not cursor:
            return found


@pytest.mark.proves("A002", "A128", "B065")
async def test_stored_views_equal_a_fold_of_each_history_alone(tables: Tables, log: Log) -> None:
    busy(log, 60)
    views = views_of(tables, log, batch=7)
    position = await views.catch_up()
    assert position == log.events[-1].position
    for name in ("act_0", "act_1", "act_2", "act_3"):
        alone = [event for event in log.recorded() if event.history == f"acme/act/{name}"]
        assert await views.get(ACTIONS, action_key("acme", name)) == folded(ACTIONS, alone)
    key = run_key("acme", "alpha", "run_0")
    of_run = [e for e in log.recorded() if e.event.topic in RUNS.topics and RUNS.key(e) == key]
    assert await views.get(RUNS, key) == folded(RUNS, of_run)
    assert await views.compare("actions") == []
    assert await views.compare("runs") == []


@pytest.mark.parametrize("size", [1, 10, 1000])
@pytest.mark.parametrize("newest", [False, True])
async def test_pages_of_any_size_give_each_row_once_in_order_also_at_equal_times(
    tables: Tables, log: Log, size: int, newest: bool
) -> None:
    for number in range(25):
        log.clock = 0.0
        log.accept(f"act_{number}")
    views = views_of(tables, log)
    await views.catch_up()
    seen, cursor = [], ""
    while True:
        page = await views.list(ACTIONS, ACME, cursor, size, newest=newest)
        assert page.total == 25
        assert page.position == log.events[-1].position
        seen += [row.request.action_id for row in page.rows]
        cursor = page.cursor
        if not cursor:
            break
    expected = [f"act_{number}" for number in range(25)]
    assert seen == (expected[::-1] if newest else expected)


async def test_a_row_that_moves_while_a_list_is_paged_comes_again_and_none_is_lost(tables: Tables, log: Log) -> None:
    for number in range(6):
        log.accept(f"act_{number}")
    views = views_of(tables, log)
    await views.catch_up()
    page = await views.list(ACTIONS, ACME, "", 3)
    first = [row.request.action_id for row in page.rows]
    log.settle("act_0", "cancelled", "action.cancelled")
    await views.catch_up()
    rest = await views.list(ACTIONS, ACME, page.cursor, 10)
    assert first == ["act_0", "act_1", "act_2"]
    assert [row.request.action_id for row in rest.rows] == ["act_3", "act_4", "act_5", "act_0"]


@pytest.mark.proves("B146")
async def test_a_cursor_of_another_list_or_with_a_changed_character_is_refused(tables: Tables, log: Log) -> None:
    busy(log, 12)
    views = views_of(tables, log)
    await views.catch_up()
    cursor = (await views.list(ACTIONS, ACME, "", 2)).cursor
    others = [
        (ACTIONS, Filters(tenant="other"), False),
        (ACTIONS, Filters(tenant="acme", state="unknown"), False),
        (ACTIONS, ACME, True),
        (RUNS, ACME, False),
    ]
    for projection, filters, newest in others:
        with pytest.raises(HostError, match="cursor"):
            await views.list(projection, filters, cursor, 2, newest=newest)
    changed = [
        cursor[:place] + ("A" if sign != "A" else "B") + cursor[place + 1 :] for place, sign in enumerate(cursor)
    ]
    for wrong in [*changed, cursor + "A", cursor[:-1], "offset:1", "ü", "=", "evt_cursor_3"]:
        with pytest.raises(HostError) as caught:
            await views.list(ACTIONS, ACME, wrong, 2)
        assert caught.value.code == "query.invalid_cursor"


async def test_filters_counts_and_tallies_agree_with_the_lists(tables: Tables, log: Log) -> None:
    busy(log, 48)
    views = views_of(tables, log, batch=5)
    await views.catch_up()
    every = (await views.list(ACTIONS, ACME, "", 1000)).rows
    for facet in ("state", "reason", "principal", "approval"):
        tally = await views.tally(ACTIONS, ACME, facet)
        assert sum(tally.values()) == len(every)
        for value, count in tally.items():
            if value:
                page = await views.list(ACTIONS, Filters(tenant="acme", **{facet: value}), "", 1000)
                assert page.total == len(page.rows) == count, (facet, value)
    for filters in (
        Filters(tenant="acme", session="s0"),
        Filters(tenant="acme", run_id="run_0"),
        Filters(tenant="acme", approval_id="apr_act_2"),
        Filters(tenant="acme", unfinished=True),
        Filters(tenant="acme", waiting=True),
        Filters(tenant="acme", with_approval=True),
        Filters(tenant="acme", since=at(10), until=at(40)),
        Filters(tenant="acme", state="unknown", principal="alice"),
    ):
        page = await views.list(ACTIONS, filters, "", 1000)
        facets = [ACTIONS.facets(row) for row in every]
        matching = [row for row, one in zip(every, facets, strict=True) if one and _matches(filters, one)]
        assert page.total == len(page.rows) == len(matching) > 0, filters
        assert list(page.rows) == matching
    assert (await views.list(ACTIONS, Filters(tenant="another"), "", 10)).total == 0


def _matches(filters: Filters, facets: Facets) -> bool:
    return (
        all(getattr(facets, name) == value for name, value in filters.equal.items())
        and all(getattr(facets, name) for name in filters.present)
        and (filters.since is None or (facets.at is not None and facets.at >= filters.since))
        and (filters.until is None or (facets.at is not None and facets.at < filters.until))
    )


@pytest.mark.parametrize("every", [1, 5, 24])
async def test_the_feed_tells_each_need_of_a_person_once_under_a_stable_id_however_often_it_is_read(
    tables: Tables, log: Log, every: int
) -> None:
    views = views_of(tables, log)
    told: dict[str, str] = {}
    position = 0
    for number in range(24):
        name = f"act_{number}"
        log.accept(name)
        log.claim(name)
        log.lose(name)
        if number % 3 == 0:
            log.receive(name, f"run_{number}")
        if number >= 2:
            log.act(f"act_{number - 2}", CancelWished(at=log.tick(), by="alice", reason="moves the row on"))
        if number % every == every - 1 or number == 23:
            await views.catch_up()
            entries, position = await views.needs_after(ACME, position)
            assert [entry["position"] for entry in entries] == sorted(entry["position"] for entry in entries)
            assert not {entry["id"] for entry in entries} & set(told)
            told |= {entry["id"]: entry["action_id"] for entry in entries}
    assert sorted(told.values()) == sorted(f"act_{number}" for number in range(24))
    assert await views.needs_after(ACME, position) == ((), position)
    again, _ = await views.needs_after(ACME, 0)
    assert [entry["id"] for entry in again] == list(told)
    waiting = await views.list(ACTIONS, Filters(tenant="acme", waiting=True), "", 1000)
    open_now = needs_person(waiting.rows)
    assert len(open_now) == 16
    assert {entry["id"] for entry in open_now} <= set(told)


async def test_a_rebuild_beside_the_live_rows_swaps_while_events_come_and_reads_go_on(tables: Tables, log: Log) -> None:
    busy(log, 60)
    views = views_of(tables, log, batch=5)
    await views.catch_up()
    before = await stored(views, ACTIONS)
    done = anyio.Event()

    async def build() -> None:
        await views.rebuild("actions")
        done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(build)
        number = 100
        while not done.is_set():
            if number < 130:
                log.accept(f"act_{number}")
                number += 1
            await views.advance()
            assert set(before) <= set(await stored(views, ACTIONS))
    await views.catch_up()
    assert set(await stored(views, ACTIONS)) == set(before) | {f"act_{n}" for n in range(100, number)}
    assert await views.compare("actions") == []


@pytest.mark.proves("B145")
async def test_a_follower_that_stops_between_batches_goes_on_without_a_gap_or_a_repeat(
    tables: Tables, log: Log
) -> None:
    busy(log, 30)
    first = views_of(tables, log, batch=4)
    await first.prepare()
    for _ in range(5):
        await first.advance()
    reached = await first.position(ACTIONS)
    second = views_of(tables, log, batch=9)
    assert reached == (await tables.call(tables.places))["actions"].position
    await second.catch_up()
    assert await second.compare("actions") == []
    assert await second.compare("runs") == []


async def test_two_hosts_that_fold_the_same_journal_do_not_fold_an_event_twice(tables: Tables, log: Log) -> None:
    busy(log, 60)
    hosts = [views_of(tables, log, batch=3), views_of(tables, log, batch=4)]
    await hosts[0].prepare()
    async with anyio.create_task_group() as group:
        for host in hosts:
            group.start_soon(host.catch_up)
    assert await hosts[0].position(RUNS) == log.events[-1].position
    assert await hosts[0].compare("runs") == []
    assert await hosts[1].compare("actions") == []


async def test_an_event_that_cannot_be_read_holds_its_own_history_and_is_never_skipped(
    tables: Tables, log: Log
) -> None:
    log.accept("act_1")
    log.accept("act_2")
    spoilt = log.spoil("acme/act/act_1")
    log.settle("act_1", "cancelled", "action.cancelled")
    log.settle("act_2", "cancelled", "action.cancelled")
    for number in range(3, 103):
        log.accept(f"act_{number}")
    views = views_of(tables, log)
    await views.catch_up()
    (fault,) = await views.faults("acme")
    assert (fault.history, fault.version, fault.position) == ("acme/act/act_1", 2, spoilt.position)
    assert fault.reason == "history.newer_version"
    assert await views.faults("another") == ()
    held = await views.get(ACTIONS, action_key("acme", "act_1"))
    assert held is not None
    assert held.state == "queued"
    assert views.lag().held == 1
    assert (await views.list(ACTIONS, Filters(tenant="acme", state="cancelled"), "", 10)).total == 1
    assert (await views.list(ACTIONS, ACME, "", 1000)).total == 102

    log.events.remove(spoilt)
    again = views_of(tables, log)
    await again.prepare()
    await again.catch_up()
    assert await again.faults("acme") == ()
    healed = await again.get(ACTIONS, action_key("acme", "act_1"))
    assert healed is not None
    assert healed.state == "cancelled"


async def test_a_fold_that_fails_on_one_history_leaves_the_others_current(tables: Tables, log: Log) -> None:
    def fold(row: ActionRow | None, recorded: Any) -> ActionRow:
        if recorded.history.endswith("act_1"):
            raise ArithmeticError
        return ACTIONS.fold(row, recorded)

    log.accept("act_1")
    log.accept("act_2")
    views = views_of(tables, log, projections=[msgspec.structs.replace(ACTIONS, fold=fold)])
    await views.catch_up()
    assert [fault.reason for fault in await views.faults("acme")] == ["view.fold_failed"]
    assert set(await stored(views, ACTIONS)) == {"act_2"}


async def test_a_newer_fold_builds_its_view_anew_and_an_older_release_does_not_read_it(
    tables: Tables, log: Log
) -> None:
    busy(log, 12)
    await views_of(tables, log).catch_up()
    newer = views_of(tables, log, projections=[msgspec.structs.replace(ACTIONS, version=ACTIONS.version + 1), RUNS])
    await newer.prepare()
    assert (await newer.list(ACTIONS, ACME, "", 100)).total == 12
    older = views_of(tables, log)
    with pytest.raises(HostError) as caught:
        await older.get(ACTIONS, action_key("acme", "act_0"))
    assert caught.value.code == "connector_host.not_ready"


async def test_waiting_for_a_position_ends_when_it_is_folded_and_says_so_when_it_is_not(
    tables: Tables, log: Log
) -> None:
    log.accept("act_1")
    views = views_of(tables, log)
    await views.catch_up()
    assert await views.wait_for(log.events[-1].position, 5)
    log.accept("act_2")
    assert not await views.wait_for(log.events[-1].position, 0.05)
    reached: list[bool] = []

    async def wait() -> None:
        reached.append(await views.wait_for(log.events[-1].position, 10))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await views.advance()
    assert reached == [True]


async def test_unfinished_work_of_every_tenant_is_found_without_the_finished(tables: Tables, log: Log) -> None:
    for number in range(40):
        log.accept(f"act_{number}")
        log.settle(f"act_{number}", "cancelled", "action.cancelled")
    log.accept("act_open")
    log.tenant = "zeta"
    log.accept("act_open")
    views = views_of(tables, log)
    await views.catch_up()
    rows = await views.unfinished(ACTIONS)
    assert [(row.request.tenant, row.request.action_id) for row in rows] == [("acme", "act_open"), ("zeta", "act_open")]
    assert await views.unfinished(ACTIONS, rows[-1].position) == ()


@pytest.mark.proves("A127")
async def test_a_run_is_work_for_the_host_until_its_end_is_confirmed_and_its_events_were_heard(
    tables: Tables, log: Log
) -> None:
    for number in range(3):
        log.start(f"act_{number}", f"run_{number}")
    log.listen("run_1")
    log.frames("run_1", StreamClosed(at=log.tick(), number=1, reason="closed"))
    log.end("run_1", "completed", ("no_usage",))
    log.end("run_2")
    views = views_of(tables, log)
    await views.catch_up()
    assert [row.run.tie.run_id for row in await views.unfinished(RUNS)] == ["run_0", "run_2"]
    assert (await views.tally(RUNS, ACME, "reason")) == {"run_followed": 1, "run_ended_in_doubt": 1, "": 1}


async def test_views_in_memory_run_on_virtual_time_too() -> None:
    import trio

    log = Log()
    busy(log, 24)

    async def world() -> list[Any]:
        views = views_of(MemoryTables(), log)
        await views.catch_up()
        return await views.compare("actions") + await views.compare("runs")

    assert await anyio.to_thread.run_sync(trio.run, world) == []


async def test_a_follower_whose_journal_is_away_shows_it_and_goes_on_by_itself(tables: Tables, log: Log) -> None:
    class Away(Log):
        down = True
        asked = anyio.Event()
        again = False

        async def read_log(self, after: int, limit: int) -> Any:
            if self.down:
                if self.again:
                    self.asked.set()
                self.again = True
                raise HostError("storage.unavailable")
            return await super().read_log(after, limit)

    away = Away()
    away.accept("act_1")

    async def nothing_more(position: int, seconds: float) -> None:
        await anyio.sleep(0.01)

    views = views_of(tables, away, wait_beyond=nothing_more)
    async with anyio.create_task_group() as group:
        group.start_soon(views.run)
        with anyio.fail_after(10):
            await away.asked.wait()
        assert views.lag().failing == "storage.unavailable"
        assert views.lag().read_age_s is None
        away.down = False
        assert await views.wait_for(away.events[-1].position, 10)
        assert views.lag().failing == ""
        assert (views.lag().read_age_s or 0) < 5
        group.cancel_scope.cancel()


def test_a_cursor_says_nothing_readable_about_another_tenant() -> None:
    mine = make_cursor("actions", ACME, False, 41)
    theirs = make_cursor("actions", Filters(tenant="other"), False, 41)
    assert mine != theirs
    assert "acme" not in mine
