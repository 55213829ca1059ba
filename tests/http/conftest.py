"""Every test of this suite has a fresh host in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.http.stand import Stand, stand


@pytest.fixture
async def host(anyio_backend: str) -> AsyncIterator[Stand]:
    """A host behind its public listener."""
    async with stand() as ready:
        yield ready
