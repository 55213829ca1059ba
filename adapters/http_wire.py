"""Bytes in, bytes out: reading a request within bounds, strict JSON, and answers in one error shape.

A body is read up to its route's limit and within a deadline; what is not one JSON object of plain Unicode text with
finite numbers and without repeated names is refused before anything looks at it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from domain.errors import CallerError, HostError

log = logging.getLogger(__name__)

MIB = 2**20
BODY_BYTES = 4 * MIB
START_BYTES = 11 * MIB
BODY_SECONDS = 60.0
DEPTH_LIMIT = 96
QUERY_BYTES = 16 * 1024
PROBLEM_LIMIT = 240

_Kind = TypeVar("_Kind")


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The error object of every answer that refuses or fails (AIP 1.3)."""

    code: str
    message: str
    category: str
    retryable: bool
    effect: str
    retry_after_ms: int | None = None
    details: dict[str, Any] | None = None


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What every route answers instead of its result."""

    error: ErrorBody


def encoded(value: Any) -> bytes:
    """JSON bytes. Half a surrogate pair, which a provider can write and UTF-8 cannot, is told as its escape."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_utf8(value))


def _utf8(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case list():
            return [_utf8(item) for item in value]
        case dict():
            return {_utf8(name): _utf8(member) for name, member in value.items()}
        case _:
            return value


def json_answer(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; answers are never cached."""
    return Response(
        encoded(body),
        status_code=status,
        media_type="application/json",
        headers={"Cache-Control": "no-store", **(headers or {})},
    )


def error_answer(error: HostError, headers: Mapping[str, str] | None = None) -> Response:
    """A refusal or fault as it is told; a hint to wait stands in the body and, rounded up, in the header."""
    more = dict(headers or {})
    if error.retry_after_ms is not None:
        more["Retry-After"] = str(math.ceil(error.retry_after_ms / 1000))
    if error.code == "request.timeout":
        more["Connection"] = "close"
    if error.status == 401:
        more["WWW-Authenticate"] = "Bearer"
    return json_answer(error.status, {"error": error.body()}, more)


def log_fault(fault: Exception, trace_id: str, route: str) -> HostError:
    """Log an unforeseen fault under its trace id, and make the error that tells only that id."""
    log.error("http.fault", extra={"trace_id": trace_id, "route": route, "kind": type(fault).__name__}, exc_info=fault)
    return HostError("internal.fault", details={"trace_id": trace_id})


# ---- reading ---------------------------------------------------------------------------------------------------------


async def read_body(request: Request, limit: int, seconds: float = BODY_SECONDS) -> bytes:
    """The whole body. CallerError ``request.too_large`` or ``request.timeout``; ClientDisconnect when it broke off."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    body = bytearray()
    with anyio.move_on_after(seconds):
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise _too_large(limit)
        return bytes(body)
    raise CallerError("request.timeout", details={"after_ms": int(seconds * 1000)})


def _too_large(limit: int) -> CallerError:
    return CallerError("request.too_large", details={"limit_bytes": limit})


def _malformed(problem: str) -> CallerError:
    return CallerError("request.malformed", details={"problem": problem})


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. CallerError ``request.malformed`` with the kind of problem, never with content."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _malformed("not UTF-8") from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
    except CallerError:
        raise
    except RecursionError as error:
        raise _malformed("nested too deep") from error
    except ValueError as error:
        raise _malformed("not JSON") from error
    if not isinstance(value, dict):
        raise _malformed("not an object")
    _check_depth(value)
    if "\\u" in text:
        _check_text(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _malformed("a name is repeated in one object")
    return value


def _no_constant(_: str) -> NoReturn:
    raise _malformed("a number is not finite")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _malformed("a number is not finite")
    return number


def _check_depth(value: Any) -> None:
    left = [(value, 1)]
    while left:
        item, depth = left.pop()
        if depth > DEPTH_LIMIT:
            raise _malformed("nested too deep")
        members = item.values() if isinstance(item, dict) else item
        left += ((member, depth + 1) for member in members if isinstance(member, dict | list))


def _check_text(value: Any) -> None:
    """Half a surrogate pair cannot be told to anybody; NUL is refused where it is not the provider's content."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _malformed("text holds half a surrogate pair") from error
    outer = {name: member for name, member in value.items() if name not in ("input", "metadata", "memory_context")}
    if "\\u0000" in json.dumps(outer):
        raise _malformed("text holds NUL")


def typed(value: Mapping[str, Any], kind: type[_Kind], *, strict: bool = True) -> _Kind:
    """The members as their type. CallerError ``request.invalid`` names the member and never its value."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `")
        details = {"problem": what.split(" '")[0][:PROBLEM_LIMIT], "path": where.rstrip("`")[:PROBLEM_LIMIT] or "$"}
        raise CallerError("request.invalid", details=details) from None


def read_query(raw: bytes, kind: type[_Kind]) -> _Kind:
    """The query parameters as their type: each at most once, none that the route does not know."""
    if len(raw) > QUERY_BYTES:
        raise CallerError("request.invalid", "The query is too long.")
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict")
    except (UnicodeDecodeError, ValueError) as error:
        raise CallerError("request.invalid", "The query is not UTF-8.") from error
    given = dict(pairs)
    if len(given) != len(pairs):
        raise CallerError("request.invalid", "A query parameter is given twice.")
    if any("\0" in text for pair in pairs for text in pair):
        raise CallerError("request.invalid", "The query holds NUL.")
    return typed(given, kind, strict=False)


def segments(raw_path: bytes) -> tuple[str, ...] | None:
    """The decoded segments of a path; an encoded slash stays inside its segment. ``None`` if it is not UTF-8."""
    try:
        return tuple(unquote_to_bytes(part).decode() for part in raw_path.split(b"?")[0].split(b"/")[1:])
    except UnicodeDecodeError:
        return None
