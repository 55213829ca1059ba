"""The contract of the journal on PostgreSQL and in memory."""

from __future__ import annotations

import pytest

from adapters.clock import SystemClock
from adapters.memory_journal import MemoryJournal
from tests.contract.journal import JournalContract

pytestmark = pytest.mark.anyio


@pytest.mark.postgres
class TestPostgres(JournalContract):
    """On the embedded server."""


class TestMemory(JournalContract):
    """In memory."""

    @pytest.fixture
    def journal(self) -> MemoryJournal:
        clock = SystemClock()
        return MemoryJournal(clock=clock, now=clock.now)


class TestMemoryOnTrio(TestMemory):
    """In memory, on the other event loop."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "trio"
