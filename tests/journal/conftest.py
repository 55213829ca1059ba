"""Journals on the session's server, each in a database of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from adapters.clock import SystemClock
from adapters.journal import Journal
from adapters.migrate import migrate
from tests.pg import dsn, postgres_server

__all__ = ["dsn", "postgres_server"]


@pytest.fixture
def database(dsn: str) -> str:
    """A migrated database."""
    migrate(dsn)
    return dsn


@pytest.fixture
async def journal(database: str) -> AsyncIterator[Journal]:
    """A started journal."""
    started = Journal(database, clock=SystemClock())
    await started.start()
    yield started
    await started.stop()
