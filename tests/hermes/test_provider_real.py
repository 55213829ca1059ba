"""The provider suite on the real Hermes Agent 0.19.0, with a scripted model behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest

from tests.contract.provider import ProviderContract
from tests.contract.provider_control import ControlContract
from tests.contract.wire import Differences, Wire, deletion, error_of, eventually
from tests.real_hermes import RealHermes
from tests.scripted_model import ScriptedModel

pytestmark = [pytest.mark.anyio, pytest.mark.real_hermes, pytest.mark.slow]
_DIFFERENCES = Differences(approval_timeout=4, keepalive=30, max_concurrent_runs=3, tool_outlives_kill=True)


class Real(RealHermes):
    """A real gateway whose effects are read from the disk."""

    differences = _DIFFERENCES

    def __init__(
        self,
        folder: Path,
        model: ScriptedModel,
        *,
        approval_timeout: int = 60,
        max_concurrent_runs: int = 10,
        times: dict[str, float] | None = None,
    ) -> None:
        super().__init__(
            folder / "home",
            model.base_url,
            approval_timeout=approval_timeout,
            max_concurrent_runs=max_concurrent_runs,
            times=times,
        )
        self.model = model
        self.folder = folder / "effects"
        self.folder.mkdir()

    def prepare(self, path: Path) -> None:
        path.mkdir()

    def carried_out(self, command: str) -> bool:
        verb, *_, path = command.split()
        return Path(path).exists() is (verb == "touch")


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder, limit = tmp_path_factory.mktemp("hermes"), _DIFFERENCES.max_concurrent_runs
    with (
        ScriptedModel() as model,
        Real(folder, model, approval_timeout=int(_DIFFERENCES.approval_timeout), max_concurrent_runs=limit) as real,
    ):
        # The first run of a process builds the agent on the event loop; no test should measure that.
        body = {"model": "hermes-agent", "messages": [{"role": "user", "content": "TEXT warm"}]}
        url = f"{real.base_url}/v1/chat/completions"
        httpx.post(url, json=body, headers=real.headers, timeout=60, trust_env=False).raise_for_status()
        yield real


class TestRealHermes(ProviderContract, ControlContract):
    """The suite on the real agent."""


@pytest.mark.proves("A038", "A039", "A042")
async def test_the_model_sees_the_history_and_the_prompt_of_the_request(provider: Real) -> None:
    items = [{"role": "user", "content": "earlier question"}, {"role": "assistant", "content": "earlier answer"}]
    wire = Wire(provider)
    async with wire.http:
        stored = (await wire.http.post("/v1/responses", json={"input": "TEXT stored", "store": True})).json()["id"]
        explicit = {"conversation_history": items, "previous_response_id": stored}
        for body in ({"input": [*items, {"role": "user", "content": "TEXT now"}]}, {"input": "TEXT now"} | explicit):
            answer = await wire.http.post("/v1/runs", json=body)
            assert (await wire.reaches(answer.json()["run_id"], "completed"))["output"] == "now"
            sent = [message for message in provider.model.requests[-1]["messages"] if message["role"] != "system"]
            told = [(message["role"], message["content"]) for message in sent]
            assert told[:2] == [("user", "earlier question"), ("assistant", "earlier answer")]
            assert (told[-1][0], len(told)) == ("user", 3)
            assert "TEXT now" in told[-1][1]


@pytest.mark.proves("A072", "A120", "A121", "A123", "A124", "A125")
async def test_streams_and_terminal_states_are_swept_and_control_is_not(tmp_path: Path) -> None:
    times = {"stream_retention": 1.0, "status_retention": 3.0, "sweep_every": 0.5}
    with ScriptedModel() as model, Real(tmp_path, model, times=times) as real:
        wire = Wire(real)
        async with wire.http:
            done = await wire.start("TEXT early")
            await wire.reaches(done, "completed")
            command = deletion(real, "swept")
            asking = await wire.start(f"TOOL {command}", "TEXT done")
            await wire.reaches(asking, "waiting_for_approval")

            async def no_status() -> bool:
                return (await wire.get(f"/v1/runs/{done}")).status_code == 404

            await eventually(no_status)
            assert error_of(await wire.get(f"/v1/runs/{asking}/events")) == (404, "run_not_found")
            assert (await wire.status(asking))["status"] == "waiting_for_approval"
            assert (await wire.decide(asking, "once")).status_code == 200
            await wire.reaches(asking, "completed")
            assert real.carried_out(command)


async def test_a_terminated_gateway_says_cancelled_and_still_finishes_the_turn(tmp_path: Path) -> None:
    with ScriptedModel() as model, Real(tmp_path, model) as real:
        wire = Wire(real)
        async with wire.http:
            run_id = await wire.start("SLEEP 2", "TEXT late", session_id="terminated")
            async with wire.reading(run_id) as reader:
                await eventually(lambda: _asked(model))
                await anyio.to_thread.run_sync(real.terminate)
                await reader.ends()
            assert reader.names == ["run.cancelled", ": stream closed"]
            await anyio.to_thread.run_sync(real.start)
            # The wire said cancelled, yet the old process finished the turn and stored it.
            assert [row["content"] for row in await wire.rows("terminated")] == ["SLEEP 2\nTEXT late", "late"]


async def _asked(model: ScriptedModel) -> bool:
    return bool(model.requests)
