"""One sample of every event, made from the types of its members, and the golden files that keep how it was stored.

`python -m tests.golden.event_samples` writes the files that are missing and never touches one that is there: what was
stored once must be read for ever. The key that seals their private content is the one of `data_key.json`.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import anyio
import msgspec

from adapters.codec import encode
from adapters.vault import DataKey, MemoryKeys, Vault
from domain.events import TOPICS, Event
from domain.history import Change, Command
from domain.values import Fence, Plain, PrivateScope, Sealed

FOLDER = Path(__file__).parent / "events"
KEY_FILE = Path(__file__).parent / "data_key.json"
AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
HISTORY = "acme/act/act_0001"
SCOPE = PrivateScope(tenant="acme", principal="svc:orders")
PRIVATE = b'{"input":"a private text"}'
MASTER = bytes(range(32))


def counted_entropy(seed: int = 0) -> Callable[[int], bytes]:
    """Bytes that look random, differ from call to call and from seed to seed, and are the same in each run."""
    numbers = count()
    return lambda size: hashlib.shake_128(b"sample %d %d" % (seed, next(numbers))).digest(size)


def sample(kind: type[msgspec.Struct]) -> Any:
    """A value with every member set to something other than its default."""
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], name) for name in kind.__struct_fields__})


def _value(hint: Any, name: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _value(next(part for part in arguments if part not in (Sealed, type(None))), name)
    if origin is tuple:
        parts = arguments[:1] if arguments[1:] == (...,) else arguments
        return tuple(_value(part, name) for part in parts)
    if origin is dict:
        return {name: "text", "number": 7, "truth": True, "nothing": None}
    if hint is Plain:
        return Plain(content=PRIVATE)
    if issubclass(hint, msgspec.Struct):
        return sample(hint)
    if issubclass(hint, Enum):
        return list(hint)[-1]
    return {datetime: AT, str: f"{name} é", bool: True, int: 7, float: 1767323045.25}[hint]


def file_of(kind: type[Event]) -> Path:
    """Where the sample of an event's present version is kept."""
    return FOLDER / f"{kind.topic}.v{kind.class_version}.json"


async def write_missing() -> list[Path]:
    """Write the sample of every event version that has none."""
    keys = MemoryKeys()
    if KEY_FILE.exists():
        await keys.offer(msgspec.json.decode(KEY_FILE.read_bytes(), type=DataKey))
    vault = Vault(MASTER, keys, counted_entropy())
    await vault.prepare([SCOPE], AT)
    if not KEY_FILE.exists():
        row = await keys.any()
        KEY_FILE.write_text(json.dumps(msgspec.to_builtins(row), indent=1) + "\n")
    written = []
    for kind in TOPICS.values():
        if not file_of(kind).exists():
            change = Change(history=HISTORY, expected=0, events=(sample(kind),), scope=SCOPE)
            command = Command(changes=(change,), fence=Fence("host-1", 3), cause="action act_0001")
            ((stored, _),) = encode(command, ["evt_0190a0b0c0d070008000000000000001"], vault)
            file_of(kind).write_bytes(stored.state)
            written.append(file_of(kind))
    return written


if __name__ == "__main__":
    for path in anyio.run(write_missing):
        print(path)
