"""What a caller's input becomes on its way to Hermes: checked bodies, paths and headers (AIP 11.5; runs page).

Nothing that a caller writes chooses a host, a path template or a trusted header. What cannot form a valid request is
refused here, before anything is claimed.
"""

from __future__ import annotations

import math
import re
from typing import Any
from urllib.parse import quote

import msgspec

from domain.errors import PREFIX, CallerError
from domain.provider import CHOICE_ALIASES, CHOICES, Outgoing, is_run_id
from domain.values import Operation, canonical

BODY_LIMIT = 10_000_000
HEADER_LIMIT = 16 * 1024
SESSION_KEY_LIMIT = 256
SEGMENT_LIMIT = 2_000
DEPTH_LIMIT = 64
VIOLATION_LIMIT = 16
EVENTS_DEFAULT = 4_096
EVENTS_LIMIT = 100_000

START_TIMEOUT_MS = 60_000
TIMEOUT_MS = 30_000
PROBE_TIMEOUT_MS = 10_000  # the first run after a provider's start keeps every route waiting for some seconds

# Members of an input that steer the transport and never stand in the provider's JSON.
TRANSPORT_MEMBERS = frozenset({"session_key", "idempotency_key"})
# Members that choose nothing here: the endpoint comes from the capability, the trusted facts from the host.
POWERLESS_MEMBERS = frozenset({"_aip", "endpoint", "endpoint_id", "base_url", "url", "origin", "api_key"})

_VISIBLE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\Z")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")
_DIGEST = re.compile(r"[A-Za-z0-9:_-]{1,128}\Z")


class Trusted(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of the eight trusted headers and of the key. They come from the verified caller and from the Action."""

    principal: str
    tenant: str
    issuer: str
    trace_id: str = ""
    session_id: str = ""
    correlation_id: str = ""
    delegation_chain: str = ""
    idempotency_key: str = ""
    deadline_unix_ms: int | None = None


class StartBody(msgspec.Struct, frozen=True, kw_only=True):
    """A checked start. ``content`` is the exact JSON text to send.

    ``requested_session`` is the conversation that the body names. ``history`` says where earlier messages come from:
    explicit, previous_response, messages (the input's own) or none. ``session_header`` and ``session_key`` travel as
    headers. ``dropped`` names what the caller wrote and the provider's body does not hold, its transport members aside.
    """

    content: bytes
    requested_session: str | None
    history: str
    session_header: str | None = None
    session_key: str | None = None
    dropped: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"StartBody(<{len(self.content)} bytes>, history={self.history!r}, dropped={self.dropped!r})"


class RunInput(msgspec.Struct, frozen=True, kw_only=True):
    """A checked input of one of the four operations on a run. ``choice`` is canonical, empty unless an approval."""

    run_id: str
    max_events: int = EVENTS_DEFAULT
    choice: str = ""
    resolve_all: bool = False
    reviewed: tuple[str, ...] = ()
    session_key: str | None = None


def _refuse(violations: list[dict[str, str]]) -> None:
    if violations:
        raise CallerError("action.input_schema_invalid", details={"violations": violations[:VIOLATION_LIMIT]})


def _violation(path: str, problem: str) -> dict[str, str]:
    return {"path": path, "problem": problem}


def _place(name: str) -> str:
    return _UNSTORABLE.sub("?", name[:64])


def _check_values(value: Any, path: str) -> list[dict[str, str]]:
    """What JSON text cannot carry, PostgreSQL cannot store, or a parser cannot follow; places are top-level names."""
    left = [(value, 1)]
    while left:
        item, depth = left.pop()
        if depth > DEPTH_LIMIT:
            return [_violation(path, f"is nested deeper than {DEPTH_LIMIT}")]
        if isinstance(item, dict):
            left += ((name, depth) for name in item)
            left += ((member, depth + 1) for member in item.values())
        elif isinstance(item, list):
            left += ((element, depth + 1) for element in item)
        elif isinstance(item, str):
            if _UNSTORABLE.search(item):
                return [_violation(path, "holds NUL or half a surrogate pair")]
        elif isinstance(item, float):
            if not math.isfinite(item):
                return [_violation(path, "holds a number that is not finite")]
        elif isinstance(item, int):
            if item.bit_length() > 64:
                return [_violation(path, "holds an integer of more than 64 bits")]
        elif item is not None:
            return [_violation(path, "holds a value that is not JSON")]
    return []


def _is_usable_content(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) for part in content) and any(
            part.get("type") in ("text", "input_text") and isinstance(part.get("text"), str) and part["text"]
            for part in content
        )
    return isinstance(content, str) and bool(content)


def _check_prompt(given: Any) -> str:
    """The problem of a start's ``input``, or nothing (runs page, Start a run)."""
    if isinstance(given, str):
        return "" if given else "must not be empty"
    if not isinstance(given, list):
        return "is required: a string, or a list of messages"
    if not given:
        return "must not be empty"
    if not all(isinstance(message, dict) for message in given):
        return "must hold message objects only"
    return "" if _is_usable_content(given[-1].get("content")) else "the last message has no usable content"


def _check_history(given: Any) -> str:
    if not isinstance(given, list):
        return "must be a list of messages"
    if not all(isinstance(message, dict) and "role" in message and "content" in message for message in given):
        return "each message needs role and content"
    return ""


def _check_session_key(given: Any) -> list[dict[str, str]]:
    if given is None or (isinstance(given, str) and len(given) <= SESSION_KEY_LIMIT and _VISIBLE.match(given)):
        return []
    return [_violation("session_key", f"must be 1 to {SESSION_KEY_LIMIT} visible ASCII characters")]


def _provider_body(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The provider's members of an input, and the names of what is left out of them."""
    if "body" not in given:
        kept = {name: value for name, value in given.items() if name not in TRANSPORT_MEMBERS | POWERLESS_MEMBERS}
        return kept, [name for name in given if name in POWERLESS_MEMBERS]
    dropped = [name for name in given if name != "body" and name not in TRANSPORT_MEMBERS]
    body = given["body"]
    if isinstance(body, dict) and "body" in body:
        dropped += [f"body.{name}" for name in body if name != "body"]
        body = body["body"]
    if not isinstance(body, dict):
        return {"input": body}, dropped
    dropped += [f"body.{name}" for name in body if name in TRANSPORT_MEMBERS]
    return {name: value for name, value in body.items() if name not in TRANSPORT_MEMBERS}, dropped


def _history_kind(body: dict[str, Any]) -> str:
    if body.get("conversation_history"):
        return "explicit"
    if body.get("previous_response_id"):
        return "previous_response"
    return "messages" if isinstance(body["input"], list) and len(body["input"]) > 1 else "none"


def check_start_input(given: dict[str, Any], *, default_session_id: str | None = None) -> StartBody:
    """The provider's body of a start (runs page, Start a run).

    ``default_session_id`` is put in only if the caller names neither a session nor a previous response. Raises
    CallerError ``action.input_schema_invalid`` with ``details.violations`` ({path, problem}), or ``request.too_large``
    for a body of more than 10,000,000 bytes.
    """
    violations = [found for name, value in given.items() for found in _check_values([name, value], _place(name))]
    _refuse(violations)  # nothing else is worth telling about values that cannot be sent
    body, dropped = _provider_body(given)
    if problem := _check_prompt(body.get("input")):
        violations.append(_violation("input", problem))
    violations += [
        _violation(name, "must be a string")
        for name in ("session_id", "instructions", "previous_response_id")
        if not isinstance(body.get(name), str | None)
    ]
    if body.get("conversation_history") is not None and (problem := _check_history(body["conversation_history"])):
        violations.append(_violation("conversation_history", problem))
    session_key, session_header = given.get("session_key"), given.get("session_id")
    violations += _check_session_key(session_key)
    if session_header is not None and not (isinstance(session_header, str) and _fits_header(session_header)):
        session_header = None
    _refuse(violations)
    if default_session_id and not body.get("session_id") and not body.get("previous_response_id"):
        body = body | {"session_id": default_session_id}
    content = canonical(body)
    if len(content) > BODY_LIMIT:
        raise CallerError("request.too_large", f"The provider takes at most {BODY_LIMIT} bytes.")
    return StartBody(
        content=content,
        requested_session=body.get("session_id") or None,
        history=_history_kind(body),
        session_header=session_header,
        session_key=session_key,
        dropped=tuple(sorted(name[:64] for name in dropped)),
    )


def check_run_input(operation: Operation, given: dict[str, Any]) -> RunInput:
    """The input of run_status, run_events, run_approval or run_stop (runs page; AIP 11.3, 11.5).

    Raises CallerError ``action.input_schema_invalid`` with ``details.violations``.
    """
    wrapped = given.get("body")
    body: dict[str, Any] = wrapped if isinstance(wrapped, dict) else {}
    run_id = given["run_id"] if "run_id" in given else body.get("run_id")
    violations = _check_session_key(given.get("session_key"))
    if not is_run_id(run_id) or run_id in (".", ".."):
        violations.append(_violation("run_id", "must be a handle of 1 to 512 bytes without control characters"))
    max_events = EVENTS_DEFAULT
    if operation is Operation.RUN_EVENTS:
        max_events = given.get("max_events", EVENTS_DEFAULT)
        if not isinstance(max_events, int) or isinstance(max_events, bool) or not 1 <= max_events <= EVENTS_LIMIT:
            violations.append(_violation("max_events", f"must be an integer from 1 to {EVENTS_LIMIT}"))
    choice, resolve_all = "", False
    reviewed: tuple[str, ...] = ()
    if operation is Operation.RUN_APPROVAL:
        choice, resolve_all, found = _check_choice(body if "choice" in body else given)
        violations += found
        reviewed, found = _check_reviewed(given.get("reviewed"))
        violations += found
    _refuse(violations)
    return RunInput(
        run_id=str(run_id),
        max_events=max_events,
        choice=choice,
        resolve_all=resolve_all,
        reviewed=reviewed,
        session_key=given.get("session_key"),
    )


def _check_choice(body: dict[str, Any]) -> tuple[str, bool, list[dict[str, str]]]:
    violations = []
    word = body.get("choice")
    choice = CHOICE_ALIASES.get(word, word) if isinstance(word, str) else ""
    if choice not in CHOICES:
        violations.append(_violation("choice", f"must be one of {', '.join((*CHOICES, *CHOICE_ALIASES))}"))
    violations += [
        _violation(name, "must be true or false")
        for name in ("all", "resolve_all")
        if not isinstance(body.get(name, False), bool)
    ]
    return choice, body.get("all") is True or body.get("resolve_all") is True, violations


def _check_reviewed(given: Any) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    digests = given if isinstance(given, list) else [] if given is None else [given]
    if all(isinstance(digest, str) and _DIGEST.match(digest) for digest in digests):
        return tuple(dict.fromkeys(digests)), []
    return (), [_violation("reviewed", "must be the digest of a reviewed request, or a list of such digests")]


def _fits_header(value: str) -> bool:
    return len(value) <= HEADER_LIMIT and _VISIBLE.match(value) is not None


def _header(name: str, value: str) -> tuple[str, str]:
    if not _fits_header(value):
        raise CallerError(
            PREFIX + "configuration_or_input", f"The value for {name} must be visible ASCII of at most 16 KiB."
        )
    return name, value


def _headers(
    trusted: Trusted,
    *,
    keyed: bool = False,
    session_key: str | None = None,
    session_header: str | None = None,
    accept: str = "application/json",
    last_event_id: str | None = None,
) -> tuple[tuple[str, str], ...]:
    """The headers of one call (AIP 11.5). Facts that are not there give no header; the first three have to be."""
    required = (
        ("X-AIP-Principal-Id", trusted.principal),
        ("X-AIP-Authentication-Issuer", trusted.issuer),
        ("X-AIP-Tenant-Id", trusted.tenant),
    )
    optional = (
        ("X-AIP-Session-Id", trusted.session_id),
        ("X-AIP-Correlation-Id", trusted.trace_id or trusted.correlation_id),
        ("X-AIP-Delegation-Chain", trusted.delegation_chain),
        ("X-AIP-Trace-Id", trusted.trace_id),
        ("X-AIP-Deadline-Unix-Ms", "" if trusted.deadline_unix_ms is None else str(trusted.deadline_unix_ms)),
        ("Idempotency-Key", trusted.idempotency_key if keyed else ""),
        ("X-Hermes-Session-Id", session_header or ""),
        ("X-Hermes-Session-Key", session_key or ""),
        ("Last-Event-ID", last_event_id or ""),
    )
    given = (*required, *((name, value) for name, value in optional if value), ("Accept", accept))
    return tuple(_header(name, value) for name, value in given)


def _segment(value: str) -> str:
    """One path segment. Dots alone would climb, whatever their encoding."""
    encoded = "" if _CONTROL.search(value) else quote(value, safe="")
    if not value.strip() or value in (".", "..") or not 0 < len(encoded) <= SEGMENT_LIMIT:
        raise CallerError(PREFIX + "configuration_or_input", "The identifier cannot stand in a path.")
    return encoded


_JSON = ("Content-Type", "application/json")


def start_request(
    body: bytes, *, session_key: str | None, trusted: Trusted, session_header: str | None = None
) -> Outgoing:
    """POST /v1/runs with exactly these bytes, 60 s (runs page, Start a run)."""
    headers = _headers(trusted, keyed=True, session_key=session_key, session_header=session_header)
    return Outgoing(method="POST", path="/v1/runs", headers=(*headers, _JSON), body=body, timeout_ms=START_TIMEOUT_MS)


def status_request(run_id: str, trusted: Trusted, *, session_key: str | None = None) -> Outgoing:
    """GET /v1/runs/{run_id}, 30 s (runs page, Poll run status)."""
    headers = _headers(trusted, session_key=session_key)
    return Outgoing(method="GET", path=f"/v1/runs/{_segment(run_id)}", headers=headers, timeout_ms=TIMEOUT_MS)


def events_request(
    run_id: str, last_event_id: str | None, trusted: Trusted, *, session_key: str | None = None
) -> Outgoing:
    """GET /v1/runs/{run_id}/events. 30 s bound the wait for the answer's headers, not the stream (runs page)."""
    headers = _headers(trusted, session_key=session_key, accept="text/event-stream", last_event_id=last_event_id)
    return Outgoing(method="GET", path=f"/v1/runs/{_segment(run_id)}/events", headers=headers, timeout_ms=TIMEOUT_MS)


def approval_request(
    run_id: str,
    choice: str,
    resolve_all: bool,
    request_id: str | None,
    trusted: Trusted,
    *,
    session_key: str | None = None,
) -> Outgoing:
    """POST /v1/runs/{run_id}/approval, 30 s. Only a request id that the provider gave is named (runs page, Approve)."""
    content: dict[str, Any] = {"choice": choice, "resolve_all": resolve_all}
    if request_id:
        content["request_id"] = request_id
    return Outgoing(
        method="POST",
        path=f"/v1/runs/{_segment(run_id)}/approval",
        headers=(*_headers(trusted, keyed=True, session_key=session_key), _JSON),
        body=canonical(content),
        timeout_ms=TIMEOUT_MS,
    )


def stop_request(run_id: str, trusted: Trusted, *, session_key: str | None = None) -> Outgoing:
    """POST /v1/runs/{run_id}/stop without a body, 30 s (runs page, Stop)."""
    headers = _headers(trusted, keyed=True, session_key=session_key)
    return Outgoing(method="POST", path=f"/v1/runs/{_segment(run_id)}/stop", headers=headers, timeout_ms=TIMEOUT_MS)


def _probe(path: str, *, authenticated: bool = True) -> Outgoing:
    headers = (("Accept", "application/json"),)
    return Outgoing(method="GET", path=path, headers=headers, timeout_ms=PROBE_TIMEOUT_MS, authenticated=authenticated)


def health_request() -> Outgoing:
    """GET /health, without the key, 10 s."""
    return _probe("/health", authenticated=False)


def health_detailed_request() -> Outgoing:
    """GET /health/detailed, 10 s: process and drain state."""
    return _probe("/health/detailed")


def models_request() -> Outgoing:
    """GET /v1/models, 10 s."""
    return _probe("/v1/models")


def capabilities_request() -> Outgoing:
    """GET /v1/capabilities, 10 s: the feature flags."""
    return _probe("/v1/capabilities")


def session_request(session_id: str) -> Outgoing:
    """GET /api/sessions/{session_id}, 10 s: the trace that a start leaves."""
    return _probe(f"/api/sessions/{_segment(session_id)}")


def session_messages_request(session_id: str) -> Outgoing:
    """GET /api/sessions/{session_id}/messages, 10 s."""
    return _probe(f"/api/sessions/{_segment(session_id)}/messages")
