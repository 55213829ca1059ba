"""What another tenant or principal sees: exactly what it would see of an unknown id."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.http_routes import ROUTES
from tests.http.stand import APPROVAL, CANARY, EVENTS, START, STATUS, STOP, Stand, deltas

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    "/aip/v1/actions/{action_id}/cancel": {"reason": "x"},
    "/aip/v1/approvals/{approval_id}/decision": {"decision": "approved", "reason": "x"},
}
BY_ID = [route for route in ROUTES if "{" in route.path]
LISTS = [route for route in ROUTES if route.method == "GET" and "{" not in route.path]


async def objects(host: Stand) -> dict[str, str]:
    """One object of each kind, owned by ada of acme."""
    host.provider.frames = lambda run_id: deltas(run_id, f"said {CANARY}", end="")
    answer = (await host.submit()).json()["action_result"]
    run_id = answer["output"]["run_id"]
    waiting = (await host.submit(STOP, input={"run_id": run_id})).json()["action_result"]

    async def folded() -> bool:
        await host.views.catch_up()
        found = await host.get(f"/views/runs/{run_id}")
        return bool(found.status_code == 200 and found.json()["events"]["stored"])

    await host.until(folded)
    return {
        "action_id": answer["action_id"],
        "run_id": run_id,
        "approval_id": waiting["output"]["approval_id"],
        "delivery_id": "cb:1",
    }


UNKNOWN = {"action_id": "act_nobody", "run_id": "run_nobody", "approval_id": "appr_act_nobody", "delivery_id": "cb:9"}


def filled(path: str, ids: dict[str, str]) -> str:
    """The path with its ids."""
    for name, value in ids.items():
        path = path.replace("{" + name + "}", value)
    return path


@pytest.mark.parametrize("route", BY_ID, ids=lambda route: f"{route.method} {route.path}")
@pytest.mark.parametrize("who", ["zoe", "bea"])
@pytest.mark.parametrize("query", ["", "?follow=true"])
async def test_a_foreign_object_is_an_unknown_id(host: Stand, route: Any, who: str, query: str) -> None:
    ids = await objects(host)
    if query and not route.follows:
        query = ""
    if who == "bea" and "decision" in route.path:
        host.callers.people["bea"] = host.callers.people["weak"]
    body = BODIES.get(route.path)
    foreign = await host.call(route.method, filled(route.path, ids) + query, who, json=body)
    unknown = await host.call(route.method, filled(route.path, UNKNOWN) + query, who, json=body)
    assert foreign.status_code == unknown.status_code in (404, 403)
    assert foreign.text == unknown.text
    assert CANARY not in foreign.text
    assert {name for name in foreign.headers if name != "content-length"} == {
        name for name in unknown.headers if name != "content-length"
    }
    assert len(host.provider.sent) == 1


@pytest.mark.parametrize("route", LISTS, ids=lambda route: route.path)
@pytest.mark.parametrize("who", ["zoe", "bea"])
async def test_lists_hold_nothing_of_others(host: Stand, route: Any, who: str) -> None:
    ids = await objects(host)
    answer = await host.get(route.path, who)
    assert answer.status_code == 200
    for value in (ids["action_id"], CANARY, '"ada"'):
        assert value not in answer.text
    own = await host.get(route.path, "boss")
    assert own.status_code == 200


@pytest.mark.parametrize("capability", [STATUS, EVENTS, STOP, APPROVAL])
@pytest.mark.parametrize("who", ["zoe", "boss-of-other", "bea"])
async def test_a_foreign_run_is_addressed_by_no_operation(host: Stand, capability: str, who: str) -> None:
    ids = await objects(host)
    host.callers.people["boss-of-other"] = host.callers.people["zoe"]
    before = len(host.provider.sent)
    given = {"run_id": ids["run_id"], "choice": "once", "reviewed": "a"}
    foreign = await host.submit(capability, who, input=given)
    unknown = await host.submit(capability, who, input=given | {"run_id": "run_nobody"})
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text == unknown.text
    assert len(host.provider.sent) == before


async def test_the_same_key_and_id_in_two_tenants_are_two_actions(host: Stand) -> None:
    one = await host.submit(START, "ada", id="act_same", idempotency_key="k")
    two = await host.submit(START, "zoe", id="act_same", idempotency_key="k")
    assert one.json()["action_result"]["output"]["run_id"] == "run_1"
    assert two.json()["action_result"]["output"]["run_id"] == "run_2"


async def test_cursors_of_one_tenant_open_nothing_in_another(host: Stand) -> None:
    ids = await objects(host)
    mine = (await host.get(f"/aip/v1/actions/{ids['action_id']}/events")).json()["action_events"]["cursor"]
    lists = {
        "/aip/v1/audit/events": (await host.get("/aip/v1/audit/events", limit=1)).json()["audit_query_result"][
            "cursor"
        ],
        "/views/needs-person": (await host.get("/views/needs-person")).json()["follow_cursor"],
    }
    other = (await host.submit(START, "zoe", id=ids["action_id"])).json()["action_result"]["action_id"]
    stolen = await host.get(f"/aip/v1/actions/{other}/events", "zoe", cursor=mine)
    assert stolen.json()["error"]["code"] == "query.invalid_cursor"
    for path, cursor in lists.items():
        assert (await host.get(path, "zoe", cursor=cursor)).json()["error"]["code"] == "query.invalid_cursor"


async def test_an_endpoint_of_another_tenant_is_not_discovered(host: Stand) -> None:
    ada = (await host.get("/aip/v1/manifest")).json()
    zoe = (await host.get("/aip/v1/manifest", "zoe")).json()
    assert ada["compatibility"]["endpoints"] == ["main"]
    assert zoe["compatibility"]["endpoints"] == ["main", "theirs"]
    assert len((await host.get("/aip/v1/capabilities")).json()["capabilities"]) == 5


async def test_a_holder_of_the_any_scope_reads_what_others_of_the_tenant_own(host: Stand) -> None:
    ids = await objects(host)
    for route in BY_ID:
        if route.method == "GET" and "delivery" not in route.path:
            assert (await host.get(filled(route.path, ids), "boss")).status_code == 200, route.path
