"""Feeds by page and by follower: an Action's events and chunks, and everything stored of a run.

A page is read from histories after a place; the place after it is the cursor. Followers read the same pages, one after
another, woken by a notice and at least every two seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from adapters import http_sse as sse
from adapters.http_cursor import (
    ActionPlace,
    RunPlace,
    action_cursor,
    read_action_cursor,
    read_run_cursor,
    run_cursor,
)
from adapters.http_ports import HttpPorts
from adapters.http_private import plain
from adapters.http_reading import confirm, frames, history
from adapters.http_route import Call, Feed
from adapters.notices import LOOK_AGAIN_S
from domain.history import Recorded, action_history, run_history, run_token, stream_history
from domain.values import Actor
from projections import feed, folded
from projections.actions import ACTIONS, ActionRow
from projections.feed import CHUNK_EVENT
from projections.runs import RUNS, RunRow, run_key

PAGE_BYTES = 4 * 2**20
BATCHES_AT_ONCE = 8


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What of an Action's feed is read: events of these kinds (all if empty), chunks, at most ``limit`` of both."""

    limit: int
    kinds: frozenset[str] = frozenset()
    events: bool = True
    chunks: bool = True


class ActionPage(msgspec.Struct, kw_only=True):
    """A page and the place after it; ``over`` says that nothing can follow, ``full`` that more may be there now."""

    place: ActionPlace
    events: list[dict[str, Any]] = []
    chunks: list[dict[str, Any]] = []
    over: bool = False
    full: bool = False


def _stream_of(row: ActionRow) -> str:
    request = row.request
    return stream_history(request.tenant, request.endpoint_id, run_token(request.run_id)) if request.run_id else ""


async def action_page(ports: HttpPorts, actor: Actor, name: str, wanted: Wanted, place: ActionPlace) -> ActionPage:
    """What follows a place in the feed of the Action with this history."""
    events = await history(ports, name)
    row = folded(ACTIONS, events)
    if row is None:
        return ActionPage(place=place, over=True)
    page = ActionPage(place=place)
    if wanted.events:
        await _add_events(ports, actor, row, events, wanted, page)
    if wanted.chunks and not page.full and feed.chunk_limit(row.action) and row.request.run_id:
        await _add_chunks(ports, actor, row, wanted, page)
    await confirm(ports)
    page.over = feed.is_over(row.action) and not page.full
    return page


async def _add_events(
    ports: HttpPorts, actor: Actor, row: ActionRow, events: Sequence[Recorded], wanted: Wanted, page: ActionPage
) -> None:
    told: list[dict[str, Any]] = []
    for recorded in events:
        if recorded.version <= page.place.events:
            continue
        if not wanted.kinds or feed.event_kind(recorded.event) in wanted.kinds:
            if len(told) == wanted.limit:
                page.full = True
                break
            told.append(feed.told_event(recorded, row.action))
        page.place = msgspec.structs.replace(page.place, events=recorded.version)
    page.events = await plain(ports.vault, actor, told)


async def _add_chunks(ports: HttpPorts, actor: Actor, row: ActionRow, wanted: Wanted, page: ActionPage) -> None:
    """Chunks take the room that events left. The settlement was read before, so every frame it counts is stored."""
    action_id, limit = row.request.action_id, feed.chunk_limit(row.action)
    room, size = wanted.limit - len(page.events), 0
    batches = await history(ports, _stream_of(row), page.place.stream)
    for first in range(0, len(batches), BATCHES_AT_ONCE):
        some = batches[first : first + BATCHES_AT_ONCE]
        for batch, found in await frames(ports, actor, some):
            for frame in found:
                if frame.seq - 1 <= page.place.chunk:
                    continue
                if frame.seq > limit:
                    return _close(row, page, room)
                if len(page.chunks) >= room or size > PAGE_BYTES:
                    page.full = True
                    return None
                page.chunks.append(feed.chunk(action_id, frame))
                size += len(frame.raw_data) if isinstance(frame.raw_data, str) else 64
                page.place = msgspec.structs.replace(page.place, chunk=frame.seq - 1)
            page.place = msgspec.structs.replace(page.place, stream=batch.version)
        page.place = msgspec.structs.replace(page.place, stream=some[-1].version)
    return _close(row, page, room)


def _close(row: ActionRow, page: ActionPage, room: int) -> None:
    last = feed.closing_chunk(row.action)
    if last is None or last["sequence"] <= page.place.chunk:
        return
    if len(page.chunks) >= room:
        page.full = True
        return
    page.chunks.append(last)
    page.place = msgspec.structs.replace(page.place, chunk=last["sequence"])


async def action_events(ports: HttpPorts, call: Call, row: ActionRow, wanted: Wanted, cursor: str) -> dict[str, Any]:
    """``action_events`` (AIP 3.2)."""
    name = action_history(row.request.tenant, row.request.action_id)
    place = read_action_cursor(ports.vault.digest, name, cursor)
    page = await action_page(ports, call.actor, name, wanted, place)
    return {
        "action_id": row.request.action_id,
        "events": page.events,
        "chunks": page.chunks,
        "cursor": action_cursor(ports.vault.digest, name, page.place),
        "terminal": page.over,
    }


def follow_action(ports: HttpPorts, call: Call, row: ActionRow, wanted: Wanted, cursor: str) -> Feed:
    """The same by server-sent events, until the Action is over and everything is told."""
    action_id = row.request.action_id
    name, stream = action_history(row.request.tenant, action_id), _stream_of(row)
    digest = ports.vault.digest
    read_action_cursor(digest, name, cursor)

    async def look(where: str) -> sse.Step:
        page = await action_page(ports, call.actor, name, wanted, read_action_cursor(digest, name, where))
        parts = [sse.frame(event["kind"], {"event": event}, event["id"]) for event in page.events]
        parts += [sse.frame(CHUNK_EVENT, {"chunk": chunk}, f"chunk:{chunk['sequence']}") for chunk in page.chunks]
        told = action_cursor(digest, name, page.place)
        return sse.Step(frames=tuple(parts), cursor=told, over=page.over, full=page.full)

    end = sse.frame("aip.stream.terminal", {"terminal": True, "action_id": action_id})
    return Feed(frames=_woken(ports, call, "action events", (name, stream), look, cursor, end))


async def _woken(
    ports: HttpPorts, call: Call, route: str, names: Sequence[str], look: sse.Look, cursor: str, end: bytes
) -> AsyncIterator[bytes]:
    with ports.notices.watch(*filter(None, names)) as bell:

        async def look_once(where: str) -> sse.Step:
            bell.clear()
            return await look(where)

        async def wait(seconds: float) -> None:
            await bell.wait(min(seconds, LOOK_AGAIN_S))

        async for part in sse.follow(ports, call, route, look_once, wait, cursor, end):
            yield part


# ---- runs ------------------------------------------------------------------------------------------------------------


class RunPage(msgspec.Struct, kw_only=True):
    """A page of a run's feed and the place after it."""

    place: RunPlace
    events: list[dict[str, Any]] = []
    full: bool = False


def _names(row: RunRow) -> tuple[str, str]:
    tie = row.run.tie
    token = run_token(tie.run_id)
    return run_history(tie.tenant, tie.endpoint_id, token), stream_history(tie.tenant, tie.endpoint_id, token)


async def _merged(ports: HttpPorts, row: RunRow, place: RunPlace) -> list[Recorded]:
    """What both histories hold after a place, in the order of the journal and without holes.

    The stream is read before and after the run: an event of either that is told has no earlier one untold.
    """
    run_name, stream_name = _names(row)
    seen = await history(ports, stream_name, place.stream)
    events = await history(ports, run_name, place.run)
    horizon = max((recorded.position for recorded in (*seen, *events)), default=0)
    last = seen[-1].version if seen else place.stream
    later = await history(ports, stream_name, last)
    merged = [*seen, *events, *(recorded for recorded in later if recorded.position <= horizon)]
    return sorted(merged, key=lambda recorded: recorded.position)


async def run_page(ports: HttpPorts, actor: Actor, row: RunRow, limit: int, place: RunPlace) -> RunPage:
    """What follows a place in the feed of a run."""
    page = RunPage(place=place)
    stream_name = _names(row)[1]
    entries: list[dict[str, Any]] = []
    size = 0
    for recorded in await _merged(ports, row, place):
        of_stream = recorded.history == stream_name
        opened = await frames(ports, actor, [recorded]) if of_stream else []
        told = list(feed.run_entries(recorded, opened[0][1] if opened else None))
        skip = page.place.frames if of_stream else 0
        for number, entry in enumerate(told[skip:], skip + 1):
            if len(entries) >= limit or size > PAGE_BYTES:
                page.full = True
                break
            entries.append(entry)
            raw = entry["data"].get("raw_data")
            size += len(raw) if isinstance(raw, str) else 64
            if of_stream:
                page.place = msgspec.structs.replace(page.place, frames=number)
        if page.full:
            break
        page.place = (
            RunPlace(page.place.run, recorded.version, 0)
            if of_stream
            else msgspec.structs.replace(page.place, run=recorded.version)
        )
    page.events = await plain(ports.vault, actor, entries)
    await confirm(ports)
    return page


async def observation_over(ports: HttpPorts, row: RunRow) -> bool:
    """Whether the view says that nothing more is observed of a run: its end is known and nothing reads it any more."""
    tie = row.run.tie
    now = await ports.views.get(RUNS, run_key(tie.tenant, tie.endpoint_id, tie.run_id)) or row
    run = now.run
    return run.ended is not None and not now.stream.open and (run.confirmed or run.unread is not None)


async def run_events(ports: HttpPorts, call: Call, row: RunRow, limit: int, cursor: str) -> dict[str, Any]:
    """``/views/runs/{run_id}/events`` as a page."""
    subject, digest = "/".join(_names(row)), ports.vault.digest
    over = await observation_over(ports, row)
    page = await run_page(ports, call.actor, row, limit, read_run_cursor(digest, subject, cursor))
    return {
        "run_id": row.run.tie.run_id,
        "events": page.events,
        "cursor": run_cursor(digest, subject, page.place),
        "terminal": over and not page.full,
    }


def follow_run(ports: HttpPorts, call: Call, row: RunRow, limit: int, cursor: str) -> Feed:
    """The same by server-sent events, until the observation of the run is over."""
    subject, digest = "/".join(_names(row)), ports.vault.digest
    read_run_cursor(digest, subject, cursor)

    async def look(where: str) -> sse.Step:
        over = await observation_over(ports, row)
        page = await run_page(ports, call.actor, row, limit, read_run_cursor(digest, subject, where))
        return sse.Step(
            frames=tuple(sse.frame(event["kind"], {"event": event}, event["id"]) for event in page.events),
            cursor=run_cursor(digest, subject, page.place),
            over=over and not page.full,
            full=page.full,
        )

    end = sse.frame("aip.stream.terminal", {"terminal": True, "run_id": row.run.tie.run_id})
    return Feed(frames=_woken(ports, call, "run events", _names(row), look, cursor, end))
