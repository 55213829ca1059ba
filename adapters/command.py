"""Commands of the journal: what is appended, what is answered, and the packed form that the writer joins.

A command is a list of rows over one or more histories, stored all or none. Everything that can be wrong with one
command by itself is found here, in its caller; what passes is packed into PostgreSQL's binary array elements once, and
those bytes are what every try sends.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence, Set
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import lru_cache

import msgspec

from domain.values import Fence

FENCE_PREFIX = "-/fence/"
NAME_BYTES = 400  # a tenant, an endpoint and a run, each as long as it may be
EVENT_BYTES = 24 * 1024 * 1024
COMMAND_BYTES = 48 * 1024 * 1024  # the largest answer of a provider stands twice in its command, sealed
LAST_VERSION = 2**63 - 1
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

_NULL = struct.pack(">i", -1)
_BIGINT = struct.Struct(">iq")
_LENGTH = struct.Struct(">i")
_COUNT = struct.Struct(">ii")


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a history. `version` rises by one from 1; `position` is the notification id of a row that was read."""

    history: str
    version: int
    topic: str
    state: bytes
    position: int = 0


class Verdict(Enum):
    """What became of a command. All but `UNLEASED` and `UNKNOWN` stay true for ever."""

    COMMITTED = "committed"
    CONFLICT = "conflict"
    FENCED = "fenced"
    UNLEASED = "unleased"
    EXPIRED = "expired"
    REJECTED = "rejected"
    NOT_APPENDED = "not_appended"
    UNKNOWN = "unknown"


class Outcome(msgspec.Struct, frozen=True):
    """A verdict; `position` is the notification id of the command's last row when committed, else 0."""

    verdict: Verdict
    position: int = 0
    detail: str = ""


class NotConfirmed(Exception):
    """What was read may exist on this machine only: it may not be told."""


class NotTaken(Exception):
    """The sequence was not acknowledged here; `outcome` says why. Nothing may be decided under it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.verdict.value}: {outcome.detail}")
        self.outcome = outcome


class Takeover(msgspec.Struct, frozen=True):
    """Advances the fence history of `replica`, and only from `expected` (0: it has no sequence yet)."""

    replica: str
    expected: int


class Packed(msgspec.Struct, frozen=True):
    """A checked command as binary array elements, one string for each array of the function's call."""

    histories: Set[str]
    guards: tuple[bytes, bytes, bytes, bytes, bytes, bytes]
    columns: tuple[bytes, bytes, bytes, bytes]
    count: int
    size: int
    takeover: bool


def fence_history(replica: str) -> str:
    """The history whose highest version is the current sequence of `replica`."""
    return FENCE_PREFIX + replica


def pack(rows: Sequence[Stored], fence: Fence | None, takeover: Takeover | None, not_after: datetime | None) -> Packed:
    """Check and pack one command. Raises `ValueError` when the rows cannot be one.

    Rows of fence histories belong to takeovers alone, and there only the first row is one. Versions of every other
    history begin at 1 and rise by one in the order given. Names are UTF-8 without NUL; a state is bytes.
    """
    last: dict[str, int] = {}
    histories, versions, topics, states = [], [], [], []
    own = takeover is not None
    for row in rows:
        history, version, content = row.history, row.version, row.state
        if history.startswith(FENCE_PREFIX) is not own:
            raise ValueError("rows of a fence history are made by takeovers alone")
        own = False
        if not 1 <= version <= LAST_VERSION:
            raise ValueError("versions begin at 1")
        if last.get(history, version - 1) != version - 1:
            raise ValueError("versions of a history rise by one within a command")
        last[history] = version
        if not isinstance(content, bytes):
            raise ValueError("the state of a row is bytes")
        if len(content) > EVENT_BYTES:
            raise ValueError(f"an event is at most {EVENT_BYTES} bytes")
        histories.append(_name(history))
        versions.append(_BIGINT.pack(8, version))
        topics.append(_known_name(row.topic))
        states.append(_LENGTH.pack(len(content)))
        states.append(content)
    if sum(map(len, states)) > COMMAND_BYTES:
        raise ValueError(f"a command is at most {COMMAND_BYTES} bytes")
    columns = (b"".join(histories), b"".join(versions), b"".join(topics), b"".join(states))
    return Packed(
        histories=last.keys(),
        guards=_guards(fence, takeover, not_after, len(rows)),
        columns=columns,
        count=len(rows),
        size=sum(map(len, columns)),
        takeover=takeover is not None,
    )


@lru_cache(maxsize=1024)
def _guards(
    fence: Fence | None, takeover: Takeover | None, not_after: datetime | None, count: int
) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
    if fence is not None and not 1 <= fence.sequence <= LAST_VERSION:
        raise ValueError("a fence has a sequence from 1")
    return (
        _NULL if fence is None else _name(fence_history(fence.replica)),
        _NULL if fence is None else _BIGINT.pack(8, fence.sequence),
        _NULL if takeover is None else _name(fence_history(takeover.replica)),
        _NULL if takeover is None else _BIGINT.pack(8, takeover.expected),
        _NULL if not_after is None else _BIGINT.pack(8, (not_after - EPOCH) // MICROSECOND),
        _COUNT.pack(4, count),
    )


def _name(text: str) -> bytes:
    data = text.encode()
    if not data or len(data) > NAME_BYTES or b"\0" in data:
        raise ValueError(f"names of histories and topics are 1 to {NAME_BYTES} bytes of UTF-8 without NUL")
    return _LENGTH.pack(len(data)) + data


_known_name = lru_cache(maxsize=1024)(_name)
