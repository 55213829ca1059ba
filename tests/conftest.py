"""What every test shares: asynchronous tests run on asyncio unless they say trio."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of asynchronous tests; a test on virtual time overrides it."""
    return "asyncio"
