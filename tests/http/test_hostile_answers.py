"""A provider that writes what nobody can keep: each Action has its answer all the same, and the run is observed on."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from adapters.observer import GATHERED_BYTES, Inbox
from domain.provider import Exchange, RawFrame
from domain.stream import Received
from tests.http.stand import START, STATUS, Stand, sse, told

pytestmark = pytest.mark.anyio
WORDS = ("\ud800", "a\0b", "x" * 100_000, 10**30, 10**400, "<script>\r\nSet-Cookie: a=b\x1b[2J")
EACH_WORD = pytest.mark.parametrize("word", WORDS, ids=["surrogate", "nul", "long", "big", "bigger", "markup"])


async def answered(host: Stand, capability: str, answers: tuple[Exchange, ...] = (), **members: Any) -> dict[str, Any]:
    """The result of an Action, which comes in time."""
    host.provider.answers = list(answers)
    with anyio.fail_after(5):
        response = await host.submit(capability, **members)
    assert response.status_code == 200
    assert host.driver.in_flight == 0
    result: dict[str, Any] = response.json()["action_result"]
    return result


@EACH_WORD
async def test_a_word_beside_the_receipt_costs_no_receipt(host: Stand, word: Any) -> None:
    receipt = told(202, {"run_id": "run_1", "status": word})
    result = await answered(host, START, (receipt,))
    assert (result["status"], result["output"]["run_id"]) == ("completed", "run_1")


@EACH_WORD
async def test_a_code_that_cannot_be_kept_is_a_refusal_all_the_same(host: Stand, word: Any) -> None:
    result = await answered(host, START, (told(400, {"error": {"message": "no", "code": word}}),))
    assert (result["status"], result["error"]["effect"]) == ("failed", "none")


@EACH_WORD
async def test_a_status_is_read_whatever_else_it_says(host: Stand, word: Any) -> None:
    host.provider.status = {"status": "running", "session_id": word, "last_event": word, "updated_at": word}
    run_id = (await answered(host, START))["output"]["run_id"]
    result = await answered(host, STATUS, input={"run_id": run_id})
    assert (result["status"], result["output"]["status"]) == ("completed", "running")


@EACH_WORD
async def test_a_stream_is_stored_to_its_end_whatever_its_frames_say(host: Stand, word: Any) -> None:
    odd = {"seq": word, "choices": [word], "request_id": word, "resolved": word, "choice": word}
    host.provider.frames = lambda run_id: [
        sse({"event": "approval.request"} | odd),
        sse({"event": "approval.responded"} | odd),
        sse({"event": word}),
        sse({"event": "run.completed", "output": "done"}),
    ]
    run_id = (await host.started())[1]
    view = await host.get(f"/views/runs/{run_id}")
    assert view.json()["events"]["terminal"] == "completed"
    page = await host.get(f"/views/runs/{run_id}/events", limit=1000)
    assert page.status_code == 200
    assert "set-cookie" not in page.headers


async def test_frames_that_wait_are_bounded_in_bytes_for_they_become_one_event(host: Stand) -> None:
    inbox = Inbox(64)
    large = RawFrame(raw=b"x" * (GATHERED_BYTES // 2))

    async def fill() -> None:
        for number in range(5):
            await inbox.put(Received(at=host.clock.now(), frame=large, digest=str(number)))

    sizes = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fill)
        for _ in range(3):
            assert await inbox.gather(0.05)
            sizes.append(len(inbox.take()))
    assert sizes == [2, 2, 1]
