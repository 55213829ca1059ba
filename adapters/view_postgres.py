"""Views kept in PostgreSQL: the statements of `adapters.view_tables.Tables`.

Every list names its tenant. A page, its size and its position are read in one snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import psycopg
from psycopg import sql
from psycopg_pool import ConnectionPool, PoolTimeout

from adapters.append_call import pinned
from adapters.bounded_connection import BoundedConnection
from adapters.view_tables import COUNTED, NARROW, Batch, Difference, Fault, Filters, Place
from domain.errors import NotNow
from domain.values import sha256
from projections import Facets

WAIT_S = 5.0
DIFFERENCES = 100
CELL_BYTES = 512
TABLES = ("view_places", "view_faults", "view_counts", "view_rows")

_Result = TypeVar("_Result")

ROW_COLUMNS = ("tenant", *COUNTED, *NARROW)
PUT_ROWS = f"""
insert into view_rows (view, generation, key, position, listed, {", ".join(ROW_COLUMNS)}, open, needed, at, doc)
select %s, %s, * from unnest(%s::text[], %s::bigint[], %s::boolean[], {", ".join(["%s::text[]"] * len(ROW_COLUMNS))},
    %s::boolean[], %s::boolean[], %s::timestamptz[], %s::bytea[])
on conflict (view, generation, key) do update set position = excluded.position, listed = excluded.listed,
    {", ".join(f"{name} = excluded.{name}" for name in ROW_COLUMNS)}, open = excluded.open, needed = excluded.needed,
    at = excluded.at, doc = excluded.doc
"""
PUT_COUNTS = f"""
insert into view_counts (view, generation, tenant, {", ".join(COUNTED)}, n)
select %s, %s, * from unnest(%s::text[], {", ".join(["%s::text[]"] * len(COUNTED))}, %s::bigint[])
on conflict (view, generation, tenant, state, principal, capability_id, endpoint_id, approval, reason, person)
    do update set n = view_counts.n + excluded.n
"""
LIVE = "select view, generation, version, position, read_at from view_places where live"
SAME_ROWS = " and ".join(
    f"a.{name} = b.{name}" for name in ("position", "listed", *ROW_COLUMNS, "open", "needed", "doc")
)
DIFFERENT_ROWS = f"""
select coalesce(a.key, b.key), a.position, b.position
from (select * from view_rows where view = %(view)s and generation = %(stored)s) a
full join (select * from view_rows where view = %(view)s and generation = %(fresh)s) b on a.key = b.key
where a.key is null or b.key is null or not ({SAME_ROWS} and a.at is not distinct from b.at)
order by 1 limit {DIFFERENCES}
"""
COUNT_COLUMNS = ", ".join(("tenant", *COUNTED))
DIFFERENT_COUNTS = f"""
select {COUNT_COLUMNS} from (
    select {COUNT_COLUMNS}, n from view_counts where view = %(view)s and generation = %(stored)s and n <> 0
    union all
    select {COUNT_COLUMNS}, -n from view_counts where view = %(view)s and generation = %(fresh)s and n <> 0
) as both_sides group by {COUNT_COLUMNS} having sum(n) <> 0 order by {COUNT_COLUMNS} limit {DIFFERENCES}
"""


class PostgresTables:
    """Tables in PostgreSQL, over a small pool of connections that are opened when first used and again when lost."""

    def __init__(self, dsn: str, *, schema: str = "public", connections: int = 4) -> None:
        self._pool = ConnectionPool(
            pinned(dsn, schema, "views"),
            connection_class=BoundedConnection,
            min_size=0,
            max_size=connections,
            open=False,
            timeout=WAIT_S,
            check=ConnectionPool.check_connection,
            reconnect_timeout=WAIT_S,
        )
        self._threads = anyio.CapacityLimiter(connections)

    async def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """As `Tables.call`, in a thread."""
        return await anyio.to_thread.run_sync(partial(function, *args), limiter=self._threads, abandon_on_cancel=True)

    async def close(self) -> None:
        """Close the connections."""
        await anyio.to_thread.run_sync(self._pool.close)

    @contextmanager
    def _work(self, isolation: psycopg.IsolationLevel | None = None) -> Iterator[psycopg.Connection]:
        try:
            self._pool.open()
            with self._pool.connection() as connection:
                connection.isolation_level = isolation
                yield connection
        except (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout) as error:
            raise NotNow("storage.unavailable", "The views cannot be reached.") from error

    def places(self) -> dict[str, Place]:
        """As `Tables.places`."""
        with self._work() as connection:
            return {row[0]: _place(row) for row in connection.execute(LIVE)}

    def open(self, view: str, version: int, live: bool) -> Place:
        """As `Tables.open`."""
        with self._work() as connection:
            connection.execute("select pg_advisory_xact_lock(hashtext('view_places'), hashtext(%s))", (view,))
            found = connection.execute(f"{LIVE} and view = %s", (view,)).fetchone()
            if live and found is not None:
                return _place(found)
            kept = found[1] if found is not None else 0
            for table in TABLES:
                connection.execute(
                    sql.SQL("delete from {} where view = %s and generation <> %s").format(sql.Identifier(table)),
                    (view, kept),
                )
            connection.execute(
                "insert into view_places (view, generation, version, live)"
                " select %s, coalesce(max(generation), 0) + 1, %s, %s from view_places where view = %s",
                (view, version, live, view),
            )
            row = connection.execute(
                "select view, generation, version, position, read_at from view_places where view = %s"
                " order by generation desc limit 1",
                (view,),
            ).fetchone()
            assert row is not None
            return _place(row)

    def swap(self, place: Place) -> bool:
        """As `Tables.swap`."""
        with self._work() as connection:
            found = connection.execute(
                "select generation, position, live from view_places where view = %s order by generation for update",
                (place.view,),
            ).fetchall()
            mine = [position for generation, position, _ in found if generation == place.generation]
            others = [(generation, position) for generation, position, live in found if live]
            if not mine or any(position > mine[0] for _, position in others):
                return False
            connection.execute("update view_places set live = false where view = %s and live", (place.view,))
            connection.execute(
                "update view_places set live = true where view = %s and generation = %s",
                (place.view, place.generation),
            )
        for generation, _ in others:
            if generation != place.generation:
                self.drop(msgspec.structs.replace(place, generation=generation))
        return True

    def drop(self, place: Place) -> None:
        """As `Tables.drop`."""
        with self._work() as connection:
            for table in TABLES:
                connection.execute(
                    sql.SQL("delete from {} where view = %s and generation = %s").format(sql.Identifier(table)),
                    (place.view, place.generation),
                )

    def docs(self, place: Place, keys: Sequence[str]) -> dict[str, bytes]:
        """As `Tables.docs`."""
        with self._work() as connection:
            rows = connection.execute(
                "select key, doc from view_rows where view = %s and generation = %s and key = any(%s)",
                (place.view, place.generation, list(keys)),
                binary=True,
            )
            return dict(rows.fetchall())

    def held(self, place: Place) -> list[Fault]:
        """As `Tables.held`."""
        with self._work() as connection:
            rows = connection.execute(
                "select history, version, position, topic, reason from view_faults"
                " where view = %s and generation = %s order by position",
                (place.view, place.generation),
            )
            return [Fault(history=h, version=v, position=p, topic=t, reason=r) for h, v, p, t, r in rows]

    def apply(self, batches: Sequence[Batch]) -> bool:
        """As `Tables.apply`. Its commit also makes what was read durable where acknowledged data must be."""
        with self._work() as connection:
            for batch in sorted(batches, key=lambda item: item.place.view):
                moved = connection.execute(
                    "update view_places set position = %s, read_at = %s"
                    " where view = %s and generation = %s and position = %s",
                    (batch.position, batch.at, batch.place.view, batch.place.generation, batch.place.position),
                )
                if moved.rowcount != 1:
                    connection.rollback()
                    return False
                _put(connection, batch)
        return True

    def one(self, view: str, key: str) -> tuple[Place, bytes | None] | None:
        """As `Tables.one`."""
        with self._work() as connection:
            row = connection.execute(
                "select p.view, p.generation, p.version, p.position, p.read_at, r.doc from view_places p"
                " left join view_rows r on r.view = p.view and r.generation = p.generation and r.key = %s"
                " where p.live and p.view = %s",
                (key, view),
                binary=True,
            ).fetchone()
            return (_place(row[:5]), row[5]) if row else None

    def page(
        self, view: str, filters: Filters, after: int | None, descending: bool, limit: int, sized: bool = True
    ) -> tuple[Place, list[tuple[int, bytes]], int] | None:
        """As `Tables.page`."""
        with self._work(psycopg.IsolationLevel.REPEATABLE_READ) as connection:
            found = connection.execute(f"{LIVE} and view = %s", (view,)).fetchone()
            if found is None:
                return None
            place = _place(found)
            where, given = _where(place, filters)
            edge = sql.SQL("")
            if after is not None:
                edge = sql.SQL(" and position < %(after)s") if descending else sql.SQL(" and position > %(after)s")
            order = sql.SQL("desc") if descending else sql.SQL("asc")
            rows = connection.execute(
                sql.SQL(
                    "select position, doc from view_rows where listed and {}{} order by position {} limit %(limit)s"
                ).format(where, edge, order),
                {**given, "after": after, "limit": limit},
                binary=True,
            ).fetchall()
            if not sized:
                return place, rows, 0
            count = (
                sql.SQL("select coalesce(sum(n), 0)::bigint from view_counts where {}")
                if filters.counted
                else sql.SQL("select count(*) from view_rows where listed and {}")
            )
            total = connection.execute(count.format(where), given).fetchone()
            return place, rows, int(total[0]) if total else 0

    def tally(self, view: str, filters: Filters, facet: str) -> dict[str, int]:
        """As `Tables.tally`."""
        with self._work(psycopg.IsolationLevel.REPEATABLE_READ) as connection:
            found = connection.execute(f"{LIVE} and view = %s", (view,)).fetchone()
            if found is None:
                return {}
            where, given = _where(_place(found), filters)
            source, counted = (
                (sql.SQL("view_counts where true"), sql.SQL("sum(n)::bigint"))
                if filters.counted
                else (sql.SQL("view_rows where listed"), sql.SQL("count(*)"))
            )
            rows = connection.execute(
                sql.SQL("select {0}, {1} from {2} and {3} group by {0} having {1} > 0").format(
                    sql.Identifier(facet), counted, source, where
                ),
                given,
            )
            return {value: int(count) for value, count in rows}

    def unfinished(self, view: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """As `Tables.unfinished`."""
        with self._work(psycopg.IsolationLevel.REPEATABLE_READ) as connection:
            found = connection.execute(f"{LIVE} and view = %s", (view,)).fetchone()
            if found is None:
                return []
            return connection.execute(
                "select position, doc from view_rows where view = %s and generation = %s and listed and open"
                " and position > %s order by position limit %s",
                (view, _place(found).generation, after, limit),
                binary=True,
            ).fetchall()

    def differences(self, place: Place, fresh: Place) -> list[Difference] | None:
        """As `Tables.differences`; the first hundred rows and counts."""
        both = {"view": place.view, "stored": place.generation, "fresh": fresh.generation}
        with self._work(psycopg.IsolationLevel.REPEATABLE_READ) as connection:
            places = connection.execute(
                "select position from view_places where view = %(view)s and generation in (%(stored)s, %(fresh)s)", both
            ).fetchall()
            if len(places) != 2 or places[0] != places[1]:
                return None
            rows = [
                Difference(
                    key=key,
                    kind="extra" if again is None else "missing" if stored is None else "changed",
                    stored_position=stored,
                    journal_position=again,
                )
                for key, stored, again in connection.execute(DIFFERENT_ROWS, both)
            ]
            counts = [Difference(key="/".join(key), kind="count") for key in connection.execute(DIFFERENT_COUNTS, both)]
            return rows + counts


def _place(row: Sequence[Any]) -> Place:
    view, generation, version, position, read_at = row
    return Place(view=view, generation=generation, version=version, position=position, read_at=read_at)


def _cell(text: str) -> str:
    """A facet as its column and its index can hold it. A text that is too long, or none for PostgreSQL, is told apart
    by its digest: callers and providers name sessions as they like."""
    data = text.encode("utf-8", "surrogatepass")
    fits = len(data) <= CELL_BYTES and "\0" not in text and data == text.encode("utf-8", "replace")
    return text if fits else f"sha256:{sha256(data)}"


def _where(place: Place, filters: Filters) -> tuple[sql.Composed, dict[str, Any]]:
    """The condition of a list, with its values; the tenant is always part of it."""
    given: dict[str, Any] = {"view": place.view, "generation": place.generation, "tenant": filters.tenant}
    parts: list[sql.Composable] = [sql.SQL("view = %(view)s and generation = %(generation)s and tenant = %(tenant)s")]
    for name, value in filters.equal.items():
        parts.append(sql.SQL("{} = {}").format(sql.Identifier(name), sql.Placeholder(name)))
        given[name] = _cell(value)
        if name in NARROW:
            parts.append(sql.SQL("{} <> ''").format(sql.Identifier(name)))
    parts += [sql.SQL("{} <> ''").format(sql.Identifier(name)) for name in filters.present]
    if filters.needed:
        parts.append(sql.SQL("needed"))
    if filters.since is not None:
        parts.append(sql.SQL("at >= %(since)s"))
        given["since"] = filters.since
    if filters.until is not None:
        parts.append(sql.SQL("at < %(until)s"))
        given["until"] = filters.until
    return sql.SQL(" and ").join(parts), given


def _put(connection: psycopg.Connection, batch: Batch) -> None:
    name = (batch.place.view, batch.place.generation)
    if batch.entries:
        facets = [entry.facets or Facets(tenant="", state="") for entry in batch.entries]
        connection.execute(
            PUT_ROWS,
            (
                *name,
                [entry.key for entry in batch.entries],
                [entry.position for entry in batch.entries],
                [entry.facets is not None for entry in batch.entries],
                *([_cell(getattr(item, column)) for item in facets] for column in ROW_COLUMNS),
                [item.open for item in facets],
                [item.needed for item in facets],
                [item.at for item in facets],
                [entry.doc for entry in batch.entries],
            ),
        )
    changes = {key: change for key, change in batch.counts.items() if change}
    if changes:
        columns = [list(column) for column in zip(*changes, strict=True)]
        connection.execute(PUT_COUNTS, (*name, *columns, list(changes.values())))
    for fault in batch.faults:
        connection.execute(
            "insert into view_faults (view, generation, history, version, position, topic, reason)"
            " values (%s, %s, %s, %s, %s, %s, %s) on conflict do nothing",
            (*name, fault.history, fault.version, fault.position, fault.topic, fault.reason),
        )
