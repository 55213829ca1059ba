"""RunStream: what was received of a run's event stream, and what may have been missed.

Frames get our own sequence numbers from 1, without holes. A span that may have been missed is a gap with a near and a
far edge; it is never closed by inference. A stream's end proves nothing about the run (runs page, Consume run events).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from domain.events import (
    Ask,
    Event,
    FramesStored,
    GapClosed,
    GapOpened,
    StreamClosed,
    SubscriptionIntended,
    SubscriptionOpened,
)
from domain.history import Recorded
from domain.provider import STREAM_TERMINAL_NAMES, TERMINAL_EVENTS, RawFrame, end_marks, number, word
from domain.values import Fence, Plain, after, milliseconds

REPLAY_WINDOW_MS = 60_000
RESUME_PAUSE_MS = 1_000
LIVED_MS = 10_000
FACTS_KEPT = 4_096


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """One frame as it arrived. A request for approval has a keyed digest of its bytes and its place in the stream."""

    at: datetime
    frame: RawFrame
    digest: str


class PendingAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A provider approval request that nothing seen so far has answered."""

    ask: Ask
    at: datetime
    version: int


class AnsweredAsk(msgspec.Struct, frozen=True, kw_only=True):
    """How a request left the queue: ``responded:<choice>`` or ``tool.completed`` at our sequence ``seq``."""

    generation: int
    how: str
    seq: int


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Frames may be missing after ``after`` and before ``before`` (``None``: the far edge is not known yet)."""

    number: int
    after: int
    reason: str
    opened_at: datetime
    before: int | None = None
    closed_by: str = ""


class RunStream(msgspec.Struct, frozen=True, kw_only=True):
    """The stream of one run as its history tells it."""

    version: int = 0
    subscriptions: int = 0
    owner: Fence | None = None
    open: bool = False
    closed_reason: str = ""
    closed_at: datetime | None = None
    intended_at: datetime | None = None
    intended_seq: int = 0
    lived_until: datetime | None = None
    last_seq: int = 0
    last_id: str = ""
    last_digest: str = ""
    last_provider_seq: int | None = None
    last_frame_at: datetime | None = None
    asked: int = 0
    pending: tuple[PendingAsk, ...] = ()
    answered: tuple[AnsweredAsk, ...] = ()
    gaps: tuple[Gap, ...] = ()
    kinds: dict[str, int] = {}
    terminal_seq: int = 0
    terminal_state: str = ""

    @property
    def crowded(self) -> bool:
        """True once a stream told more gaps, requests and kinds of events than any sane one: it is read no further."""
        told = len(self.gaps) + len(self.pending) + len(self.answered) + len(self.kinds)
        return told >= FACTS_KEPT

    @property
    def open_gap(self) -> Gap | None:
        """The gap whose far edge is not known."""
        return self.gaps[-1] if self.gaps and self.gaps[-1].before is None else None


def _settle(stream: RunStream, settles: tuple[tuple[int, str], ...]) -> RunStream:
    pending, answered = list(stream.pending), list(stream.answered)
    for seq, fact in settles:
        older = [item for item in pending if item.ask.seq < seq]
        if fact == "tool.completed":
            gone, how = older, fact
        else:
            how, _, which = fact.rpartition(":")
            exact = which.startswith("#")
            gone = [item for item in older if f"#{item.ask.generation}" == which] if exact else older[: int(which)]
        answered += [AnsweredAsk(generation=item.ask.generation, how=how, seq=seq) for item in gone]
        pending = [item for item in pending if item not in gone]
    return msgspec.structs.replace(stream, pending=tuple(pending), answered=tuple(answered))


def evolve(stream: RunStream, event: Event, version: int) -> RunStream:
    """The stream after one more event."""
    stream = msgspec.structs.replace(stream, version=version)
    replace = msgspec.structs.replace
    match event:
        case SubscriptionIntended():
            return replace(
                stream,
                subscriptions=event.number,
                owner=event.owner,
                open=True,
                closed_reason="",
                intended_at=event.at,
                intended_seq=stream.last_seq,
                lived_until=stream.lived_until or event.at,
            )
        case FramesStored():
            kinds = dict(stream.kinds)
            for kind, count in event.kinds:
                kinds[kind] = kinds.get(kind, 0) + count
            asks = tuple(PendingAsk(ask=ask, at=event.at, version=version) for ask in event.asks)
            stream = replace(
                stream,
                last_seq=event.first + event.count - 1,
                last_id=event.last_id or stream.last_id,
                last_digest=event.digest,
                last_provider_seq=(
                    event.last_provider_seq if event.last_provider_seq is not None else stream.last_provider_seq
                ),
                last_frame_at=event.at,
                asked=stream.asked + len(asks),
                pending=stream.pending + asks,
                kinds=kinds,
                terminal_seq=stream.terminal_seq or event.terminal_seq,
                terminal_state=stream.terminal_state or event.terminal_state,
            )
            return _settle(stream, event.settles)
        case GapOpened():
            gap = Gap(number=event.number, after=event.after, reason=event.reason, opened_at=event.at)
            return replace(stream, gaps=(*stream.gaps, gap))
        case GapClosed():
            gaps = tuple(
                replace(gap, before=event.before, closed_by=event.by) if gap.number == event.number else gap
                for gap in stream.gaps
            )
            return replace(stream, gaps=gaps)
        case StreamClosed():
            lasted = milliseconds(event.at - stream.intended_at) if stream.intended_at else 0
            lived = stream.last_seq > stream.intended_seq or lasted >= LIVED_MS
            return replace(
                stream,
                open=False,
                closed_reason=event.reason,
                closed_at=event.at,
                lived_until=event.at if lived else stream.lived_until,
            )
        case SubscriptionOpened():
            return stream
        case _:
            return stream


def replay(history: Iterable[Recorded]) -> RunStream:
    """The stream of a whole history."""
    stream = RunStream()
    for recorded in history:
        stream = evolve(stream, recorded.event, recorded.version)
    return stream


# ---- reading frames --------------------------------------------------------------------------------------------------


class FrameView(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded frame: its kind, its JSON object if it has one, and the provider's sequence if it gave one."""

    kind: str
    body: dict[str, Any]
    provider_seq: int | None = None

    @property
    def terminal(self) -> bool:
        """True for the events that end a stream (AIP 11.7)."""
        return self.kind in STREAM_TERMINAL_NAMES


def view_frame(frame: RawFrame) -> FrameView:
    """Decode one frame. The name comes from ``event:`` or from ``data.event``; unknown names are kept as they are."""
    try:
        value = json.loads(frame.data) if frame.data and not frame.fault else None
    except (ValueError, RecursionError):
        value = None
    body = value if isinstance(value, dict) else {}
    named = body.get("event")
    kind = named if isinstance(named, str) and named else frame.event or ("done" if frame.data == "[DONE]" else "data")
    seq = number(body.get("seq"))
    if seq is None and frame.id.isascii() and frame.id.isdigit() and len(frame.id) < 16:
        seq = int(frame.id)
    return FrameView(kind=kind, body=body, provider_seq=seq)


def _clear_kind(kind: str) -> str:
    """A provider's event name as it may stand in clear: short and plain, else ``other``."""
    return kind if len(kind) <= 64 and kind.replace(".", "").replace("_", "").isalnum() and kind.isascii() else "other"


def _ask(view: FrameView, received: Received, generation: int, seq: int) -> Ask:
    choices = view.body.get("choices")
    request_id = view.body.get("request_id")
    return Ask(
        generation=generation,
        seq=seq,
        digest=received.digest,
        choices=tuple(word(item) for item in choices if isinstance(item, str))[:16]
        if isinstance(choices, list)
        else (),
        request_id=request_id if request_id and request_id == word(request_id) else "",
    )


def _which(view: FrameView, stream: RunStream, asks: Sequence[Ask]) -> str:
    """Which requests an answer took: ``#generation`` if it names one, else how many of the oldest."""
    named = view.body.get("request_id")
    for ask in (*(item.ask for item in stream.pending), *asks):
        if isinstance(named, str) and named and ask.request_id == named:
            return f"#{ask.generation}"
    resolved = number(view.body.get("resolved"))
    return str(1 if resolved is None else max(0, resolved))


def missing_frames(stream: RunStream, batch: Sequence[Received]) -> tuple[Event, ...]:
    """Gaps inside a batch that the provider's own numbers show, with both edges; stored right behind its frames."""
    if not any(item.frame.id or b'"seq"' in item.frame.raw or b"replay." in item.frame.raw for item in batch):
        return ()  # a provider without numbers shows nothing
    found: list[Event] = []
    seq, last, number_of_gap = stream.last_seq, stream.last_provider_seq, len(stream.gaps)
    for received in batch:
        view = view_frame(received.frame)
        theirs = view.provider_seq
        if theirs is not None and last is not None and theirs <= last:
            continue
        skipped = theirs is not None and last is not None and theirs > last + 1
        if (skipped and not stream.open_gap) or view.kind == "replay.truncated":
            number_of_gap += 1
            reason = "provider_numbers_skipped" if skipped else "replay_truncated"
            found.append(GapOpened(at=received.at, number=number_of_gap, after=seq, reason=reason))
            found.append(GapClosed(at=received.at, number=number_of_gap, before=seq + 1, by="replay"))
        seq, last = seq + 1, theirs if theirs is not None else last
    return tuple(found)


def store_frames(stream: RunStream, batch: Sequence[Received], digest: str) -> FramesStored | None:
    """The event that keeps a batch of frames, without those that a replay gave twice; ``None`` if nothing is new.

    ``digest`` is the keyed digest over the exact bytes of the whole batch.
    """
    kinds: list[tuple[str, int]] = []
    asks: list[Ask] = []
    settles: list[tuple[int, str]] = []
    faults: list[str] = []
    texts: list[tuple[int, str]] = []
    seq, size, terminal_seq, terminal_state = stream.last_seq, 0, 0, ""
    last_id, last_provider_seq = "", stream.last_provider_seq
    start = batch[0].at
    for received in batch:
        view = view_frame(received.frame)
        theirs = view.provider_seq
        if theirs is not None and last_provider_seq is not None and theirs <= last_provider_seq:
            continue
        last_provider_seq = theirs if theirs is not None else last_provider_seq
        last_id = received.frame.id or last_id
        seq += 1
        size += len(received.frame.raw)
        texts.append((milliseconds(received.at - start), received.frame.raw.decode("utf-8", "backslashreplace")))
        kind = _clear_kind(view.kind)
        if kinds and kinds[-1][0] == kind:
            kinds[-1] = (kind, kinds[-1][1] + 1)
        else:
            kinds.append((kind, 1))
        if received.frame.fault:
            faults.append(f"{seq}:{received.frame.fault}:{len(received.frame.raw)}")
        if kind == "approval.request":
            asks.append(_ask(view, received, stream.asked + len(asks) + 1, seq))
        elif kind == "approval.responded":
            settles.append((seq, f"responded:{_clear_kind(str(view.body.get('choice')))}:{_which(view, stream, asks)}"))
        elif kind == "tool.completed":
            settles.append((seq, "tool.completed"))
        if kind in TERMINAL_EVENTS and not terminal_seq:
            terminal_seq, terminal_state = seq, TERMINAL_EVENTS[kind]
    if not texts:
        return None
    return FramesStored(
        at=batch[-1].at,
        first=stream.last_seq + 1,
        count=len(texts),
        kinds=tuple(kinds),
        digest=digest,
        size=size,
        frames=Plain(content=json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode()),
        asks=tuple(asks),
        settles=tuple(settles),
        last_id=last_id[:256],
        last_provider_seq=last_provider_seq,
        terminal_seq=terminal_seq,
        terminal_state=terminal_state,
        faults=tuple(faults),
    )


def terminal_claim(batch: Sequence[Received]) -> tuple[str, dict[str, Any], tuple[str, ...]] | None:
    """(state, body, marks) of the first terminal frame of a batch."""
    for received in batch:
        view = view_frame(received.frame)
        if view.kind in TERMINAL_EVENTS:
            state = TERMINAL_EVENTS[view.kind]
            return state, view.body, end_marks(state, view.body)
    return None


# ---- subscribing -----------------------------------------------------------------------------------------------------


def may_subscribe(stream: RunStream, replay_advertised: bool, *, at: datetime) -> bool:
    """On a provider without replay one subscription is opened, ever. With replay the owner resumes within 60 s.

    The 60 s begin when a subscription that gave a frame, or lasted ten seconds, was closed; tries that fail at once do
    not prolong them.
    """
    if stream.terminal_seq or stream.crowded:
        return False
    if stream.subscriptions == 0:
        return True
    if not replay_advertised:
        return False
    return stream.lived_until is None or milliseconds(at - stream.lived_until) <= REPLAY_WINDOW_MS


def subscribe_from(stream: RunStream, *, at: datetime) -> datetime:
    """The earliest time for a subscription: at once, or a second after the last one was closed."""
    return after(stream.closed_at, RESUME_PAUSE_MS) if stream.closed_at else at


def intend(stream: RunStream, owner: Fence, *, at: datetime) -> tuple[Event, ...]:
    """Stored before the connection is opened. A resumption names the provider's last id that is stored."""
    intended = SubscriptionIntended(
        at=at,
        owner=owner,
        number=stream.subscriptions + 1,
        resume_after=stream.last_id if stream.subscriptions else "",
    )
    return (intended,)


def close(stream: RunStream, reason: str, *, at: datetime) -> tuple[Event, ...]:
    """The subscription is over; without a terminal frame a gap opens after the last frame."""
    closed = StreamClosed(at=at, number=stream.subscriptions, reason=reason)
    if stream.terminal_seq or stream.open_gap:
        return (closed,)
    gap = GapOpened(at=at, number=len(stream.gaps) + 1, after=stream.last_seq, reason=reason)
    return (closed, gap)


def bridge(stream: RunStream, first_provider_seq: int | None, *, at: datetime) -> tuple[Event, ...]:
    """The far edge of an open gap, when a replay goes on after the last stored frame.

    ``replay`` says that nothing is missing, ``resumed`` that the span before this frame is.
    """
    gap = stream.open_gap
    if gap is None or first_provider_seq is None or stream.last_provider_seq is None:
        return ()
    if first_provider_seq <= stream.last_provider_seq:
        return ()
    by = "replay" if first_provider_seq == stream.last_provider_seq + 1 else "resumed"
    return (GapClosed(at=at, number=gap.number, before=stream.last_seq + 1, by=by),)


def end_gap(stream: RunStream, by: str, *, at: datetime) -> tuple[Event, ...]:
    """Close an open gap's far edge by terminal evidence: no frame comes after the end."""
    gap = stream.open_gap
    if gap is None:
        return ()
    return (GapClosed(at=at, number=gap.number, before=stream.last_seq + 1, by=by),)
