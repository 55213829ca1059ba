"""Hermes's words, and what each of its answers does and does not prove.

An ``Exchange`` is one HTTP exchange as it was seen. The ``judge_*`` functions turn it into a ``Judgement`` by the
failure table (runs page, Handle failures; AIP 11.8): an exception class proves almost nothing, the sent mark and a
complete well-formed answer do.
"""

from __future__ import annotations

import json
import math
import re
from enum import StrEnum
from typing import Any

import msgspec

from domain.errors import PREFIX
from domain.values import Effect, Operation

TEXT_LIMIT = 2_000
WORD_LIMIT = 256
LARGEST_NUMBER = 2**53 - 1
FLAGS_KEPT = 256
WARNING_SIGN = "\u26a0"
INTERRUPTION = "Operation interrupted"
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")

# Run states of the provider (runs page, Poll run status).
LIVE_STATES = frozenset({"queued", "running", "waiting_for_approval", "stopping"})
TERMINAL_STATES = frozenset({"completed", "failed", "cancelled", "interrupted"})
TERMINAL_EVENTS = {
    "run.completed": "completed",
    "run.failed": "failed",
    "run.cancelled": "cancelled",
    "run.interrupted": "interrupted",
}
STREAM_TERMINAL_NAMES = frozenset(TERMINAL_EVENTS) | {
    "done",
    "response.completed",
    "response.failed",
    "response.incomplete",
    "error",
}

CHOICES = ("once", "session", "always", "deny")
CHOICE_ALIASES = {"approve": "once", "allow": "once"}


class Failure(StrEnum):
    """Why an exchange is not a complete answer."""

    NONE = ""
    CONNECT_REFUSED = "connect_refused"
    DNS = "dns"
    TLS = "tls"
    CONNECT_TIMEOUT = "connect_timeout"
    POOL_TIMEOUT = "pool_timeout"
    BAD_REQUEST = "bad_request"  # refused by our own client before connecting
    WRITE_ERROR = "write_error"
    READ_ERROR = "read_error"
    TIMEOUT = "timeout"
    PROTOCOL = "protocol"
    DECODING = "decoding"
    TOO_LARGE = "too_large"
    CANCELLED = "cancelled"


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the provider, without its bearer token. ``path`` is one of our templates, already encoded.

    ``timeout_ms`` is the total deadline of the exchange. ``body`` is JSON text or ``None`` for no body at all.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    timeout_ms: int = 30_000
    authenticated: bool = True


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP exchange as seen: ``sent`` is the mark that a byte of the request may have left.

    ``body`` holds the exact bytes received up to the bound, before any decoding.
    """

    sent: bool
    failure: Failure = Failure.NONE
    status: int | None = None
    content_type: str = ""
    retry_after: str = ""
    location: str = ""
    body: bytes = b""

    @property
    def complete(self) -> bool:
        return self.failure is Failure.NONE and self.status is not None


class RawFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One SSE frame after its blank line. ``raw`` holds the exact bytes; ``fault`` names why they cannot be decoded."""

    raw: bytes
    event: str = ""
    id: str = ""
    data: str = ""
    fault: str = ""


class Comment(msgspec.Struct, frozen=True):
    """A comment line: proves that the stream lives, not that the run moves."""

    text: str


class StreamEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The last item of a stream. ``reason``: closed, cut, idle, line_too_large, frame_too_large, stream_too_large,
    refused (then ``exchange`` holds the answer), not_connected."""

    reason: str
    exchange: Exchange | None = None


class StreamOpened(msgspec.Struct, frozen=True):
    """The response headers of a 200 event stream arrived."""


StreamItem = StreamOpened | RawFrame | Comment | StreamEnd


class Verdict(StrEnum):
    """What an exchange proves about a mutation."""

    NOT_SENT = "not_sent"
    AMBIGUOUS = "ambiguous"
    ACCEPTED = "accepted"
    REFUSED = "refused"


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict with the facts that it rests on. ``code`` is the AIP 11.8 code of what was seen.

    ``run_id`` (start), ``choice`` and ``resolved`` (approval), ``state`` (stop, start) come from accepted answers only.
    """

    verdict: Verdict
    code: str = ""
    cause: str = ""
    http_status: int | None = None
    provider_code: str = ""
    retry_after_ms: int | None = None
    run_id: str = ""
    choice: str = ""
    resolved: int | None = None
    state: str = ""
    replayed: bool = False

    @property
    def effect(self) -> Effect:
        match self.verdict:
            case Verdict.ACCEPTED:
                return Effect.CONFIRMED
            case Verdict.AMBIGUOUS:
                return Effect.POSSIBLE
            case _:
                return Effect.NONE


def parse_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object of a body, or ``None``. Nesting that Python cannot follow counts as unreadable."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def provider_error(body: bytes) -> tuple[str, str] | None:
    """(code, message) if the body has Hermes's error shape, else ``None``; the code may be empty."""
    value = parse_object(body)
    error = value.get("error") if value else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        code = error.get("code")
        return (word(code), error["message"][:TEXT_LIMIT])
    if isinstance(error, str):
        return ("", error[:TEXT_LIMIT])
    return None


def word(value: object, limit: int = WORD_LIMIT) -> str:
    """A provider's text as it may stand in clear: bounded, and without what no store and no reader can take."""
    return _UNSTORABLE.sub("\ufffd", value[:limit]) if isinstance(value, str) else ""


def number(value: object) -> int | None:
    """A provider's integer, if it is one that can be stored."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER else None


def _retry_after_ms(value: str) -> int | None:
    return int(value) * 1000 if value.isascii() and value.isdigit() and len(value) <= 6 else None


def _failure_code(exchange: Exchange) -> str:
    match exchange.failure:
        case Failure.TIMEOUT:
            return PREFIX + "deadline_exceeded"
        case Failure.CANCELLED:
            return PREFIX + "cancelled"
        case Failure.DECODING | Failure.TOO_LARGE | Failure.PROTOCOL:
            return PREFIX + "invalid_response"
        case Failure.BAD_REQUEST:
            return PREFIX + "configuration_or_input"
        case _:
            return PREFIX + "transport"


def _status_code(status: int, provider_code: str) -> str:
    if status in (401, 403):
        return PREFIX + "authentication"
    if status == 429 or (status == 503 and provider_code == "gateway_draining"):
        return PREFIX + "remote_refused_temporarily"
    if status == 404 and provider_code == "run_not_found":
        return PREFIX + "run_not_found"
    if status == 409 and provider_code in ("approval_not_active", "approval_not_pending"):
        return PREFIX + provider_code
    if 300 <= status < 400:
        return PREFIX + "redirected"
    if status >= 500:
        return PREFIX + "remote_temporary"
    return PREFIX + "remote_rejected"


def _judge_failure(exchange: Exchange) -> Judgement | None:
    """The verdict if the exchange is not an acceptable 2xx, else ``None``."""
    if not exchange.complete:
        return Judgement(
            verdict=Verdict.AMBIGUOUS if exchange.sent else Verdict.NOT_SENT,
            code=_failure_code(exchange),
            cause=exchange.failure.value,
            http_status=exchange.status,
        )
    status = exchange.status or 0
    if 200 <= status < 300:
        return None
    error = provider_error(exchange.body)
    provider_code = error[0] if error else ""
    definite = error is not None and (400 <= status < 500 or (status == 503 and provider_code == "gateway_draining"))
    return Judgement(
        verdict=Verdict.REFUSED if definite else Verdict.AMBIGUOUS,
        code=_status_code(status, provider_code),
        cause=f"http_{status}",
        http_status=status,
        provider_code=provider_code,
        retry_after_ms=_retry_after_ms(exchange.retry_after),
    )


def _unusable(exchange: Exchange, cause: str) -> Judgement:
    return Judgement(
        verdict=Verdict.AMBIGUOUS,
        code=PREFIX + "invalid_response",
        cause=cause,
        http_status=exchange.status,
    )


def is_run_id(value: object) -> bool:
    """True for a handle that can be kept and sent: up to 512 bytes, not blank, no control characters, no path climb."""
    return (
        isinstance(value, str)
        and value.strip() not in ("", ".", "..")
        and not any(0xD800 <= ord(char) < 0xE000 for char in value)
        and len(value.encode()) <= 512
        and not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in value)
    )


def judge_start(exchange: Exchange) -> Judgement:
    """Accepted only on a complete 202 with a usable handle: proves that the run was created and scheduled, no more."""
    failed = _judge_failure(exchange)
    if failed:
        return failed
    if exchange.status != 202:
        return _unusable(exchange, f"http_{exchange.status}")
    body = parse_object(exchange.body)
    if body is None:
        return _unusable(exchange, "not_json")
    run_id = body.get("run_id")
    if not isinstance(run_id, str) or not is_run_id(run_id):
        return _unusable(exchange, "no_run_id")
    return Judgement(
        verdict=Verdict.ACCEPTED,
        http_status=202,
        run_id=run_id,
        state=word(body.get("status")),
        replayed=body.get("replayed") is True,
    )


def judge_approval(exchange: Exchange, run_id: str) -> Judgement:
    """Accepted on a complete 200 for this very run: the provider applied a choice to ``resolved`` entries."""
    failed = _judge_failure(exchange)
    if failed:
        return failed
    if exchange.status != 200:
        return _unusable(exchange, f"http_{exchange.status}")
    body = parse_object(exchange.body)
    if body is None:
        return _unusable(exchange, "not_json")
    if body.get("run_id") != run_id:
        return _unusable(exchange, "other_run_id")
    return Judgement(
        verdict=Verdict.ACCEPTED,
        http_status=exchange.status,
        choice=word(body.get("choice")),
        resolved=number(body.get("resolved")),
    )


def judge_stop(exchange: Exchange, run_id: str) -> Judgement:
    """Accepted on a complete 200 for this very run. ``stopping`` is a receipt and no proof of cancellation."""
    failed = _judge_failure(exchange)
    if failed:
        return failed
    if exchange.status != 200:
        return _unusable(exchange, f"http_{exchange.status}")
    body = parse_object(exchange.body)
    if body is None:
        return _unusable(exchange, "not_json")
    state = body.get("status")
    if body.get("run_id") != run_id or not isinstance(state, str):
        return _unusable(exchange, "other_run_id" if body.get("run_id") != run_id else "no_status")
    return Judgement(verdict=Verdict.ACCEPTED, http_status=exchange.status, state=word(state))


def judge(operation: Operation, exchange: Exchange, run_id: str = "") -> Judgement:
    """The verdict of a mutation's exchange."""
    match operation:
        case Operation.RUN_START:
            return judge_start(exchange)
        case Operation.RUN_APPROVAL:
            return judge_approval(exchange, run_id)
        case Operation.RUN_STOP:
            return judge_stop(exchange, run_id)
        case _:
            raise ValueError(f"{operation} is no mutation")


def _seconds(value: object) -> float | None:
    found = value if isinstance(value, float) and math.isfinite(value) else number(value)
    return None if found is None else float(found)


class StatusReading(msgspec.Struct, frozen=True, kw_only=True):
    """One status read. ``state`` is the provider's own word; empty if the read gave no status object for this run.

    ``problem`` is empty on success, else the AIP 11.8 code; ``missing`` says that the process does not know the run,
    which has three possible causes (unknown id, expiry, restart) and proves nothing about effects.
    """

    state: str = ""
    problem: str = ""
    cause: str = ""
    missing: bool = False
    http_status: int | None = None
    session_id: str = ""
    last_event: str = ""
    updated_at: float | None = None
    has_output: bool = False
    marks: tuple[str, ...] = ()


def end_marks(state: str, body: dict[str, Any]) -> tuple[str, ...]:
    """Why a terminal claim of the provider deserves doubt (measured provider behaviour): stable mark words."""
    marks = []
    if state == "completed":
        output = body.get("output")
        if not isinstance(output, str) or not output.strip():
            marks.append("empty_output")
        elif output.startswith(INTERRUPTION):
            marks.append("interruption_text")
        elif output.startswith(WARNING_SIGN):
            marks.append("warning_text")
        usage = body.get("usage")
        if not isinstance(usage, dict) or not any(isinstance(n, int | float) and n for n in usage.values()):
            marks.append("no_usage")
        if body.get("completed") is False or body.get("partial") is True or body.get("interrupted") is True:
            marks.append("not_finished")
    if state == "interrupted":
        marks.append("interrupted")
    return tuple(marks)


def read_status(exchange: Exchange, run_id: str) -> StatusReading:
    """What a status read says about this run (runs page, Poll run status)."""
    if not exchange.complete:
        return StatusReading(problem=_failure_code(exchange), cause=exchange.failure.value, http_status=exchange.status)
    status = exchange.status or 0
    if status != 200:
        error = provider_error(exchange.body)
        provider_code = error[0] if error else ""
        missing = status == 404 and provider_code == "run_not_found"
        busy = status == 429 or status >= 500
        code = PREFIX + "remote_temporary" if busy else _status_code(status, provider_code)
        return StatusReading(problem=code, cause=f"http_{status}", missing=missing, http_status=status)
    body = parse_object(exchange.body)
    state = body.get("status") if body else None
    if body is None or not isinstance(state, str) or not state:
        return StatusReading(problem=PREFIX + "invalid_response", cause="not_a_status", http_status=200)
    if body.get("object") != "hermes.run":
        return StatusReading(problem=PREFIX + "invalid_response", cause="other_object", http_status=200)
    if body.get("run_id") != run_id:
        return StatusReading(problem=PREFIX + "invalid_response", cause="other_run_id", http_status=200)
    return StatusReading(
        state=word(state, 64),
        http_status=200,
        session_id=word(body.get("session_id"), 512),
        last_event=word(body.get("last_event"), 128),
        updated_at=_seconds(body.get("updated_at")),
        has_output=body.get("output") is not None,
        marks=end_marks(state, body),
    )


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint says of itself; kept with each claim. ``replay`` decides how its streams may be resumed."""

    version: str = ""
    replay: bool = False
    durable_keys: bool = False
    request_ids: bool = False
    flags: tuple[str, ...] = ()


def read_features(capabilities: Exchange, health: Exchange) -> Features:
    """Features advertised by ``/v1/capabilities`` and the version of ``/health``; unreadable answers give none."""
    health_body = parse_object(health.body) if health.complete and health.status == 200 else None
    version = word((health_body or {}).get("version"), 64)
    body = parse_object(capabilities.body) if capabilities.complete and capabilities.status == 200 else None
    features = (body or {}).get("features")
    if not isinstance(features, dict):
        return Features(version=version)
    idempotency = features.get("runs_idempotency")
    idempotency = idempotency if isinstance(idempotency, dict) else {}
    supported = idempotency.get("supported") is True
    return Features(
        version=version,
        replay=supported,
        durable_keys=supported and idempotency.get("durable") is True,
        request_ids=supported,
        flags=tuple(sorted(word(name, 64) for name, value in features.items() if value))[:FLAGS_KEPT],
    )
