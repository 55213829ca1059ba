"""A database that cannot keep what is promised is refused, with every reason."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from adapters.database_check import DatabaseRefused, check_database, is_one_session
from adapters.migrate import migrate
from adapters.postgres import EmbeddedPostgres
from tests.pg import fresh_database, shared_server

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def durable_server() -> Iterator[EmbeddedPostgres]:
    with shared_server(fsync=True) as server:
        yield server


@pytest.fixture
def durable(durable_server: EmbeddedPostgres) -> str:
    dsn = fresh_database(durable_server)
    migrate(dsn)
    return dsn


def faults(dsn: str, **options: object) -> list[str]:
    """Why the database is refused."""
    with pytest.raises(DatabaseRefused) as refused:
        check_database(dsn, environ={}, **options)  # type: ignore[arg-type]
    return refused.value.faults


def test_the_embedded_server_is_fit(durable: str) -> None:
    check_database(durable, environ={"POSTGRES_ENABLE_DB_FUNCTIONS": "no"})


def test_a_server_without_fsync_is_refused(database: str) -> None:
    assert faults(database) == ["fsync must be on, it is off"]


def test_every_reason_is_told(durable_server: EmbeddedPostgres) -> None:
    dsn = fresh_database(durable_server)
    bad = make_conninfo(dsn, options="-c synchronous_commit=off -c default_transaction_read_only=on")
    found = faults(bad, standby=True)
    assert [fault.split()[0] for fault in found] == [
        "synchronous_commit",
        "default_transaction_read_only",
        "synchronous_standby_names",
        "the",
    ]


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_database_functions_of_the_library_are_refused(durable: str, value: str) -> None:
    with pytest.raises(DatabaseRefused, match="POSTGRES_ENABLE_DB_FUNCTIONS"):
        check_database(durable, environ={"POSTGRES_ENABLE_DB_FUNCTIONS": value})


def test_a_role_that_can_change_events_is_refused_where_asked(durable: str) -> None:
    assert faults(durable, restricted=True) == ["the role must not have any of UPDATE, DELETE, TRUNCATE on events"]
    with psycopg.connect(durable, autocommit=True) as connection:
        connection.execute("create role watched login in role hermes_application")
    check_database(make_conninfo(durable, user="watched"), environ={}, restricted=True)


def test_connections_that_share_a_session_are_told_from_those_that_do_not(durable: str) -> None:
    with psycopg.connect(durable, autocommit=True) as first, psycopg.connect(durable, autocommit=True) as second:
        assert is_one_session(first, second)
        assert not is_one_session(first, first)
