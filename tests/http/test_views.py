"""Views over HTTP: what is known of runs and Actions, as of which position."""

from __future__ import annotations

from datetime import timedelta

import anyio
import httpx
import msgspec
import pytest

from adapters.http import PublicApp
from domain.values import rfc3339
from tests.http.stand import LOST, STOP, Stand, deltas, told

pytestmark = pytest.mark.anyio


@pytest.mark.proves("A063")
async def test_a_runs_view_tells_state_events_actions_and_result(host: Stand) -> None:
    action_id, run_id = await host.started()
    view = (await host.get(f"/views/runs/{run_id}")).json()
    assert view["state"] == "completed"
    assert view["actions"]["run_start"] == [action_id]
    assert view["events"]["by_kind"] == {"message.delta": 2, "run.completed": 1}
    assert view["result"] == {"output": "Hello world"}
    assert view["end"]["known"] is True
    assert view["as_of"]["position"] >= 1
    listed = (await host.get("/views/runs")).json()
    assert [run["run_id"] for run in listed["runs"]] == [run_id]
    assert listed["total_size"] == 1


async def test_a_handle_with_reserved_characters_is_addressed_percent_encoded(host: Stand) -> None:
    odd = "run/1 ä?#%2F"
    host.provider.answers = [told(202, {"run_id": odd, "status": "started"})]
    answer = (await host.submit()).json()["action_result"]
    status = (await host.get(f"/aip/v1/actions/{answer['action_id']}")).json()["action_status"]
    await host.views.catch_up()
    found = await host.get(status["links"]["run"])
    assert found.status_code == 200
    assert found.json()["run_id"] == odd
    assert (await host.get(status["links"]["run"] + "/events")).status_code == 200


async def test_lists_of_runs_filter_and_page(host: Stand) -> None:
    runs = [(await host.started())[1] for _ in range(3)]
    first = (await host.get("/views/runs", limit=2)).json()
    rest = (await host.get("/views/runs", limit=2, cursor=first["cursor"])).json()
    assert sorted(run["run_id"] for run in (*first["runs"], *rest["runs"])) == runs
    newest = (await host.get("/views/runs", limit=1, newest="true")).json()["runs"]
    assert len(newest) == 1
    later = rfc3339(host.clock.now() + timedelta(hours=1))
    assert (await host.get("/views/runs", since=later)).json()["runs"] == []
    assert (await host.get("/views/runs", until=later, state="completed")).json()["total_size"] == 3
    assert (await host.get("/views/runs", principal_id="bea")).json()["runs"] == []


async def test_a_reader_waits_for_its_own_write(host: Stand) -> None:
    answer = await host.submit()
    position = answer.headers["journal-position"]
    action_id = answer.json()["action_result"]["action_id"]
    view = await host.get(f"/views/actions/{action_id}", min_position=position)
    assert view.status_code == 200
    assert view.json()["as_of"]["position"] >= int(position)


async def test_a_position_that_is_not_reached_is_told_after_the_wait(host: Stand) -> None:
    ports = msgspec.structs.replace(host.ports, view_wait_s=0.05)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(PublicApp(ports)), base_url="http://host.test"
    ) as client:
        answer = await client.get(
            "/views/recovery", params={"min_position": 10_000_000}, headers={"Authorization": "Bearer ada"}
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "connector_host.not_ready")


@pytest.mark.proves("A136", "B016")
async def test_an_unknown_start_is_explained_with_its_one_next_step(host: Stand) -> None:
    host.provider.answers = [LOST]
    action_id = (await host.submit()).json()["action_result"]["action_id"]
    await host.views.catch_up()
    view = (await host.get(f"/views/actions/{action_id}")).json()
    assert (view["state"], view["effect"]) == ("unknown", "possible")
    assert all(fact["evidence"] for fact in view["facts_known"])
    assert view["facts_unknown"]
    assert view["next_step"]["do"]
    assert any("again" in text for text in view["must_not"])


@pytest.mark.proves("B040")
async def test_recovery_counts_agree_with_its_lists_and_the_start_summary_stands_beside_them(host: Stand) -> None:
    host.provider.answers = [LOST, LOST]
    await host.submit()
    await host.submit()
    host.provider.frames = lambda run_id: deltas(run_id, "x", end="")
    run_id = (await host.submit()).json()["action_result"]["output"]["run_id"]
    await host.submit(STOP, input={"run_id": run_id})
    await host.views.catch_up()
    view = (await host.get("/views/recovery")).json()
    counts = {group["reason"]: (group["count"], len(group["work"])) for group in view["groups"]}
    assert counts["outcome_unknown"] == (2, 2)
    assert counts["awaiting_approval"] == (1, 1)
    assert view["total"] == sum(count for count, _ in counts.values())
    assert view["unreadable_count"] == 0
    paged = (await host.get("/views/recovery", limit=1)).json()
    assert paged["total"] == view["total"]
    assert paged["actions_cursor"]
    again = (await host.get("/views/recovery", limit=1, actions_cursor=paged["actions_cursor"])).json()
    assert again["groups"]


async def test_needs_of_a_person_name_reason_and_decisions(host: Stand) -> None:
    host.provider.answers = [LOST]
    await host.submit()
    await host.views.catch_up()
    (need,) = (await host.get("/views/needs-person")).json()["needs_person"]
    assert need["reason"] == "outcome_unknown"
    assert need["decisions"] == ["look_at_endpoint", "wait"]


@pytest.mark.proves("A002", "A128")
async def test_views_answer_while_the_provider_is_away(host: Stand) -> None:
    action_id, run_id = await host.started()
    before = (await host.get(f"/views/runs/{run_id}")).json()
    sent = len(host.provider.sent)
    host.provider.hold = anyio.Event()

    async def away(*_: object) -> None:
        raise AssertionError("a view asked the provider")

    host.provider.read = away  # type: ignore[assignment,method-assign]
    after = (await host.get(f"/views/runs/{run_id}")).json()
    assert after == before | {"as_of": after["as_of"]}
    for path in ("/views/runs", f"/views/actions/{action_id}", "/views/recovery", "/views/needs-person"):
        assert (await host.get(path)).status_code == 200
    assert len(host.provider.sent) == sent


@pytest.mark.parametrize("limit", [1, 7, 1000])
async def test_the_audit_pages_through_everything_the_caller_may_see(host: Stand, limit: int) -> None:
    action_id, run_id = await host.started()
    await host.started("bea")
    await host.submit(who="weak")
    cursor, events = "", []
    for _ in range(200):
        page = (await host.get("/aip/v1/audit/events", limit=limit, cursor=cursor)).json()["audit_query_result"]
        events += page["events"]
        cursor = page.get("cursor", "")
        if not cursor:
            break
    positions = [event["data"]["position"] for event in events]
    assert positions == sorted(set(positions))
    expected = [item for item in await host.log() if "bea" not in item.history and item.history.startswith("acme/")]
    owned = {item.history for item in expected if item.history.split("/")[1] in ("act", "run", "str", "key")}
    assert {event["data"]["history"] for event in events} < owned
    assert {"action.accepted", "run.bound", "stream.frames_stored", "action.settled"} <= {e["action"] for e in events}
    every = (await host.get("/aip/v1/audit/events", "boss", limit=1000)).json()["audit_query_result"]["events"]
    assert {"audit.request_refused"} <= {event["action"] for event in every}
    mine = (await host.get("/aip/v1/audit/events", action_id=action_id)).json()["audit_query_result"]["events"]
    assert {event["data"]["history"] for event in mine} == {f"acme/act/{action_id}"}
    of_run = (await host.get("/aip/v1/audit/events", run_id=run_id)).json()["audit_query_result"]["events"]
    assert {event["data"]["history"].split("/")[1] for event in of_run} >= {"run", "str"}
    now = rfc3339(host.clock.now() + timedelta(hours=1))
    assert (await host.get("/aip/v1/audit/events", **{"from": now})).json()["audit_query_result"]["events"] == []
    by_bea = await host.get("/aip/v1/audit/events", "boss", principal_id="bea", limit=1000)
    assert {event["actor"]["id"] for event in by_bea.json()["audit_query_result"]["events"]} <= {
        "bea",
        "system:reconciler",
    }
