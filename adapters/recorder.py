"""Reading the journal, through eventsourcing's recorder on the same table.

`JournalRecorder` is the library's application recorder with text ids: it selects, subscribes and inserts as the library
does, under the same two locks as `append_events`, so that its writers and ours stand in one line without a table lock
that vacuum or an index build would meet. The reads of the journal are added to it. It makes no table: migrations do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eventsourcing.persistence import ApplicationRecorder, Subscription
from eventsourcing.postgres import PostgresApplicationRecorder, PostgresDatastore, PostgresSubscription
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow
from psycopg.sql import SQL, Composed, Identifier

from adapters.append_call import pinned
from adapters.bounded_connection import BoundedConnection
from adapters.command import Stored

APPEND_LOCK = 1751478637
POLL_S = 2.0
PAGE_HISTORIES = 500


def datastore(dsn: str, *, schema: str, connections: int = 4, timeout_s: float = 5.0) -> PostgresDatastore:
    """A pool of at most `connections` for the recorder on `dsn`; nothing is taken from the process environment."""
    parts = conninfo_to_dict(pinned(dsn, schema, "journal-reader"))
    store = PostgresDatastore(
        dbname=str(parts.pop("dbname", "") or ""),
        host=str(parts.pop("host", "") or ""),
        port=str(parts.pop("port", "") or "5432"),
        user=str(parts.pop("user", "") or ""),
        password=str(parts.pop("password", "") or ""),
        connect_timeout=timeout_s,
        pool_size=1,
        max_overflow=connections - 1,
        pre_ping=True,
        schema=schema,
        originator_id_type="text",
    )
    store.pool.connection_class = BoundedConnection
    if isinstance(store.pool.kwargs, dict):
        store.pool.kwargs.update(parts)
        for name in ("host", "password", "user", "dbname"):
            if not store.pool.kwargs[name]:
                del store.pool.kwargs[name]
    return store


class JournalRecorder(PostgresApplicationRecorder):
    """The library's recorder on the journal's table. Calls block: run them in worker threads."""

    def __init__(self, datastore: PostgresDatastore, *, events_table_name: str = "stored_events") -> None:
        """Raises `ValueError` where the library's database functions are on: they append without any lock."""
        if datastore.enable_db_functions:
            raise ValueError(
                "POSTGRES_ENABLE_DB_FUNCTIONS must be off: its appends take no lock, followers miss events"
            )
        super().__init__(datastore, events_table_name=events_table_name)
        table = SQL("{}.{}").format(Identifier(datastore.schema), Identifier(events_table_name))
        self.lock_table_statements = [
            SQL("SET LOCAL lock_timeout = '{0}s'").format(datastore.lock_timeout),
            SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(table),
            SQL("SELECT pg_advisory_xact_lock({}, {}::regclass::oid::integer)").format(APPEND_LOCK, table.as_string()),
        ]
        rows = SQL("SELECT originator_id, originator_version, topic, state, notification_id FROM {}").format(table)
        self._history = rows + SQL(" WHERE originator_id = %s AND originator_version > %s ORDER BY originator_version")
        self._histories = rows + SQL(" WHERE originator_id = ANY(%s) ORDER BY originator_id, originator_version")
        self._log = rows + SQL(" WHERE notification_id > %s ORDER BY notification_id LIMIT %s")

    def create_table(self) -> None:
        """Learn the row type; the table itself is made by the migrations."""
        self.datastore.register_type_adapters()

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> Subscription[ApplicationRecorder]:
        """The library's subscription, reading again at least every two seconds whether notified or not."""
        return PollingSubscription(recorder=self, gt=gt, topics=topics)

    def history(self, history: str, after: int = 0) -> list[Stored]:
        """Rows of one history with a higher version than `after`."""
        return self._rows(self._history, (history, after))

    def histories(self, names: Sequence[str]) -> dict[str, list[Stored]]:
        """Rows of each history named; an unknown one has none."""
        found: dict[str, list[Stored]] = {name: [] for name in names}
        wanted = list(found)
        for start in range(0, len(wanted), PAGE_HISTORIES):
            for row in self._rows(self._histories, (wanted[start : start + PAGE_HISTORIES],)):
                found[row.history].append(row)
        return found

    def log(self, after_position: int, limit: int) -> list[Stored]:
        """At most `limit` rows with a higher notification id than `after_position`, in commit order."""
        return self._rows(self._log, (after_position, limit))

    def last_position(self) -> int:
        """The highest notification id; 0 for an empty journal."""
        return self.max_notification_id() or 0

    def _rows(self, statement: Composed, parameters: tuple[Any, ...]) -> list[Stored]:
        with self.datastore.get_connection() as connection, connection.cursor(binary=True) as cursor:
            cursor.execute(statement, parameters, prepare=True)
            return [_stored(row) for row in cursor.fetchall()]


class PollingSubscription(PostgresSubscription):
    """Sees what is committed between its first read and its LISTEN, and what a silent connection hides."""

    def _loop_on_pull(self) -> None:
        try:
            self._pull()
            while not self._has_been_stopped:
                self._has_been_notified.wait(POLL_S)
                self._pull()
        except BaseException as error:  # noqa: BLE001 - the reader of the subscription is told
            if self._thread_error is None:
                self._thread_error = error
            self.stop()


def _stored(row: DictRow) -> Stored:
    return Stored(
        history=row["originator_id"],
        version=row["originator_version"],
        topic=row["topic"],
        state=bytes(row["state"]),
        position=row["notification_id"],
    )
