"""What a caller may ask for, and a submission on its way to being admitted: everything that needs no store."""

from __future__ import annotations

from typing import Any

import msgspec

from domain.action import Action
from domain.contracts import Contract
from domain.errors import CallerError
from domain.history import Change
from domain.requests import RunInput, StartBody, check_run_input, check_start_input
from domain.values import ID_PATTERN, Actor, Mode, Operation

LONGEST_TIMEOUT_MS = 86_400_000
REASON_LIMIT = 2_000


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller may say (AIP 3.1, action). Who the caller is never comes from here."""

    capability_id: str
    input: dict[str, Any]
    mode: Mode = Mode.SYNC
    id: str | None = None
    idempotency_key: str | None = None
    timeout_ms: int | None = None
    callback: dict[str, Any] | None = None
    memory_context: Any = None
    metadata: Any = None
    trace_id: str = ""
    correlation_id: str = ""
    session_id: str = ""
    reason: str = ""
    retry_of: str = ""


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The Action that answers a submission; ``replay`` if it was there already."""

    action: Action
    history: str
    replay: bool


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """What a cancel did: cancelled_without_effect, wish_stored, stop_requested or nothing_to_do."""

    action: Action
    what: str
    stop_action_id: str = ""


class Draft:
    """A submission on its way to being admitted, as the Action that it names itself or as ``fresh_id``."""

    def __init__(
        self, actor: Actor, submission: Submission, contract: Contract, endpoint_id: str, key: str, fresh_id: str
    ) -> None:
        if submission.mode not in contract.modes:
            raise CallerError("execution.mode_unsupported", details={"modes": [mode.value for mode in contract.modes]})
        if submission.callback is not None:
            raise CallerError("callback.unsupported")
        if submission.id is not None and not ID_PATTERN.match(submission.id):
            raise CallerError("request.invalid", "An Action id is 1 to 128 letters, digits, '_' or '-'.")
        if submission.timeout_ms is not None and not 1 <= submission.timeout_ms <= LONGEST_TIMEOUT_MS:
            raise CallerError("request.invalid", "timeout_ms is 1 to 86400000.", details={"field": "timeout_ms"})
        for name in ("trace_id", "correlation_id", "session_id", "retry_of"):
            value = getattr(submission, name)
            if value and not ID_PATTERN.match(value):
                raise CallerError("request.invalid", details={"field": name})
        if len(submission.reason) > REASON_LIMIT:
            raise CallerError("request.invalid", details={"field": "reason"})
        self.action_id = submission.id or fresh_id
        self.content: StartBody | RunInput = (
            check_start_input(submission.input, default_session_id=own_session(self.action_id))
            if contract.operation is Operation.RUN_START
            else check_run_input(contract.operation, submission.input)
        )
        self.actor, self.submission, self.contract = actor, submission, contract
        self.endpoint_id, self.key = endpoint_id, key
        self.fingerprint = ""
        self.key_history = ""
        self.changes: tuple[Change, ...] = ()


def key_of(submission: Submission) -> str | None:
    """The key as it was given: beside the input, or as its member."""
    given = submission.input.get("idempotency_key")
    return submission.idempotency_key if submission.idempotency_key is not None or not isinstance(given, str) else given


def asked(submission: Submission, operation: Operation) -> dict[str, Any]:
    """The part of a request that a repeat must equal: its input without the key itself."""
    asked = {name: value for name, value in submission.input.items() if name != "idempotency_key"}
    return {"operation": operation.value, "input": asked}


def own_session(action_id: str) -> str:
    """Every run gets a conversation of its own, so that its traces at the provider are its own."""
    return f"aip-{action_id}"


def asked_session(given: dict[str, Any]) -> str:
    """The conversation that the caller named, or an empty string."""
    body = given.get("body") if isinstance(given.get("body"), dict) else given
    session = body.get("session_id") if isinstance(body, dict) else None
    return session[:512] if isinstance(session, str) else ""
