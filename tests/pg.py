"""One embedded PostgreSQL for a whole test session, and a fresh database for each test.

A `conftest.py` that wants them says `from tests.pg import dsn, postgres_server`.
"""

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from adapters.postgres import EmbeddedPostgres

_numbers = itertools.count(1)


def until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    """Wait for `condition`, and fail when it does not come true."""
    tick = threading.Event()
    for _ in range(int(limit_s / 0.01)):
        if condition():
            return
        tick.wait(0.01)
    pytest.fail("the condition did not come true in time")


@contextmanager
def state_folder() -> Iterator[Path]:
    """A short-named folder for server state that every account may pass, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hermes-test-"))
    folder.chmod(0o711)
    try:
        yield folder / "state"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def shared_server(*, fsync: bool = False) -> Iterator[EmbeddedPostgres]:
    """A running server in a folder of its own. Durability tests pass `fsync=True`."""
    with state_folder() as state, EmbeddedPostgres(state, fsync=fsync) as server:
        yield server


def fresh_database(server: EmbeddedPostgres) -> str:
    """Create an empty database and return its connection string (about 25 ms)."""
    name = f"test_{next(_numbers)}"
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return make_conninfo(server.dsn, dbname=name)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[EmbeddedPostgres]:
    """The session's server, without fsync."""
    with shared_server() as server:
        yield server


@pytest.fixture
def dsn(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    """The connection string of a database that is this test's alone; dropped afterwards, sessions and all."""
    fresh = fresh_database(postgres_server)
    yield fresh
    with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
        name = sql.Identifier(psycopg.conninfo.conninfo_to_dict(fresh)["dbname"])
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))
