"""The published document and the reference pages agree with what the server does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate

from adapters.http_openapi import document
from adapters.http_reference import errors_page, routes_page
from adapters.http_route import Route, errors_of
from adapters.http_routes import ROUTES
from domain.errors import TABLE
from tests.http.stand import APPROVAL, EVENTS, LOST, START, STATUS, STOP, Stand, deltas, stand

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]

# Codes that a caller reads elsewhere than in a refusal by this listener.
INSIDE_RESULTS = {
    "action.cancelled", "action.expired", "policy.approval_not_granted", "policy.human_approval_required",
    "approval.review_required", "approval.not_oldest", "approval.not_pending", "approval.choice_not_offered",
    "approval.provider_timeout", "approval.already_decided", "approval.after_stop", "run.already_terminal",
}  # fmt: skip
OF_OTHER_BOUNDARIES = {
    "settings.invalid", "settings.secret_file", "storage.unsuitable", "host.owned_elsewhere", "lease.expired",
    "binding.endpoint_mismatch", "binding.run_id_reused", "history.conflict", "private.erased", "stream.cursor_expired",
}  # fmt: skip
EVERYWHERE = {"request.route_not_found", "request.method_not_allowed"}


def test_the_document_is_valid_and_names_every_route() -> None:
    told = document(ROUTES)
    validate(told)
    assert {(method.upper(), path) for path, item in told["paths"].items() for method in item} == {
        (route.method, route.path) for route in ROUTES
    }
    assert len({item["operationId"] for path in told["paths"].values() for item in path.values()}) == len(ROUTES)


def test_every_code_has_a_place_where_a_caller_meets_it() -> None:
    told = {code for route in ROUTES for code in errors_of(route)}
    assert told <= set(TABLE)
    provider = {code for code in TABLE if code.startswith("connector.hermes_agent.")}
    assert set(TABLE) - told - provider == INSIDE_RESULTS | OF_OTHER_BOUNDARIES | EVERYWHERE


@pytest.mark.parametrize(("name", "page"), [("docs/errors.md", errors_page), ("docs/routes.md", routes_page)])
def test_the_reference_pages_say_what_the_tables_say(name: str, page: Any) -> None:
    assert (ROOT / name).read_text() == page(), f"{name} is stale; run scripts/docs"


async def test_the_document_is_served_without_a_token(host: Stand) -> None:
    answer = await host.call("GET", "/openapi.json", "")
    assert answer.status_code == 200
    assert answer.json() == msgspec.to_builtins(document(ROUTES))


# ---- answers have the shapes that are published ----------------------------------------------------------------------


class Objects(msgspec.Struct):
    """Ids of a host with some work."""

    action_id: str
    run_id: str
    approval_id: str
    delivery_id: str = "cb:1"


async def worked(host: Stand) -> Objects:
    """A host with a finished, an unknown and a waiting Action, and a run that was read."""
    action_id, run_id = await host.started()
    await host.submit(EVENTS, input={"run_id": run_id})
    await host.submit(STATUS, input={"run_id": run_id})
    host.provider.answers = [LOST]
    await host.submit()
    host.provider.frames = lambda run: deltas(run, "x", end="")
    other = (await host.submit()).json()["action_result"]["output"]["run_id"]
    waiting = await host.submit(STOP, input={"run_id": other})
    await host.views.catch_up()
    return Objects(action_id, run_id, waiting.json()["action_result"]["output"]["approval_id"])


@pytest.mark.parametrize("route", [r for r in ROUTES if r.method == "GET"], ids=lambda route: route.path)
@pytest.mark.parametrize("who", ["boss", "ada", "bea"])
async def test_every_answer_has_its_published_shape(host: Stand, route: Route, who: str) -> None:
    ids = await worked(host)
    path = re.sub(r"\{(\w+)\}", lambda found: str(getattr(ids, found[1])), route.path)
    answer = await host.get(path, who)
    kinds = {**route.answers, 404: None}
    assert answer.status_code in kinds
    if answer.status_code == 200:
        msgspec.convert(answer.json(), route.answers[200])
    else:
        assert answer.json()["error"]["code"] in errors_of(route)


@pytest.mark.parametrize("capability", [START, STATUS, EVENTS, STOP, APPROVAL])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_submissions_answer_in_their_published_shapes(host: Stand, capability: str, mode: str) -> None:
    ids = await worked(host)
    route = next(route for route in ROUTES if route.counted)
    given_input = {"input": "x"} if capability == START else {"run_id": ids.run_id, "choice": "once", "reviewed": "d"}
    answer = await host.submit(capability, input=given_input, mode=mode)
    if answer.status_code in route.answers:
        msgspec.convert(answer.json(), route.answers[answer.status_code])
    else:
        assert answer.json()["error"]["code"] in errors_of(route)


# ---- generated requests ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_generated_requests_are_answered_as_the_document_says(route: Route) -> None:
    import schemathesis  # takes a second to import; only this test needs it

    operation = schemathesis.openapi.from_dict(document(ROUTES))[route.path][route.method]
    told = document(ROUTES)["paths"][route.path][route.method.lower()]["responses"]

    @settings(
        max_examples=10,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(case=operation.as_strategy(), who=st.sampled_from(["ada", "boss", "zoe"]))
    def ask(case: Any, who: str) -> None:
        async def once() -> None:
            query = {name: value for name, value in (case.query or {}).items() if name != "follow"}
            path = case.formatted_path
            sent = {name: str(value) for name, value in (case.headers or {}).items()}
            body = case.body if isinstance(case.body, dict) else None
            async with stand(view_wait_s=0.01) as host:
                answer = await host.call(case.method, path, who, params=query or None, json=body, headers=sent)
            assert str(answer.status_code) in told, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]["code"] in errors_of(route)
                assert answer.json()["error"]["code"] != "internal.fault"
            else:
                msgspec.convert(answer.json(), route.answers[answer.status_code])

        anyio.run(once)

    ask()
