"""A durable server for the module, and a site on a database of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adapters.postgres import EmbeddedPostgres
from tests.pg import shared_server
from tests.process.site import Site, site


@pytest.fixture(scope="module")
def durable_server() -> Iterator[EmbeddedPostgres]:
    """A server that writes through to the disk."""
    with shared_server(fsync=True) as server:
        yield server


@pytest.fixture
def place(durable_server: EmbeddedPostgres) -> Iterator[Site]:
    """A site with a running practice Hermes."""
    with site(durable_server) as opened:
        yield opened
