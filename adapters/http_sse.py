"""Answers by server-sent events (AIP 7): frames, keep-alive comments, and following a stored feed to its end.

A follower only reads what is stored. It holds nothing while its reader is slow, and losing it cancels nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio
import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Send

from adapters.http_ports import HttpPorts
from adapters.http_route import Call
from adapters.http_wire import encoded, log_fault
from domain.errors import CallerError, HostError

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Cache-Control": "no-cache, no-store", "X-Accel-Buffering": "no"}
LAST_EVENT = "last-event-id"


class Feeds:
    """The feeds that are open now; ``end`` closes them in good order, so that their readers come again elsewhere."""

    def __init__(self) -> None:
        self.ending = False
        self._open: set[anyio.CancelScope] = set()

    @contextmanager
    def opened(self) -> Iterator[anyio.CancelScope]:
        """A feed is told inside this block, unless all feeds are ended."""
        with anyio.CancelScope() as scope:
            self._open.add(scope)
            try:
                yield scope
            finally:
                self._open.discard(scope)

    def end(self) -> None:
        """End every feed; the host takes no new ones."""
        self.ending = True
        for scope in tuple(self._open):
            scope.cancel()


class FeedResponse(StreamingResponse):
    """An answer by server-sent events that ends with its feed, or with all feeds."""

    def __init__(self, frames: AsyncIterator[bytes], feeds: Feeds) -> None:
        super().__init__(frames, media_type="text/event-stream", headers=HEADERS)
        self._feeds = feeds

    async def stream_response(self, send: Send) -> None:
        """Tell the feed; a feed that was ended is complete as far as HTTP goes."""
        with self._feeds.opened() as scope:
            await super().stream_response(send)
        if scope.cancelled_caught:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at a feed gave: its frames, the cursor after them, and whether nothing can follow."""

    frames: tuple[bytes, ...]
    cursor: str
    over: bool = False
    full: bool = False


Look = Callable[[str], Awaitable[Step]]
Wait = Callable[[float], Awaitable[None]]


def frame(event: str, data: object, frame_id: str = "") -> bytes:
    """One frame; JSON has no line breaks, so its data is one line."""
    head = f"id: {frame_id}\n" if frame_id else ""
    return f"{head}event: {event}\ndata: ".encode() + encoded(data) + b"\n\n"


def position(cursor: str) -> bytes:
    """The frame that tells where a reader may go on; only after data."""
    return frame("aip.stream.cursor", {"next_cursor": cursor}, cursor)


def failure(error: HostError) -> bytes:
    """The frame that ends a feed which cannot go on."""
    return frame("aip.error", {"error": error.body()})


async def follow(
    ports: HttpPorts,
    call: Call,
    route: str,
    look: Look,
    wait: Wait,
    cursor: str,
    end: bytes = b"",
) -> AsyncIterator[bytes]:
    """Look, tell, wait, look again, until nothing can follow. ``wait`` returns early when something was stored."""
    told_at = ports.clock.monotonic()
    try:
        while True:
            if not call.still_admitted():
                raise CallerError("auth.unverified_actor")
            step = await look(cursor)
            for part in step.frames:
                yield part
            if step.frames:
                yield position(step.cursor)
                told_at = ports.clock.monotonic()
            cursor = step.cursor
            if step.over:
                if end:
                    yield end
                return
            if step.full:
                continue
            await wait(max(0.0, told_at + KEEP_ALIVE_S - ports.clock.monotonic()))
            if ports.clock.monotonic() - told_at >= KEEP_ALIVE_S:
                yield KEEP_ALIVE
                told_at = ports.clock.monotonic()
    except HostError as error:
        yield failure(error)
    except Exception as fault:  # noqa: BLE001 - told as every unforeseen fault is
        yield failure(log_fault(fault, ports.clock.new_id("trace_"), route))


def given_cursor(call: Call, parameter: str) -> str:
    """Where the caller wants to go on: the query's cursor, else the header of an event source that reconnects."""
    return parameter or call.headers.get(LAST_EVENT, "").strip()
