"""The provider suite on the practice Hermes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.practice_hermes import PracticeHermes, PracticeOptions
from tests.contract.provider import ProviderContract
from tests.contract.provider_control import ControlContract
from tests.contract.wire import Differences

pytestmark = pytest.mark.anyio
_DIFFERENCES = Differences(approval_timeout=0.5, keepalive=0.3, max_concurrent_runs=3, tool_outlives_kill=False)
_OPTIONS = PracticeOptions(
    max_concurrent_runs=_DIFFERENCES.max_concurrent_runs,
    approval_timeout=_DIFFERENCES.approval_timeout,
    keepalive=_DIFFERENCES.keepalive,
    approval_stop_delay=0.2,
)


class Practice(PracticeHermes):
    """A practice provider whose effects are read from its ledger."""

    differences = _DIFFERENCES

    def __init__(self, state_file: Path) -> None:
        super().__init__(state_file=state_file, options=_OPTIONS)
        self.folder = Path("/practice")

    def prepare(self, path: Path) -> None:
        """Nothing exists here but the ledger."""

    def carried_out(self, command: str) -> bool:
        return any(effect.command == command for effect in self.ledger().effects)


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practice]:
    with Practice(tmp_path_factory.mktemp("practice") / "state.jsonl") as practice:
        yield practice


class TestPracticeHermes(ProviderContract, ControlContract):
    """The suite on the practice provider."""
