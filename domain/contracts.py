"""The capability contracts of the five run operations: every value that discovery publishes.

Runs page, Operations and Shared AIP contract; AIP 3.4, 3.5, 11.2, 11.3. They are declarations: the 99.9% is a declared
target, not a measurement.
"""

from __future__ import annotations

from typing import Any

import msgspec

from domain.errors import CallerError
from domain.values import ID_PATTERN, MUTATIONS, Mode, Operation

KEY_TTL_MS = 86_400_000
DEFAULT_MAX_EVENTS = 4_096
MAX_EVENTS = 100_000


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the operations table, with its time limits in milliseconds."""

    operation: Operation
    method: str
    path: str
    risk: str
    approval: bool
    key_required: bool
    modes: tuple[Mode, ...]
    expected_completion: str
    sensitivity: str
    contains_pii: bool
    provider_timeout_ms: int | None
    timeout_ms: int
    expected_latency_ms: int
    async_expected: bool
    supports_cancel: bool = False

    @property
    def mutates(self) -> bool:
        """True for start, approval and stop."""
        return self.operation in MUTATIONS


CONTRACTS: dict[Operation, Contract] = {
    row.operation: row
    for row in (
        Contract(
            operation=Operation.RUN_START,
            method="POST",
            path="/v1/runs",
            risk="medium",
            approval=False,
            key_required=True,
            modes=(Mode.SYNC, Mode.ASYNC),
            expected_completion="sync",
            sensitivity="confidential",
            contains_pii=True,
            provider_timeout_ms=60_000,
            timeout_ms=60_000,
            expected_latency_ms=5_000,
            async_expected=True,
        ),
        Contract(
            operation=Operation.RUN_STATUS,
            method="GET",
            path="/v1/runs/{run_id}",
            risk="low",
            approval=False,
            key_required=False,
            modes=(Mode.SYNC,),
            expected_completion="sync",
            sensitivity="internal",
            contains_pii=False,
            provider_timeout_ms=30_000,
            timeout_ms=60_000,
            expected_latency_ms=5_000,
            async_expected=False,
        ),
        Contract(
            operation=Operation.RUN_EVENTS,
            method="GET",
            path="/v1/runs/{run_id}/events",
            risk="low",
            approval=False,
            key_required=False,
            modes=(Mode.SYNC, Mode.ASYNC, Mode.STREAMING),
            expected_completion="streaming",
            sensitivity="confidential",
            contains_pii=False,
            provider_timeout_ms=None,
            timeout_ms=300_000,
            expected_latency_ms=30_000,
            async_expected=True,
            supports_cancel=True,
        ),
        Contract(
            operation=Operation.RUN_APPROVAL,
            method="POST",
            path="/v1/runs/{run_id}/approval",
            risk="medium",
            approval=True,
            key_required=True,
            modes=(Mode.SYNC,),
            expected_completion="sync",
            sensitivity="restricted",
            contains_pii=True,
            provider_timeout_ms=30_000,
            timeout_ms=60_000,
            expected_latency_ms=5_000,
            async_expected=False,
        ),
        Contract(
            operation=Operation.RUN_STOP,
            method="POST",
            path="/v1/runs/{run_id}/stop",
            risk="medium",
            approval=True,
            key_required=True,
            modes=(Mode.SYNC,),
            expected_completion="sync",
            sensitivity="restricted",
            contains_pii=True,
            provider_timeout_ms=30_000,
            timeout_ms=60_000,
            expected_latency_ms=5_000,
            async_expected=False,
        ),
    )
}

_RUN_ID = {"type": "string", "minLength": 1}

INPUT_SCHEMAS: dict[Operation, dict[str, Any]] = {
    Operation.RUN_START: {
        "type": "object",
        "properties": {
            "body": {"type": "object"},
            "input": {},
            "model": {},
            "instructions": {"type": "string"},
            "conversation_history": {"type": "array"},
            "session_key": {"type": "string"},
            "idempotency_key": {"type": "string"},
        },
    },
    Operation.RUN_STATUS: {"type": "object", "required": ["run_id"], "properties": {"run_id": _RUN_ID}},
    Operation.RUN_EVENTS: {
        "type": "object",
        "required": ["run_id"],
        "properties": {"run_id": _RUN_ID, "max_events": {"type": "integer", "minimum": 1, "maximum": MAX_EVENTS}},
    },
    Operation.RUN_APPROVAL: {
        "type": "object",
        "required": ["run_id", "choice"],
        "properties": {
            "run_id": _RUN_ID,
            "choice": {"enum": ["once", "session", "always", "deny", "approve", "allow"]},
            "all": {"type": "boolean"},
            "resolve_all": {"type": "boolean"},
            "reviewed": {
                "description": "Digest of the reviewed request, or of every one for resolve_all.",
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
            },
        },
    },
    Operation.RUN_STOP: {"type": "object", "required": ["run_id"], "properties": {"run_id": _RUN_ID}},
}

_EVENTS_OUTPUT = ["endpoint_id", "operation", "http_status", "events", "text", "terminal"]


def capability_id(endpoint_id: str, operation: Operation) -> str:
    """``cap:hermes_agent:<endpoint_id>:<operation>``."""
    return f"cap:hermes_agent:{endpoint_id}:{operation.value}"


_WORDS = frozenset(operation.value for operation in Operation)


def parse_capability(value: str) -> tuple[str, Operation]:
    """(endpoint id, operation) of a capability id, split at the last colon; the endpoint comes from here alone."""
    prefix, _, word = value.rpartition(":")
    head, _, endpoint_id = prefix.rpartition(":")
    if (
        head != "cap:hermes_agent"
        or word not in _WORDS
        or not ID_PATTERN.match(endpoint_id)
        or endpoint_id != endpoint_id.lower()
    ):
        raise CallerError("capability.unsupported")
    return endpoint_id, Operation(word)


def normal_endpoint_id(value: str) -> str:
    """The endpoint id as discovery shows it: trimmed and lower case; refused unless 1 to 128 of ``[A-Za-z0-9_-]``."""
    trimmed = value.strip()
    if not ID_PATTERN.match(trimmed):
        raise CallerError("settings.invalid", "An endpoint id is 1 to 128 letters, digits, '_' or '-'.")
    return trimmed.lower()


def contract_object(contract: Contract) -> dict[str, Any]:
    """The published capability contract (AIP 3.5)."""
    effects = ["read", "write", "external_network"] if contract.mutates else ["read", "external_network"]
    idempotency: dict[str, Any] = {
        "requirement": "required" if contract.key_required else "optional",
        "collision_behavior": "return_original_result",
        "key_scope": "capability",
    }
    if contract.key_required:
        idempotency["ttl_ms"] = KEY_TTL_MS
    published: dict[str, Any] = {
        "side_effects": effects,
        "idempotency": idempotency,
        "execution": {
            "supports_sync": True,
            "supports_async": Mode.ASYNC in contract.modes,
            "supports_streaming": Mode.STREAMING in contract.modes,
            "supports_cancel": contract.supports_cancel,
            "supports_retry": not contract.mutates,
            "expected_completion": contract.expected_completion,
            "retry_safety": "unsafe" if contract.mutates else "safe",
        },
        "data": {
            "sensitivity": contract.sensitivity,
            "contains_pii": contract.contains_pii,
            "redaction_required": True,
        },
        "sla": {
            "expected_latency_ms": contract.expected_latency_ms,
            "timeout_ms": contract.timeout_ms,
            "async_expected": contract.async_expected,
            "max_queue_delay_ms": 10_000,
            "availability_target": "99.9%",
        },
        "compensation": {"mode": "rollback_not_supported", "requires_approval": contract.approval},
    }
    if contract.approval:
        published["approval"] = {
            "required": True,
            "approver_selector": {"type": "tenant_policy"},
            "ttl_ms": 900_000,
            "evidence_requirements": ["reason", "input_snapshot", "policy_decision"],
            "minimum_distinct_principals": 1,
            "separation_of_duties": {
                "requester_must_differ": False,
                "operator_must_differ": False,
                "allow_self_approval": False,
            },
        }
    return published


def capability(endpoint_id: str, display_name: str, origin: str, operation: Operation) -> dict[str, Any]:
    """One published capability (AIP 3.4)."""
    contract = CONTRACTS[operation]
    output: dict[str, Any] = {"type": "object"}
    if operation is Operation.RUN_EVENTS:
        output["required"] = _EVENTS_OUTPUT
    return {
        "id": capability_id(endpoint_id, operation),
        "name": f"Hermes Agent {display_name} ({endpoint_id})",
        "description": f"{operation.value}: {contract.method} {contract.path}",
        "kind": "workflow",
        "stability": "stable",
        "risk": contract.risk,
        "requires_human_approval": contract.approval,
        "input_schema": INPUT_SCHEMAS[operation],
        "output_schema": output,
        "auth": {"scheme": "bearer", "source": "endpoint.api_key"},
        "bindings": [
            {
                "profile": "aip.connector.hermes_agent.v1",
                "system": "hermes-agent",
                "endpoint_id": endpoint_id,
                "operation": operation.value,
                "base_url": origin,
                "method": contract.method,
                "path": contract.path,
                "streaming": operation is Operation.RUN_EVENTS,
            }
        ],
        "contract": contract_object(contract),
    }


def manifest(endpoints: list[tuple[str, str, str, str]]) -> dict[str, Any]:
    """Discovery (AIP 11): ``endpoints`` are (id, display name, origin, tenant binding) in normalised id order."""
    ordered = sorted(endpoints)
    return {
        "manifest_version": "aip-manifest/v1",
        "agent": {"id": "agent:hermes_agent:connector", "kind": "agent", "display_name": "Hermes Agent connector"},
        "profiles": ["aip.native.http.v1", "aip.native.sse.v1", "aip.connector.hermes_agent.v1"],
        "capabilities": [
            capability(endpoint_id, display_name, origin, operation)
            for endpoint_id, display_name, origin, _ in ordered
            for operation in Operation
        ],
        "security": {
            "transport": "https, or http on loopback",
            "auth": "bearer",
            "tenant_binding": "verified before each provider request",
            "session_continuity_header": "X-Hermes-Session-Id",
            "session_key_header": "X-Hermes-Session-Key",
        },
        "limits": {
            "default_sse_event_limit": DEFAULT_MAX_EVENTS,
            "maximum_sse_event_limit": MAX_EVENTS,
            "max_json_response_bytes": 16 * 2**20,
            "max_stream_response_bytes": 64 * 2**20,
            "max_sse_frame_bytes": 2**20,
            "max_request_body_bytes": 10_000_000,
            "max_request_url_bytes": 8_190,
        },
        "compatibility": {
            "system": "hermes-agent",
            "api": "/v1/runs",
            "endpoints": [endpoint_id for endpoint_id, *_ in ordered],
            "tenant_bound_endpoints": [
                {"endpoint_id": endpoint_id, "tenant_id": tenant} for endpoint_id, _, _, tenant in ordered if tenant
            ],
            "operations": [operation.value for operation in Operation],
            "operator_principals": [],
            "operator_delegation_enabled": False,
        },
    }
