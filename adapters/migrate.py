"""Schema migrations: numbered SQL files, each applied once, in order, in a transaction of its own.

A file is named `NNN_subject.sql`. Applying takes an advisory lock, so hosts that start together apply each file once.
The checksum of an applied file is kept; a file that changed afterwards is refused, because the schema it made is no
longer the one it describes. A file only adds what the release before it can live beside.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec
import psycopg
from psycopg import sql

FOLDER = Path(__file__).parent / "sql"
LOCK = 1751478638
NAME = re.compile(r"(\d{3})_[a-z0-9_]+\.sql")


class MigrationRefused(Exception):
    """The stored schema and the migration files contradict each other; nothing was changed."""


class Migration(msgspec.Struct, frozen=True):
    """One migration file: its number, file name, SHA-256 of its bytes in hex, and its text ("" when read back)."""

    number: int
    name: str
    checksum: str
    text: str = ""


def available(folder: Path = FOLDER) -> list[Migration]:
    """The migration files of `folder` by number; refused unless numbers run from 1 without gap or repetition."""
    found = []
    for path in sorted(folder.glob("*.sql")):
        match = NAME.fullmatch(path.name)
        if match is None:
            raise MigrationRefused(f"{path.name} is not named NNN_subject.sql")
        data = path.read_bytes()
        found.append(Migration(int(match[1]), path.name, hashlib.sha256(data).hexdigest(), data.decode()))
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise MigrationRefused("migration numbers must run from 001 without a gap or a repetition")
    return found


def migrate(dsn: str, *, schema: str | None = None, folder: Path = FOLDER) -> list[Migration]:
    """Apply what is missing and return what was applied now.

    `schema` (default: the connection's current schema) is made when it does not exist. Raises `MigrationRefused` when
    an applied file changed or is gone while a later one is here, and `psycopg.Error` when a file fails; a file that
    fails leaves no trace. A schema that is newer than these files is left alone. Where nothing
    is missing, a role that may only read `schema_migrations` will do.
    """
    files = available(folder)
    done: list[Migration] = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for migration in files:
            with connection.transaction():
                connection.execute("select pg_advisory_xact_lock(%s)", (LOCK,))
                _enter(connection, schema)
                if _is_applied(migration, _stored(connection)):
                    continue
                connection.execute(migration.text.encode())
                connection.execute(
                    "insert into schema_migrations (number, name, checksum) values (%s, %s, %s)",
                    (migration.number, migration.name, migration.checksum),
                )
                done.append(migration)
    return done


def applied(dsn: str, *, schema: str | None = None) -> list[Migration]:
    """The migrations that the schema has, by number; empty for a schema that was never migrated."""
    with psycopg.connect(dsn, autocommit=True) as connection, connection.transaction():
        if schema is not None:
            _search(connection, schema)
        (table,) = connection.execute("select to_regclass('schema_migrations')").fetchone() or (None,)
        return _stored(connection) if table is not None else []


def _enter(connection: psycopg.Connection, schema: str | None) -> None:
    if schema is None:
        (schema,) = connection.execute("select current_schema()").fetchone() or (None,)
        if schema is None:
            raise MigrationRefused("the connection's search path names no schema that exists")
    if connection.execute("select from pg_namespace where nspname = %s", (schema,)).fetchone() is None:
        connection.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
    _search(connection, schema)
    if connection.execute("select to_regclass('schema_migrations')").fetchone() == (None,):
        connection.execute(
            "create table schema_migrations ("
            "number integer primary key, name text not null, checksum text not null, "
            "applied_at timestamptz not null default clock_timestamp())"
        )


def _search(connection: psycopg.Connection, schema: str) -> None:
    connection.execute(sql.SQL("set local search_path to {}, pg_temp").format(sql.Identifier(schema)))


def _stored(connection: psycopg.Connection) -> list[Migration]:
    rows = connection.execute("select number, name, checksum from schema_migrations order by number").fetchall()
    return [Migration(*row) for row in rows]


def _is_applied(migration: Migration, stored: list[Migration]) -> bool:
    for other in stored:
        if other.number == migration.number:
            if other.checksum != migration.checksum:
                raise MigrationRefused(f"{migration.name} changed after it was applied as {other.name}")
            return True
    if any(other.number > migration.number for other in stored):
        raise MigrationRefused(f"{migration.name} is missing below migrations that are applied")
    return False
