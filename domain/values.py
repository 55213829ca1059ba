"""Small frozen values that cannot be built wrong: ids, scopes, digests, times, and private content as it is sealed."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec

ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
KEY_LIMIT = 255
RUN_ID_LIMIT = 512


class Effect(StrEnum):
    """What may have happened in the world because of us."""

    NONE = "none"
    POSSIBLE = "possible"
    CONFIRMED = "confirmed"


class Operation(StrEnum):
    """The five governed operations of an endpoint (runs page, Operations)."""

    RUN_START = "run_start"
    RUN_STATUS = "run_status"
    RUN_EVENTS = "run_events"
    RUN_APPROVAL = "run_approval"
    RUN_STOP = "run_stop"


MUTATIONS = frozenset({Operation.RUN_START, Operation.RUN_APPROVAL, Operation.RUN_STOP})


class Mode(StrEnum):
    """How the caller waits (AIP 3.1)."""

    SYNC = "sync"
    ASYNC = "async"
    STREAMING = "streaming"


class Fence(msgspec.Struct, frozen=True):
    """Fencing token of one host process: its replica and the sequence that it took at start."""

    replica: str
    sequence: int


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """A verified principal as it acts: identity, tenant and what it may do. Never built from a request body."""

    id: str
    kind: str = "service"
    tenant: str = "default"
    scopes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    def may(self, scope: str) -> bool:
        """True if the scope, its ``:any`` form or ``*`` is held."""
        return bool({scope, f"{scope}:any", "*"} & set(self.scopes))

    def may_any(self, scope: str) -> bool:
        """True if the scope reaches beyond the principal's own objects."""
        return bool({f"{scope}:any", "*"} & set(self.scopes))


SYSTEM = Actor(id="system:reconciler", kind="system")


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """Private content as ciphertext, with all that opening it needs except the key.

    ``key`` names a data key; ``history`` and ``version`` are the associated data, so a token that was moved to another
    event does not open. ``size`` counts the plain bytes.
    """

    key: str
    history: str
    version: int
    size: int
    box: str


class Plain(msgspec.Struct, frozen=True, kw_only=True):
    """Private content before it is stored: JSON text as bytes. The codec turns it into ``Sealed``."""

    content: bytes

    def __repr__(self) -> str:
        return f"Plain(<{len(self.content)} bytes>)"


Private = Plain | Sealed


class PrivateScope(msgspec.Struct, frozen=True, kw_only=True):
    """Whose data key seals the private content of an event: one key per tenant, principal and month."""

    tenant: str
    principal: str


_CANONICAL = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(value: Any) -> bytes:
    """Canonical JSON (AIP 4): keys sorted by UTF-8 bytes at every depth, compact, nothing dropped.

    Code points and the bytes of their UTF-8 have the same order.
    """
    return _CANONICAL.encode(value).encode()


def sha256(data: bytes) -> str:
    """64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def milliseconds(span: timedelta) -> int:
    """Whole milliseconds of a span."""
    return int(span / timedelta(milliseconds=1))


def after(at: datetime, ms: int) -> datetime:
    """The time ``ms`` milliseconds later."""
    return at + timedelta(milliseconds=ms)


def rfc3339(at: datetime) -> str:
    """RFC 3339 in UTC with ``Z`` and without trailing zeros of the fraction (AIP 1.4)."""
    text = at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
    return text.rstrip("0").rstrip(".") + "Z"


def t9(at: datetime) -> list[int]:
    """The nine-integer form of a time (AIP 1.4)."""
    utc = at.astimezone(UTC)
    return [utc.year, utc.timetuple().tm_yday, utc.hour, utc.minute, utc.second, utc.microsecond * 1000, 0, 0, 0]


def from_unix(seconds: float) -> datetime:
    """A provider's Unix time as UTC."""
    return datetime.fromtimestamp(seconds, UTC)
