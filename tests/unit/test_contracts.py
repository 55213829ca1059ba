"""The published contracts, compared with the specification's tables written out here."""

from __future__ import annotations

from typing import Any

import pytest

from domain.contracts import (
    CONTRACTS,
    DEFAULT_MAX_EVENTS,
    INPUT_SCHEMAS,
    MAX_EVENTS,
    capability,
    capability_id,
    contract_object,
    manifest,
    normal_endpoint_id,
    parse_capability,
)
from domain.errors import CallerError
from domain.requests import (
    Trusted,
    approval_request,
    events_request,
    start_request,
    status_request,
    stop_request,
)
from domain.values import MUTATIONS, Operation
from tests.builders import RUN

TRUSTED = Trusted(principal="user:ada", tenant="acme", issuer="https://issuer.example")

# operation: method, path, risk, approval, key, retry
OPERATIONS: dict[str, tuple[str, str, str, bool, str, str]] = {
    "run_start": ("POST", "/v1/runs", "medium", False, "required", "unsafe"),
    "run_status": ("GET", "/v1/runs/{run_id}", "low", False, "optional", "safe"),
    "run_events": ("GET", "/v1/runs/{run_id}/events", "low", False, "optional", "safe"),
    "run_approval": ("POST", "/v1/runs/{run_id}/approval", "medium", True, "required", "unsafe"),
    "run_stop": ("POST", "/v1/runs/{run_id}/stop", "medium", True, "required", "unsafe"),
}

# operation: async, streaming, cancel, expected, sensitivity, pii, provider ms, AIP ms, latency ms, async expected
SHARED: dict[str, tuple[bool, bool, bool, str, str, bool, int | None, int, int, bool]] = {
    "run_start": (True, False, False, "sync", "confidential", True, 60_000, 60_000, 5_000, True),
    "run_status": (False, False, False, "sync", "internal", False, 30_000, 60_000, 5_000, False),
    "run_events": (True, True, True, "streaming", "confidential", False, None, 300_000, 30_000, True),
    "run_approval": (False, False, False, "sync", "restricted", True, 30_000, 60_000, 5_000, False),
    "run_stop": (False, False, False, "sync", "restricted", True, 30_000, 60_000, 5_000, False),
}


def published(operation: Operation) -> dict[str, Any]:
    return capability("main", "Main", "http://127.0.0.1:8642", operation)


def check_row(word: str) -> None:
    method, path, risk, approval, key, retry = OPERATIONS[word]
    told = published(Operation(word))
    assert (told["bindings"][0]["method"], told["bindings"][0]["path"]) == (method, path)
    assert (told["risk"], told["requires_human_approval"]) == (risk, approval)
    assert told["contract"]["idempotency"]["requirement"] == key
    assert told["contract"]["execution"]["retry_safety"] == retry
    assert told["contract"]["execution"]["supports_retry"] is (retry == "safe")
    assert ("approval" in told["contract"]) is approval


@pytest.mark.proves("A004")
def test_the_contract_and_the_request_of_run_start() -> None:
    check_row("run_start")
    out = start_request(b'{"input":"hello"}', session_key=None, trusted=TRUSTED)
    assert (out.method, out.path, out.timeout_ms) == ("POST", "/v1/runs", 60_000)


@pytest.mark.proves("A005")
def test_the_contract_and_the_request_of_run_status() -> None:
    check_row("run_status")
    out = status_request(RUN, TRUSTED)
    assert (out.method, out.path, out.timeout_ms) == ("GET", f"/v1/runs/{RUN}", 30_000)


@pytest.mark.proves("A006")
def test_the_contract_and_the_request_of_run_events() -> None:
    check_row("run_events")
    out = events_request(RUN, None, TRUSTED)
    assert (out.method, out.path) == ("GET", f"/v1/runs/{RUN}/events")


@pytest.mark.proves("A007")
def test_the_contract_and_the_request_of_run_approval() -> None:
    check_row("run_approval")
    out = approval_request(RUN, "deny", False, None, TRUSTED)
    assert (out.method, out.path, out.timeout_ms) == ("POST", f"/v1/runs/{RUN}/approval", 30_000)


@pytest.mark.proves("A008")
def test_the_contract_and_the_request_of_run_stop() -> None:
    check_row("run_stop")
    out = stop_request(RUN, TRUSTED)
    assert (out.method, out.path, out.timeout_ms) == ("POST", f"/v1/runs/{RUN}/stop", 30_000)


@pytest.mark.proves("A019", "A020", "A021", "A023", "A024")
@pytest.mark.parametrize("word", SHARED)
def test_modes_data_and_time_limits_are_those_of_the_shared_contract(word: str) -> None:
    contract = CONTRACTS[Operation(word)]
    told = contract_object(contract)
    execution, data, sla = told["execution"], told["data"], told["sla"]
    assert SHARED[word] == (
        execution["supports_async"],
        execution["supports_streaming"],
        execution["supports_cancel"],
        execution["expected_completion"],
        data["sensitivity"],
        data["contains_pii"],
        contract.provider_timeout_ms,
        sla["timeout_ms"],
        sla["expected_latency_ms"],
        sla["async_expected"],
    )
    assert (execution["supports_sync"], data["redaction_required"]) == (True, True)


@pytest.mark.proves("A001", "A161")
def test_discovery_shows_exactly_five_capabilities_for_each_endpoint() -> None:
    found = manifest([("b", "B", "https://b.example", ""), ("a", "A", "https://a.example", "acme")])
    assert [item["id"] for item in found["capabilities"]] == [
        f"cap:hermes_agent:{endpoint}:{word}" for endpoint in ("a", "b") for word in OPERATIONS
    ]
    assert found["compatibility"]["operations"] == list(OPERATIONS)
    assert found["compatibility"]["tenant_bound_endpoints"] == [{"endpoint_id": "a", "tenant_id": "acme"}]


@pytest.mark.proves("A009")
@pytest.mark.parametrize("operation", Operation)
def test_each_capability_is_a_stable_workflow(operation: Operation) -> None:
    assert (published(operation)["kind"], published(operation)["stability"]) == ("workflow", "stable")


@pytest.mark.proves("A025", "A026")
@pytest.mark.parametrize("operation", Operation)
def test_side_effects_are_those_of_reads_or_of_mutations(operation: Operation) -> None:
    writes = ["write"] if operation in MUTATIONS else []
    assert contract_object(CONTRACTS[operation])["side_effects"] == ["read", *writes, "external_network"]


@pytest.mark.proves("A027", "A028", "A029", "A030")
@pytest.mark.parametrize("operation", Operation)
def test_no_transaction_no_rollback_a_queue_hint_and_a_declared_target(operation: Operation) -> None:
    told = contract_object(CONTRACTS[operation])
    assert "transaction" not in told
    assert told["compensation"]["mode"] == "rollback_not_supported"
    assert (told["sla"]["max_queue_delay_ms"], told["sla"]["availability_target"]) == (10_000, "99.9%")


@pytest.mark.proves("A129", "A130", "A131")
@pytest.mark.parametrize("operation", Operation)
def test_a_mutation_needs_a_key_of_its_capability_for_24_hours_and_a_repeat_gives_the_original(
    operation: Operation,
) -> None:
    told = contract_object(CONTRACTS[operation])["idempotency"]
    assert (told["key_scope"], told["collision_behavior"]) == ("capability", "return_original_result")
    if operation in MUTATIONS:
        assert (told["requirement"], told["ttl_ms"]) == ("required", 86_400_000)
    else:
        assert (told["requirement"], told.get("ttl_ms")) == ("optional", None)


@pytest.mark.proves("A109")
@pytest.mark.parametrize("operation", [Operation.RUN_APPROVAL, Operation.RUN_STOP])
def test_a_governed_mutation_publishes_tenant_policy_three_kinds_of_evidence_and_15_minutes(
    operation: Operation,
) -> None:
    told = contract_object(CONTRACTS[operation])["approval"]
    assert (told["required"], told["approver_selector"]) == (True, {"type": "tenant_policy"})
    assert told["evidence_requirements"] == ["reason", "input_snapshot", "policy_decision"]
    assert told["ttl_ms"] == 15 * 60 * 1000


def test_the_event_limit_is_published() -> None:
    limits = manifest([("main", "Main", "http://127.0.0.1:8642", "")])["limits"]
    assert (limits["default_sse_event_limit"], limits["maximum_sse_event_limit"]) == (4_096, 100_000)
    assert (DEFAULT_MAX_EVENTS, MAX_EVENTS, limits["max_request_body_bytes"]) == (4_096, 100_000, 10_000_000)
    assert limits["max_stream_response_bytes"] == 67_108_864
    assert INPUT_SCHEMAS[Operation.RUN_EVENTS]["properties"]["max_events"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 100_000,
    }


def test_input_schemas_are_open_and_the_choice_is_one_of_six_words() -> None:
    assert not any("additionalProperties" in schema for schema in INPUT_SCHEMAS.values())
    assert "required" not in INPUT_SCHEMAS[Operation.RUN_START]
    choice = INPUT_SCHEMAS[Operation.RUN_APPROVAL]["properties"]["choice"]
    assert choice == {"enum": ["once", "session", "always", "deny", "approve", "allow"]}


@pytest.mark.proves("A003")
@pytest.mark.parametrize(("given", "normal"), [("Main", "main"), (" a-B_9 ", "a-b_9"), ("x" * 128, "x" * 128)])
def test_an_endpoint_id_has_one_normal_form_that_a_capability_id_holds(given: str, normal: str) -> None:
    assert normal_endpoint_id(given) == normal == normal_endpoint_id(normal)
    named = capability_id(normal, Operation.RUN_STOP)
    assert parse_capability(named) == (normal, Operation.RUN_STOP)


@pytest.mark.parametrize("given", ["", " ", "x" * 129, "a b", "a/b", "ä", "a:b", "a\n b"])
def test_an_endpoint_id_of_other_characters_is_refused(given: str) -> None:
    with pytest.raises(CallerError) as caught:
        normal_endpoint_id(given)
    assert caught.value.code == "settings.invalid"


@pytest.mark.proves("A003")
@pytest.mark.parametrize(
    "given",
    [
        "cap:hermes_agent:Main:run_start",
        "cap:hermes_agent: main:run_start",
        "cap:hermes_agent::run_start",
        "cap:hermes_agent:a/b:run_start",
        "cap:hermes_agent:a:b:run_start",
        "cap:hermes_agent:main:chat",
        "cap:hermes_agent:main:RUN_START",
        "cap:other:main:run_start",
        "run_start",
        "",
    ],
)
def test_a_capability_id_that_discovery_does_not_show_is_unsupported(given: str) -> None:
    with pytest.raises(CallerError) as caught:
        parse_capability(given)
    assert caught.value.code == "capability.unsupported"
