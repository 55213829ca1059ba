"""Fresh migrated databases on the session's server, as many as a test asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from adapters.migrate import migrate
from adapters.postgres import EmbeddedPostgres
from tests.pg import fresh_database, postgres_server

__all__ = ["postgres_server"]

Databases = Callable[[], AbstractContextManager[str]]


@pytest.fixture(scope="session")
def databases(postgres_server: EmbeddedPostgres) -> Databases:
    """Gives a block a migrated database of its own, a copy of one that was migrated once."""
    template = fresh_database(postgres_server)
    migrate(template)
    pattern, numbers = conninfo_to_dict(template)["dbname"], count(1)

    @contextmanager
    def database() -> Iterator[str]:
        name = f"crash_{next(numbers)}"
        with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(str(pattern)))
            )
        try:
            yield make_conninfo(postgres_server.dsn, dbname=name)
        finally:
            with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    return database
