"""Submitting and reading Actions over HTTP."""

from __future__ import annotations

import pytest

from tests.http.stand import START, Stand

pytestmark = pytest.mark.anyio


async def test_a_sync_start_answers_with_the_receipt(host: Stand) -> None:
    answer = await host.submit()
    assert answer.status_code == 200, answer.text
    result = answer.json()["action_result"]
    assert result["status"] == "completed"
    assert answer.json()["settled"] is True
    assert result["output"]["run_id"] == "run_1"
    assert result["output"]["status"] == "started"
    action_id = result["action_id"]
    assert answer.headers["location"] == f"/aip/v1/actions/{action_id}"
    status = (await host.get(f"/aip/v1/actions/{action_id}")).json()["action_status"]
    assert status["state"] == "completed"
    assert status["capability_id"] == START
    again = (await host.get(f"/aip/v1/actions/{action_id}/result")).json()
    assert again["action_result"] == result
