"""Events as bytes: the envelope in the store, its closed table of topics, upcasting, and private content sealed.

The bytes are JSON, ``{"id","v","cause","fence":[replica,sequence],"e":{...}}``; ``fence`` is absent on observations and
``cause`` where nothing is named. A topic stands for the class in `domain.events.TOPICS` or for nothing: no stored name
is ever looked up anywhere else. What a newer release wrote (a higher version, a member that is not known here) is
refused instead of guessed at. Beside an event class, ``upcast_v1_v2(state)`` changes the older form in place.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache, reduce
from operator import or_
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

import msgspec
import orjson

from adapters.command import Stored
from domain.errors import IntegrityFault
from domain.events import TOPICS, Event
from domain.history import Command, Recorded
from domain.values import Fence, Plain, PrivateScope, Sealed

Rebuild = Callable[[Any], Any]


class Sealer(Protocol):
    """Makes ciphertext of private content; `adapters.vault.Vault` is one."""

    def seal(self, content: bytes, scope: PrivateScope, at: datetime, history: str, version: int) -> Sealed:
        """The content as it may be stored at this place."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What surrounds an event's own members in its bytes."""

    id: str
    v: int
    e: msgspec.Raw
    cause: str = ""
    fence: tuple[str, int] | None = None


_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
_ENVELOPE = msgspec.json.Decoder(Envelope)


def sealing_time(command: Command) -> datetime | None:
    """The time whose month chooses the data keys of a command: that of its latest event; None without events."""
    return max((event.at for change in command.changes for event in change.events), default=None)


def encode(command: Command, event_ids: Sequence[str], vault: Sealer) -> list[tuple[Stored, Recorded]]:
    """The rows of a command, in its order, each with what `decode` gives for it; one fresh id for each event.

    Every `Plain` becomes `Sealed`. Positions are 0: they come with the commit. Raises `ValueError` for private content
    without a scope and for text that is not Unicode.
    """
    at = sealing_time(command)
    ids = iter(event_ids)
    rows = []
    for change in command.changes:
        for version, event in enumerate(change.events, change.expected + 1):

            def seal(content: bytes, version: int = version, change: Any = change) -> Sealed:
                if change.scope is None or at is None:
                    raise ValueError(f"private content without a scope in {change.history}")
                return vault.seal(content, change.scope, at, change.history, version)

            recorded = Recorded(
                history=change.history,
                version=version,
                position=0,
                event_id=next(ids),
                event=_sealed(event, seal),
                fence=command.fence,
                cause=command.cause,
            )
            state = encode_event(recorded.event, recorded.event_id, command.fence, command.cause)
            rows.append((Stored(history=change.history, version=version, topic=event.topic, state=state), recorded))
    return rows


def encode_event(event: Event, event_id: str, fence: Fence | None = None, cause: str = "") -> bytes:
    """The bytes of one event that holds no `Plain` any more."""
    envelope: dict[str, Any] = {"id": event_id, "v": event.class_version}
    if cause:
        envelope["cause"] = cause
    if fence is not None:
        envelope["fence"] = [fence.replica, fence.sequence]
    envelope["e"] = msgspec.to_builtins(event)
    try:
        return orjson.dumps(envelope)
    except TypeError as error:
        raise ValueError(f"{event.topic} holds text that is not Unicode, or a number out of range") from error


def decode(stored: Stored) -> Recorded:
    """The event of a row; `Sealed` members stay as they are.

    Raises IntegrityFault `history.newer_version` for what a newer release wrote, `history.unreadable` for all else.
    """
    kind = TOPICS.get(stored.topic)
    if kind is None:
        raise _fault("history.newer_version", stored, "the topic is not known")
    try:
        envelope = _ENVELOPE.decode(stored.state)
    except _UNREADABLE as error:
        raise _fault(_code(error), stored, "the envelope") from error
    if envelope.v < 1:
        raise _fault("history.unreadable", stored, "its version")
    if envelope.v > kind.class_version:
        raise _fault("history.newer_version", stored, f"version {envelope.v} of the topic")
    try:
        event = _event(kind, envelope)
    except _UNREADABLE as error:
        raise _fault(_code(error), stored, "the event's members") from error
    if any(_tenant(sealed.history) != _tenant(stored.history) for sealed in _boxes(event)):
        raise _fault("history.unreadable", stored, "private content of another tenant")
    return Recorded(
        history=stored.history,
        version=stored.version,
        position=stored.position,
        event_id=envelope.id,
        event=event,
        fence=Fence(*envelope.fence) if envelope.fence else None,
        cause=envelope.cause,
    )


def _event(kind: type[Event], envelope: Envelope) -> Event:
    strict, rebuild = _strict_struct(kind)
    if envelope.v == kind.class_version:
        event: Event = rebuild(_decoder(strict).decode(envelope.e))
        return event
    state = orjson.loads(bytes(envelope.e))
    for version in range(envelope.v, kind.class_version):
        getattr(kind, f"upcast_v{version}_v{version + 1}")(state)
    older: Event = rebuild(msgspec.convert(state, strict))
    return older


def _code(error: Exception) -> str:
    newer = isinstance(error, msgspec.ValidationError) and "unknown field" in str(error)
    return "history.newer_version" if newer else "history.unreadable"


def _fault(code: str, stored: Stored, what: str) -> IntegrityFault:
    place = {"history": stored.history, "version": stored.version, "topic": stored.topic[:128]}
    return IntegrityFault(code, f"A stored event cannot be read: {what}.", details=place)


def _tenant(history: str) -> str:
    return history.split("/", 1)[0]


def _sealed(value: Any, seal: Callable[[bytes], Sealed]) -> Any:
    """The same value with every `Plain` in it sealed, at any depth of values and tuples."""
    if isinstance(value, Plain):
        return seal(value.content)
    if isinstance(value, msgspec.Struct):
        members = {name: getattr(value, name) for name in _private_members(type(value))}
        changed = {name: new for name, old in members.items() if (new := _sealed(old, seal)) is not old}
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        items = tuple(_sealed(item, seal) for item in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


def _boxes(value: Any) -> list[Sealed]:
    """Every `Sealed` in a value."""
    if isinstance(value, Sealed):
        return [value]
    if isinstance(value, msgspec.Struct):
        return [box for name in _private_members(type(value)) for box in _boxes(getattr(value, name))]
    if isinstance(value, tuple):
        return [box for item in value for box in _boxes(item)]
    return []


@cache
def _private_members(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The members of a struct that may hold private content, at any depth."""
    hints = get_type_hints(kind)
    return tuple(name for name in kind.__struct_fields__ if _may_be_private(hints[name]))


def _may_be_private(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation in (Plain, Sealed) or bool(_private_members(annotation))
    return any(map(_may_be_private, get_args(annotation)))


@cache
def _decoder(strict: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(strict)


@cache
def _strict_struct(kind: type[msgspec.Struct]) -> tuple[Any, Rebuild]:
    """A twin of a struct that takes no unknown members and `Sealed` where private content stands; and the way back."""
    hints = get_type_hints(kind)
    members: list[Any] = []
    ways: dict[str, Rebuild] = {}
    for field in msgspec.structs.fields(kind):
        strict, way = _strict(hints[field.name])
        default = (
            field.default
            if field.default_factory is msgspec.NODEFAULT
            else msgspec.field(default_factory=field.default_factory)
        )
        members.append((field.name, strict) if field.required else (field.name, strict, default))
        if way is not None:
            ways[field.name] = way
    twin = msgspec.defstruct(kind.__name__, members, kw_only=True, forbid_unknown_fields=True)

    def rebuild(value: Any) -> Any:
        found = msgspec.structs.asdict(value)
        for name, way in ways.items():
            found[name] = way(found[name])
        return kind(**found)

    return twin, rebuild


def _strict(annotation: Any) -> tuple[Any, Rebuild | None]:
    """What a member's type is in the twin, and how its value goes back where that is not the same."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        parts = [_strict(part) for part in get_args(annotation) if part is not Plain]
        ways = [(strict, way) for strict, way in parts if way is not None]
        union = reduce(or_, (strict for strict, _ in parts))
        if not ways:
            return union, None
        ((strict, way),) = ways
        return union, lambda value: way(value) if isinstance(value, strict) else value
    if origin is tuple and get_args(annotation)[1:] == (...,):
        strict, each = _strict(get_args(annotation)[0])
        return types.GenericAlias(tuple, (strict, ...)), (lambda value: tuple(map(each, value))) if each else None
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        closed = annotation.__struct_config__.forbid_unknown_fields
        return (annotation, None) if closed else _strict_struct(annotation)
    return annotation, None
