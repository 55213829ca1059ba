"""Opaque cursors: a place in a list or feed, and a keyed digest that binds it to what it is a place in.

A cursor of another Action, list, filter or tenant, a provider's SSE id, a run id or a chunk id is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from domain.errors import CallerError
from domain.values import canonical

CHECK_DIGITS = 24
CURSOR_LIMIT = 2048
_ACTION = re.compile(r"aev_cursor_(\d{1,19})_(\d{1,19}|none)_(\d{1,19})_([0-9a-f]{24})\Z")
_RUN = re.compile(r"rev_cursor_(\d{1,19})_(\d{1,19})_(\d{1,9})_([0-9a-f]{24})\Z")
_LIST = re.compile(r"list_cursor_([A-Za-z0-9_-]{1,1800})_([0-9a-f]{24})\Z")

Digest = Callable[[bytes], str]


class ActionPlace(msgspec.Struct, frozen=True):
    """Where a reader of a feed stands: event version told, last chunk told (-1: none), stream version read."""

    events: int = 0
    chunk: int = -1
    stream: int = 0


class RunPlace(msgspec.Struct, frozen=True):
    """Where a reader of a run's feed stands: versions told, and frames told of the stream event after them."""

    run: int = 0
    stream: int = 0
    frames: int = 0


def _check(digest: Digest, kind: str, subject: str, place: Any) -> str:
    return digest(canonical(["cursor", kind, subject, place]))[:CHECK_DIGITS]


def _refuse() -> CallerError:
    return CallerError("query.invalid_cursor")


def action_cursor(digest: Digest, subject: str, place: ActionPlace) -> str:
    """The cursor of a place in the feed of ``subject``, an Action's history with what the reader filters by."""
    chunk = "none" if place.chunk < 0 else str(place.chunk)
    check = _check(digest, "action", subject, [place.events, place.chunk, place.stream])
    return f"aev_cursor_{place.events}_{chunk}_{place.stream}_{check}"


def read_action_cursor(digest: Digest, subject: str, cursor: str) -> ActionPlace:
    """The place of a cursor; the beginning for an empty one. CallerError ``query.invalid_cursor``."""
    if not cursor:
        return ActionPlace()
    found = _ACTION.match(cursor)
    if found is None:
        raise _refuse()
    place = ActionPlace(int(found[1]), -1 if found[2] == "none" else int(found[2]), int(found[3]))
    if action_cursor(digest, subject, place) != cursor:
        raise _refuse()
    return place


def run_cursor(digest: Digest, subject: str, place: RunPlace) -> str:
    """The cursor of a place in a run's feed."""
    check = _check(digest, "run", subject, [place.run, place.stream, place.frames])
    return f"rev_cursor_{place.run}_{place.stream}_{place.frames}_{check}"


def read_run_cursor(digest: Digest, subject: str, cursor: str) -> RunPlace:
    """As ``read_action_cursor``, for a run's feed."""
    if not cursor:
        return RunPlace()
    found = _RUN.match(cursor)
    if found is None:
        raise _refuse()
    place = RunPlace(int(found[1]), int(found[2]), int(found[3]))
    if run_cursor(digest, subject, place) != cursor:
        raise _refuse()
    return place


def list_cursor(digest: Digest, route: str, filters: Mapping[str, Any], place: Any) -> str:
    """The cursor of a place (any JSON value) in a list with these filters."""
    text = base64.urlsafe_b64encode(canonical(place)).rstrip(b"=").decode()
    return f"list_cursor_{text}_{_check(digest, route, canonical(dict(filters)).decode(), place)}"


def read_list_cursor(digest: Digest, route: str, filters: Mapping[str, Any], cursor: str) -> Any:
    """The place of a list's cursor, ``None`` for an empty one. CallerError ``query.invalid_cursor``."""
    if not cursor:
        return None
    found = _LIST.match(cursor) if len(cursor) <= CURSOR_LIMIT else None
    if found is None:
        raise _refuse()
    try:
        place = json.loads(base64.urlsafe_b64decode(found[1] + "=" * (-len(found[1]) % 4)))
    except (ValueError, binascii.Error, RecursionError) as error:
        raise _refuse() from error
    if list_cursor(digest, route, filters, place) != cursor:
        raise _refuse()
    return place
