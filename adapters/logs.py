"""Logs as JSON lines: a stable dotted event name, bound context, and nothing that must not be told.

Modules call standard `logging` (``logger.info("attempt.claimed", extra={...})``); `bound` adds members to every line
that is written inside it. Members whose name says that they hold a secret or private content are dropped, tracebacks
keep places and lose messages and values, and what a text still looks like a credential is masked.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from enum import Enum
from typing import Any, TextIO

import orjson
import structlog
from structlog.typing import EventDict, WrappedLogger

from domain.errors import HostError
from domain.values import from_unix, rfc3339

LIBRARIES = (
    "httpx",
    "httpcore",
    "psycopg",
    "psycopg.pool",
    "eventsourcing",
    "uvicorn.access",
    "uvicorn.error",
    "asyncio",
)
TEXT_LIMIT = 4096
DROPPED = frozenset(
    {
        "access_token", "answer", "api_key", "authorization", "bearer", "body", "command", "content", "cookie", "data",
        "dsn", "frames", "headers", "idempotency_key", "input", "key_bytes", "master_key", "output", "password",
        "preview", "prompt", "proxy_authorization", "raw", "request_body", "result", "secret", "seed", "session_key",
        "set_cookie", "token", "tokens", "x_hermes_session_key",
    }
)  # fmt: skip
_CREDENTIAL = re.compile(r"(?i)(\bbearer\s+|\bpassword\s*=\s*|://[^/\s:@]*:)[^\s@'\"]+")
_OWN = frozenset({"_record", "_from_structlog", "exc_info", "event"})


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (standard error) as JSON lines; replaces earlier handlers.

    A record that cannot be written is given up silently: the library's own report would print its arguments.
    """
    logging.raiseExceptions = False
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.contextvars.merge_contextvars, structlog.stdlib.ExtraAdder()],
            processors=[line_of],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def bound(**context: object) -> AbstractContextManager[Any]:
    """Members (action, endpoint, run, attempt, fence) for every line written inside, also by tasks started there."""
    return structlog.contextvars.bound_contextvars(**context)


def line_of(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """One line of JSON for one record."""
    record: logging.LogRecord = event["_record"]
    line: dict[str, object] = {
        "at": rfc3339(from_unix(record.created)),
        "level": record.levelname.lower(),
        "event": _told(event["event"]),
        "logger": record.name,
    }
    line |= {key: value for key, value in _members(event).items() if key not in line}
    raised = event.get("exc_info")
    if raised and raised[1] is not None:
        line["fault"] = fault_of(raised[1])
    return orjson.dumps(line).decode()


def fault_of(error: BaseException) -> dict[str, object]:
    """An exception as its type, the code of a HostError, the places it passed, and what caused it."""
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    fault: dict[str, object] = {"type": type(error).__qualname__, "places": places[-20:]}
    if isinstance(error, HostError):
        fault |= {"code": error.code, "message": _told(error.message)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and cause is not error:
        fault["cause"] = fault_of(cause)
    if isinstance(error, BaseExceptionGroup):
        fault["parts"] = [fault_of(part) for part in error.exceptions[:10]]
    return fault


def _members(values: Mapping[Any, Any]) -> dict[str, object]:
    return {
        str(key): _told(value)
        for key, value in values.items()
        if key not in _OWN and str(key).lower().replace("-", "_") not in DROPPED
    }


def _told(value: object) -> object:
    """A value as JSON; of what is no plain value only the type is told."""
    match value:
        case None | bool() | float():
            return value
        case int():
            return int(value) if -(2**63) <= value < 2**64 else str(value)
        case Enum():
            return _told(value.value)
        case str():
            text = value.encode(errors="replace").decode()[:TEXT_LIMIT]
            return _CREDENTIAL.sub(r"\1***", text)
        case datetime():
            return rfc3339(value)
        case Mapping():
            return _members(value)
        case list() | tuple() | set() | frozenset():
            return [_told(item) for item in value]
        case _:
            return f"<{type(value).__qualname__}>"
