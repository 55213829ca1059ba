"""Private content in answers: opened for readers with the scope, else a mask; erased content is told as such.

Credential-looking parts of what is opened are masked for every reader.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Any

import anyio.to_thread
import msgspec

from adapters.http_ports import Opener
from domain.errors import HostError, IntegrityFault
from domain.values import Actor, Plain, Private, Sealed, rfc3339
from projections.masking import REDACTED, mask

SCOPE = "data:sensitive:read"
ERASED: dict[str, Any] = {"redacted": True, "code": "private.erased"}
UNREADABLE: dict[str, Any] = {"redacted": True, "code": "history.unreadable"}
OPENED_AT_ONCE = 64
LARGE_BYTES = 256 * 1024


class Ready(msgspec.Struct, frozen=True):
    """A part of an answer that holds JSON values alone already, however large it is."""

    value: Any


def may_open(actor: Actor) -> bool:
    """True if the reader holds the scope for private content."""
    return actor.may(SCOPE)


async def open_all(vault: Opener, privates: Sequence[Private]) -> list[bytes | HostError]:
    """Each content, or why it cannot be had; storage faults are raised."""
    opened: list[bytes | HostError] = []
    for first in range(0, len(privates), OPENED_AT_ONCE):
        some = privates[first : first + OPENED_AT_ONCE]
        try:
            opened += await vault.open_many(some)
        except HostError as fault:
            _pass_storage(fault)
            opened += [await _open_one(vault, private) for private in some]
    return opened


async def _open_one(vault: Opener, private: Private) -> bytes | HostError:
    try:
        return (await vault.open_many([private]))[0]
    except HostError as fault:
        _pass_storage(fault)
        return fault


def _pass_storage(fault: HostError) -> None:
    if fault.code != "private.erased" and not isinstance(fault, IntegrityFault):
        raise fault


def shown(opened: bytes | HostError) -> Any:
    """The JSON value of opened content with credential-looking parts masked, or the mark of what is gone."""
    if isinstance(opened, HostError):
        return ERASED if opened.code == "private.erased" else UNREADABLE
    try:
        return mask(json.loads(opened))
    except (ValueError, RecursionError):
        return mask(opened.decode("utf-8", "backslashreplace"))


async def _shown(opened: bytes | HostError) -> Any:
    """As ``shown``; large content in a thread, so that nobody waits for it."""
    if isinstance(opened, bytes) and len(opened) > LARGE_BYTES:
        return await anyio.to_thread.run_sync(shown, opened)
    return shown(opened)


async def content(vault: Opener, actor: Actor, private: Private | None) -> Any:
    """What the reader sees of one content; ``None`` if there is none."""
    if private is None:
        return None
    return await _shown((await open_all(vault, [private]))[0]) if may_open(actor) else REDACTED


async def plain(vault: Opener, actor: Actor, answer: Any) -> Any:
    """The answer as JSON values: structs as objects, times as RFC 3339, private content opened or masked."""
    found: list[Private] = []
    _gather(answer, found)
    opened: dict[int, Any] = {}
    if found and may_open(actor):
        for private, result in zip(found, await open_all(vault, found), strict=True):
            opened[id(private)] = await _shown(result)
    return _built(answer, opened)


def _gather(value: Any, found: list[Private]) -> None:
    match value:
        case Ready():
            return
        case Sealed() | Plain():
            found.append(value)
        case dict():
            for member in value.values():
                _gather(member, found)
        case list() | tuple():
            for item in value:
                _gather(item, found)
        case msgspec.Struct():
            for name in value.__struct_fields__:
                _gather(getattr(value, name), found)


def _built(value: Any, opened: dict[int, Any]) -> Any:
    match value:
        case Ready():
            return value.value
        case Sealed() | Plain():
            return opened.get(id(value), REDACTED)
        case dict():
            return {str(name): _built(member, opened) for name, member in value.items()}
        case list() | tuple():
            return [_built(item, opened) for item in value]
        case datetime():
            return rfc3339(value)
        case Enum():
            return value.value
        case msgspec.Struct():
            return {
                name: _built(member, opened)
                for name in value.__struct_fields__
                if (member := getattr(value, name)) is not None
            }
        case _:
            return value
