"""The provider suite on the real Hermes Agent 0.19.0, with a scripted model behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.contract.provider import ProviderContract
from tests.contract.provider_control import ControlContract
from tests.contract.wire import Differences
from tests.real_hermes import RealHermes
from tests.scripted_model import ScriptedModel

pytestmark = [pytest.mark.anyio, pytest.mark.real_hermes, pytest.mark.slow]
_DIFFERENCES = Differences(approval_timeout=4, keepalive=30, max_concurrent_runs=3, tool_outlives_kill=True)


class Real(RealHermes):
    """A real gateway whose effects are read from the disk."""

    differences = _DIFFERENCES

    def __init__(self, folder: Path, model_url: str) -> None:
        super().__init__(
            folder / "home",
            model_url,
            approval_timeout=int(_DIFFERENCES.approval_timeout),
            max_concurrent_runs=_DIFFERENCES.max_concurrent_runs,
        )
        self.folder = folder / "effects"
        self.folder.mkdir()

    def prepare(self, path: Path) -> None:
        path.mkdir()

    def carried_out(self, command: str) -> bool:
        verb, *_, path = command.split()
        return Path(path).exists() is (verb == "touch")


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with (
        ScriptedModel() as model,
        Real(tmp_path_factory.mktemp("hermes"), model.base_url) as real,
    ):
        # The first run of a process builds the agent on the event loop; no test should measure that.
        body = {"model": "hermes-agent", "messages": [{"role": "user", "content": "TEXT warm"}]}
        url = f"{real.base_url}/v1/chat/completions"
        httpx.post(url, json=body, headers=real.headers, timeout=60, trust_env=False).raise_for_status()
        yield real


class TestRealHermes(ProviderContract, ControlContract):
    """The suite on the real agent."""
