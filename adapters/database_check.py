"""What the journal requires of its database, looked at once at start; a database that lacks any of it is refused.

Each requirement keeps an acknowledged event where it is: written through to the disk, whole pages, noticed when it
rots, never pretended after a failed sync; and each append honest, with locks that the followers' order rests on.
"""

from __future__ import annotations

from collections.abc import Mapping

import psycopg

from adapters.append_call import PINNED, pinned

OLDEST = 170000
SETTINGS = {
    "fsync": ("on",),
    "full_page_writes": ("on",),
    "data_checksums": ("on",),
    "data_sync_retry": ("off",),
    "synchronous_commit": ("on", "remote_apply"),
    "default_transaction_read_only": ("off",),
}
DB_FUNCTIONS = "POSTGRES_ENABLE_DB_FUNCTIONS"
TRUE = ("1", "t", "true", "y", "yes", "on")
PROBE = 1751478639
CHANGES = "UPDATE, DELETE, TRUNCATE"


class DatabaseRefused(Exception):
    """The database cannot keep what is promised; `faults` lists every reason, none with a secret in it."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def check_database(
    dsn: str,
    *,
    schema: str = "public",
    environ: Mapping[str, str],
    standby: bool = False,
    restricted: bool = False,
) -> bool:
    """Raise `DatabaseRefused` unless the database is fit; `psycopg.Error` when it cannot be asked.

    True if a synchronous standby is named, so that what was only read has to be confirmed before it is told.

    `environ` is the environment in which eventsourcing's own factories would run. With `standby` a synchronous standby
    must be named; with `restricted` the role may not change events. Both are for databases that others run.
    """
    faults = [f"{DB_FUNCTIONS} must be off"] if environ.get(DB_FUNCTIONS, "").lower() in TRUE else []
    with (
        psycopg.connect(dsn, autocommit=True, application_name="database-check") as plain,
        psycopg.connect(dsn, autocommit=True, application_name="database-check") as other,
    ):
        version = plain.info.server_version
        if version < OLDEST:
            raise DatabaseRefused([*faults, f"PostgreSQL 17 or newer is needed, this is {version // 10000}"])
        for name, fit in SETTINGS.items():
            value = _one(plain, "select current_setting(%s)", name)
            if value not in fit:
                faults.append(f"{name} must be {fit[0]}, it is {value}")
        if _one(plain, "select pg_is_in_recovery()"):
            faults.append("this is a standby, not the primary")
        named = bool(_one(plain, "select current_setting('synchronous_standby_names')"))
        if standby and not named:
            faults.append("synchronous_standby_names must name a standby")
        if not is_one_session(plain, other):
            faults.append(
                "connections must be direct or pooled by session: this pooler changes sessions between queries"
            )
    with psycopg.connect(pinned(dsn, schema, "database-check"), autocommit=True) as own:
        if _one(own, "select to_regclass('stored_events')") is None:
            faults.append("the schema is not migrated")
        elif restricted and _one(own, "select has_table_privilege('stored_events', %s)", CHANGES):
            faults.append(f"the role must not have any of {CHANGES} on events")
        if _one(own, "select current_setting('transaction_timeout')") != PINNED["transaction_timeout"]:
            faults.append("this pooler drops what a session asks for: set transaction_timeout = '5s' for the role")
    if faults:
        raise DatabaseRefused(faults)
    return named


def is_one_session(first: psycopg.Connection, second: psycopg.Connection) -> bool:
    """True when each connection keeps a session of its own: what the first locks, the second cannot lock."""
    if not _one(first, "select pg_try_advisory_lock(%s, pg_backend_pid())", PROBE):
        return False
    held_by = _one(first, "select pg_backend_pid()")
    try:
        return not _one(second, "select pg_try_advisory_lock(%s, %s)", PROBE, held_by)
    finally:
        first.execute("select pg_advisory_unlock_all()")
        second.execute("select pg_advisory_unlock_all()")


def _one(connection: psycopg.Connection, query: str, *parameters: object) -> object:
    row = connection.execute(query.encode(), parameters or None).fetchone()
    return None if row is None else row[0]
