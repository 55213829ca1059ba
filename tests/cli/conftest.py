"""One host process on its own practice Hermes serves all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.host_process import HostProcess


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    folder = tmp_path_factory.mktemp("cli")
    with HostProcess(folder) as running:
        yield running
