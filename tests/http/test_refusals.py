"""Each refusal that a submission or decision can meet, provoked at its cause."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest
from eventsourcing.persistence import OperationalError

from adapters.command import Outcome, Stored, Verdict
from domain.approval import TenantPolicy
from domain.events import SequenceTaken, Target
from domain.values import Actor
from tests.http.stand import ENDPOINT, EVENTS, START, STATUS, STOP, Stand, deltas

pytestmark = pytest.mark.anyio


def refused(answer: Any) -> tuple[int, str, str]:
    """Status, code and effect."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["effect"]


@pytest.mark.parametrize(
    "capability",
    [
        "", "x", "cap:hermes_agent:main:jobs_list", "cap:hermes_agent:nowhere:run_start",
        "cap:hermes_agent:MAIN:run_start",
        "cap:other:main:run_start", "cap:hermes_agent::run_start", "cap:hermes_agent:main:run_start:", "\u2028",
    ],
)  # fmt: skip
async def test_a_capability_that_is_not_discovered_is_refused(host: Stand, capability: str) -> None:
    answer = await host.submit(capability, idempotency_key="k")
    assert refused(answer) == (404, "capability.unsupported", "none")
    assert host.provider.sent == []


@pytest.mark.parametrize(("capability", "mode"), [(START, "streaming"), (STATUS, "async"), (STOP, "async")])
async def test_a_mode_that_the_contract_lacks_is_refused(host: Stand, capability: str, mode: str) -> None:
    _, run_id = await host.started()
    given = {"input": "x"} if capability == START else {"run_id": run_id}
    answer = await host.submit(capability, input=given, mode=mode)
    assert refused(answer) == (400, "execution.mode_unsupported", "none")


@pytest.mark.proves("A129")
@pytest.mark.parametrize("key", [None, "", "   "])
async def test_a_mutation_without_a_key_is_refused(host: Stand, key: str | None) -> None:
    assert refused(await host.submit(idempotency_key=key)) == (400, "idempotency.required", "none")
    assert host.provider.sent == []


@pytest.mark.proves("A033", "A150")
@pytest.mark.parametrize("given", [{}, {"input": ""}, {"input": []}, {"input": None}, {"input": 7}])
async def test_an_input_that_forms_no_request_is_refused_before_anything_is_stored(
    host: Stand, given: dict[str, Any]
) -> None:
    before = len(await host.log())
    answer = await host.submit(input=given)
    assert refused(answer) == (400, "action.input_schema_invalid", "none")
    assert answer.json()["error"]["details"]["violations"]
    assert len(await host.log()) == before


async def test_an_id_in_use_for_another_request_is_refused(host: Stand) -> None:
    await host.submit(id="act_mine")
    answer = await host.submit(id="act_mine", input={"input": "other"})
    assert refused(answer) == (409, "action.id_conflict", "none")
    assert (await host.submit(id="not an id")).json()["error"]["code"] == "request.invalid"


async def test_a_conversation_that_a_run_holds_takes_no_second_one_where_the_policy_says_so(host: Stand) -> None:
    host.policy = TenantPolicy(id="acme", one_run_per_session=True)
    host.provider.frames = lambda run_id: deltas(run_id, "x", end="")
    assert (await host.submit(input={"input": "x", "session_id": "s1"})).status_code == 200
    answer = await host.submit(input={"input": "y", "session_id": "s1"})
    assert refused(answer) == (409, "session.busy", "none")
    assert (await host.submit(input={"input": "y", "session_id": "s2"})).status_code == 200


@pytest.mark.proves("A054", "A160")
async def test_an_endpoint_of_another_tenant_is_refused_before_anything_is_sent(host: Stand) -> None:
    host.provider.target = msgspec.structs.replace(host.provider.target, tenant_binding="other")
    answer = await host.submit()
    assert refused(answer) == (403, "connector.hermes_agent.tenant_mismatch", "none")
    assert host.provider.sent == []
    assert isinstance(host.provider.target, Target)


@pytest.mark.proves("B114")
async def test_a_full_host_refuses_with_a_hint_and_admits_later_under_the_same_key(host: Stand) -> None:
    host.provider.hold = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(host.submit)

        async def full() -> bool:
            return host.driver.full

        await host.until(full)
        answer = await host.submit(idempotency_key="late")
        assert refused(answer) == (429, "connector_host.capacity", "none")
        assert answer.json()["error"]["retry_after_ms"] == 100
        assert answer.json()["error"]["retryable"] is True
        host.provider.hold.set()
    assert (await host.submit(idempotency_key="late")).status_code == 200


async def test_a_host_whose_place_was_taken_decides_nothing(host: Stand) -> None:
    event = SequenceTaken(at=host.clock.now(), instance="proc_2", release="test")
    await host.store.take_sequence("replica-1", event)
    assert refused(await host.submit()) == (503, "lease.fenced", "none")
    assert host.provider.sent == []


@pytest.mark.parametrize(
    ("verdict", "code"),
    [(Verdict.NOT_APPENDED, "storage.unavailable"), (Verdict.UNKNOWN, "storage.unknown")],
)
async def test_a_store_that_does_not_take_the_record_is_told(host: Stand, verdict: Verdict, code: str) -> None:
    class Unwilling:
        """The journal with another verdict for whatever is appended."""

        def __getattr__(self, name: str) -> Any:
            return getattr(host.journal, name)

        async def append(self, *args: Any, **more: Any) -> Outcome:
            return Outcome(verdict)

    host.store._journal = Unwilling()  # type: ignore[assignment]
    status, told, _ = refused(await host.submit())
    assert (status, told) == (503, code)
    assert host.provider.sent == []


async def test_a_journal_that_cannot_be_read_is_told_and_nothing_is_made_up(host: Stand) -> None:
    action_id, run_id = await host.started()

    class Away:
        """A journal that cannot be reached."""

        async def read(self, *args: Any) -> list[Stored]:
            raise OperationalError("away")

        read_log = read

    host.app = type(host.app)(msgspec.structs.replace(host.ports, journal=Away()))
    host.client._transport.app = host.app  # type: ignore[attr-defined]
    for path in (
        f"/aip/v1/actions/{action_id}",
        f"/aip/v1/actions/{action_id}/result",
        f"/aip/v1/actions/{action_id}/events",
        f"/views/runs/{run_id}/events",
        "/aip/v1/audit/events",
    ):
        assert refused(await host.get(path)) == (503, "storage.unavailable", "none"), path


async def test_an_event_of_a_newer_release_is_told_as_such(host: Stand) -> None:
    action_id, _ = await host.started()
    rows = host.journal._histories[f"acme/act/{action_id}"]
    rows[2] = msgspec.structs.replace(rows[2], state=rows[2].state.replace(b'"v":1', b'"v":99'))
    assert refused(await host.get(f"/aip/v1/actions/{action_id}")) == (500, "history.newer_version", "none")


async def test_who_has_no_approvers_role_does_not_decide(host: Stand) -> None:
    _, run_id = await host.started()
    approval_id = (await host.submit(STOP, input={"run_id": run_id})).json()["action_result"]["output"]["approval_id"]
    host.callers.people["cook"] = Actor(id="cook", tenant="acme", scopes=("approval:write",), roles=("cook",))
    body = {"decision": "approved", "reason": "x"}
    answer = await host.call("POST", f"/aip/v1/approvals/{approval_id}/decision", "cook", json=body)
    assert refused(answer) == (403, "policy.approver_unauthorized", "none")


async def test_a_decision_that_comes_too_late_is_refused(host: Stand) -> None:
    _, run_id = await host.started()
    approval_id = (await host.submit(STOP, input={"run_id": run_id})).json()["action_result"]["output"]["approval_id"]
    expires = (await host.get(f"/aip/v1/approvals/{approval_id}")).json()["approval_record_view"]["request"]
    late = host.clock.now().replace(year=host.clock.now().year + 1)

    class Later:
        """The host's clock, a year on."""

        def __getattr__(self, name: str) -> Any:
            return getattr(host.clock, name)

        def now(self) -> Any:
            return late

    host.intake._clock = Later()  # type: ignore[assignment]
    body = {"decision": "approved", "reason": "x"}
    answer = await host.call("POST", f"/aip/v1/approvals/{approval_id}/decision", "clerk", json=body)
    assert refused(answer) == (409, "policy.approval_expired", "none")
    assert expires["expires_at"]


async def test_an_action_without_an_approval_has_none(host: Stand) -> None:
    action_id, _ = await host.started()
    assert refused(await host.get(f"/aip/v1/approvals/appr_{action_id}")) == (404, "action.not_found", "none")
    body = {"decision": "approved", "reason": "x"}
    decided = await host.call("POST", f"/aip/v1/approvals/appr_{action_id}/decision", "clerk", json=body)
    assert refused(decided) == (404, "action.not_found", "none")
    assert refused(await host.get(f"/aip/v1/approvals/{action_id}")) == (404, "action.not_found", "none")


@pytest.mark.proves("A076")
@pytest.mark.parametrize("limit", [0, -1, 1.5, "7", 100_001, True])
async def test_a_limit_of_events_out_of_its_range_is_refused(host: Stand, limit: Any) -> None:
    _, run_id = await host.started()
    answer = await host.submit(EVENTS, input={"run_id": run_id, "max_events": limit})
    assert refused(answer) == (400, "action.input_schema_invalid", "none")


@pytest.mark.proves("A011")
async def test_members_that_look_like_an_endpoint_choose_none(host: Stand) -> None:
    given = {"input": "x", "endpoint_id": "theirs", "base_url": "http://evil.test", "url": "http://evil.test"}
    assert (await host.submit(input=given)).status_code == 200
    (out,) = host.provider.sent
    assert out.path == "/v1/runs"
    assert b"evil" not in (out.body or b"")
    assert host.provider.target.endpoint_id == ENDPOINT
