"""The feed of an Action: its stored events, its chunks, and where a reader stands (AIP 3.2, 11.7, 13.5, 13.6).

Events are the Action's own history; chunks are the frames of its run's stream, for ``run_events`` alone. Both are
append-only, so a place (last event version, last chunk) that was told once never shows anything else before it.
Opened frames come in as text; without them every frame is still told, with its kind and a mask for its content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from domain.action import Action, State
from domain.errors import PREFIX
from domain.events import (
    ActionAccepted,
    ActionSettled,
    ApprovalDecided,
    ApprovalExpired,
    ApprovalRequested,
    CancelWished,
    Event,
    FramesStored,
    RequestRefused,
)
from domain.history import Recorded
from domain.provider import TERMINAL_EVENTS, RawFrame
from domain.stream import view_frame
from domain.values import Operation, Sealed, rfc3339
from projections.masking import REDACTED, mask, mask_text

EVENT_BYTES = 256 * 1024
LOST_END = "upstream_stream_closed_without_terminal_event"
CHUNK_EVENT = "aip.stream.chunk"

_HIDDEN = frozenset({"at", "owner", "previous", "fingerprint", "key_history", "session_key", "request"})
_TOOLS = frozenset({"tool.started", "tool.completed", "tool.failed"})


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One stored frame: our sequence from 1, its kind, and what it held if it was opened."""

    seq: int
    kind: str
    ms: int = 0
    event: str = ""
    id: str = ""
    opened: bool = False
    data: Any = None
    raw_data: Any = None
    body: dict[str, Any] = {}
    terminal: bool = False
    fault: str = ""


# ---- events ----------------------------------------------------------------------------------------------------------


def event_kind(event: Event) -> str:
    """The published kind of an event: AIP's word where it has one, else the stored topic."""
    match event:
        case ActionAccepted():
            return "aip.action.ack"
        case ApprovalRequested():
            return "aip.approval.requested"
        case ApprovalDecided():
            return "aip.approval.granted" if event.granted else "aip.approval.denied"
        case ApprovalExpired():
            return "aip.approval.expired"
        case ActionSettled():
            return "aip.action.cancelled" if event.status == "cancelled" else "aip.action.result"
        case _:
            return event.topic


def event_data(event: Event) -> dict[str, Any]:
    """The members of an event that callers see; private content stays as it is stored, large content is left out."""
    data: dict[str, Any] = {}
    for field in msgspec.structs.fields(event):
        value = getattr(event, field.name)
        if field.name in _HIDDEN or value is None or value in ("", (), {}):
            continue
        if isinstance(value, Sealed) and value.size > EVENT_BYTES:
            value = {"left_out": True, "size_bytes": value.size}
        data[field.name] = value
    return data


def event_actor(event: Event) -> dict[str, str] | None:
    """The principal who caused an event, where a principal did."""
    match event:
        case ActionAccepted():
            return {"id": event.principal, "kind": event.principal_kind}
        case ApprovalDecided():
            return {"id": event.by, "kind": event.by_kind}
        case CancelWished() | RequestRefused():
            return {"id": event.by, "kind": "service"}
        case _:
            return None


def told_event(recorded: Recorded, action: Action) -> dict[str, Any]:
    """One event of an Action (AIP 3.2)."""
    request, event = action.request, recorded.event
    told: dict[str, Any] = {
        "id": recorded.event_id,
        "kind": event_kind(event),
        "occurred_at": rfc3339(event.at),
        "action_id": request.action_id,
        "data": event_data(event),
    }
    session, actor = request.sent_session or request.requested_session, event_actor(event)
    if session:
        told["session_id"] = session
    if request.correlation_id:
        told["correlation_id"] = request.correlation_id
    if actor:
        told["actor"] = actor
    return told


# ---- frames ----------------------------------------------------------------------------------------------------------


def frames_of(event: FramesStored, opened: bytes | None) -> Iterator[Frame]:
    """The frames of a stored batch in order; without their opened content each has its kind and a mask."""
    faults = {int(text.split(":", 1)[0]): text.split(":", 2)[1] for text in event.faults}
    if opened is None:
        seq = event.first
        for kind, count in event.kinds:
            for _ in range(count):
                yield Frame(seq=seq, kind=kind, terminal=kind in TERMINAL_EVENTS, fault=faults.get(seq, ""))
                seq += 1
        return
    for seq, (ms, text) in enumerate(json.loads(opened), event.first):
        yield _opened(seq, ms, text, faults.get(seq, ""))


def _opened(seq: int, ms: int, text: str, fault: str) -> Frame:
    fields: dict[str, list[str]] = {"event": [], "id": [], "data": []}
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        name, _, rest = line.partition(":")
        if name in fields:
            fields[name].append(rest.removeprefix(" "))
    event, frame_id = "".join(fields["event"][-1:]), "".join(fields["id"][-1:])
    data = "\n".join(fields["data"])
    view = view_frame(RawFrame(raw=b"", event=event, id=frame_id, data=data, fault=fault))
    try:
        value: Any = json.loads(data) if data else None
    except (ValueError, RecursionError):
        value = data
    masked = mask(value)
    plain = data if masked == value else json.dumps(masked, ensure_ascii=False, separators=(",", ":"))
    return Frame(
        seq=seq,
        ms=ms,
        kind=view.kind,
        opened=True,
        event=event,
        id=frame_id,
        data=masked,
        raw_data=masked if isinstance(value, str) else plain,
        body=masked if isinstance(masked, dict) else {},
        terminal=view.terminal,
        fault=fault,
    )


def told_frame(frame: Frame) -> dict[str, Any]:
    """One provider event (AIP 11.7)."""
    named = frame.event if frame.opened else frame.kind
    told: dict[str, Any] = {"event": named} if named else {}
    if frame.id:
        told["id"] = frame.id
    told["data"] = frame.data if frame.opened else REDACTED
    told["raw_data"] = frame.raw_data if frame.opened else REDACTED
    told["terminal"] = frame.terminal
    return told | {"fault": frame.fault} if frame.fault else told


def chunk_kind(kind: str) -> str:
    """The chunk kind of a provider event's name; only the names that end a run are ``done`` or ``error``."""
    if kind in TERMINAL_EVENTS:
        return "error" if TERMINAL_EVENTS[kind] in ("failed", "interrupted") else "done"
    if kind in _TOOLS:
        return "tool"
    return {"approval.request": "pending_approval", "reasoning.available": "thought"}.get(kind, "data")


def chunk(action_id: str, frame: Frame) -> dict[str, Any]:
    """One chunk of a ``run_events`` Action; its sequence counts from 0."""
    told: dict[str, Any] = {
        "action_id": action_id,
        "sequence": frame.seq - 1,
        "kind": chunk_kind(frame.kind),
        "data": {"hermes_sse": told_frame(frame)},
    }
    text = next((frame.body[name] for name in ("delta", "text", "output") if isinstance(frame.body.get(name), str)), "")
    if text:
        told["part"] = {"type": "text", "text": text}
    return told


def chunk_limit(action: Action) -> int:
    """How many frames belong to the Action: what it had read when it was settled, else its own limit; 0 if none do."""
    if action.request.operation is not Operation.RUN_EVENTS:
        return 0
    counted = action.settled.details.get("events") if action.settled else action.request.max_events
    return counted if isinstance(counted, int) else 0


def closing_chunk(action: Action) -> dict[str, Any] | None:
    """The chunk that says that the stream closed without a terminal event; its sequence follows the last frame's."""
    if action.settled is None or action.settled.code != PREFIX + "stream_incomplete":
        return None
    return {
        "action_id": action.request.action_id,
        "sequence": chunk_limit(action),
        "kind": "error",
        "data": {"operation": action.request.operation.value, "reason": LOST_END},
    }


# ---- the output of run_events ----------------------------------------------------------------------------------------


def aggregate(frames: Iterable[Frame]) -> str:
    """The text that the events carry, credential-looking parts masked also where frames divided them (AIP 11.7)."""
    text: list[str] = []
    final = ""
    for frame in frames:
        body = frame.body
        choices = body.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        delta = first.get("delta") if isinstance(first, dict) else None
        if isinstance(delta, dict) and isinstance(delta.get("content"), str):
            text.append(delta["content"])
        elif isinstance(body.get("delta"), str):
            text.append(body["delta"])
        elif frame.event == "response.output_text.delta" and isinstance(body.get("text"), str):
            text.append(body["text"])
        final = next((body[name] for name in ("content", "output") if isinstance(body.get(name), str)), final)
    return mask_text("".join(text) or final)


def events_output(action: Action, frames: Iterable[Frame], *, opened: bool) -> dict[str, Any]:
    """The output object of a settled ``run_events`` Action (AIP 11.7)."""
    settled, limit = action.settled, chunk_limit(action)
    read = [frame for frame in frames if frame.seq <= limit]
    details = settled.details if settled else {}
    return {
        "endpoint_id": action.request.endpoint_id,
        "operation": Operation.RUN_EVENTS.value,
        "http_status": 200,
        "run_id": action.request.run_id,
        "events": [told_frame(frame) for frame in read],
        "text": aggregate(read) if opened else REDACTED,
        "terminal": details.get("terminal") is True,
        "truncated": details.get("truncated") is True,
    }


# ---- a run's own feed ------------------------------------------------------------------------------------------------


def run_entries(recorded: Recorded, frames: Iterable[Frame] | None) -> Iterator[dict[str, Any]]:
    """What one stored event of a run or of its stream is in the run's feed: itself, or one entry for each frame."""
    event = recorded.event
    place = {"position": recorded.position, "evidence": f"{recorded.history}:{recorded.version}"}
    if isinstance(event, FramesStored) and frames is not None:
        for frame in frames:
            told = {
                "id": f"{recorded.event_id}.{frame.seq}",
                "kind": "provider.event",
                "occurred_at": rfc3339(event.at),
            }
            yield (
                told
                | {"sequence": frame.seq, "name": frame.kind, "offset_ms": frame.ms}
                | place
                | {"data": told_frame(frame)}
            )
        return
    yield {
        "id": recorded.event_id,
        "kind": event.topic,
        "occurred_at": rfc3339(event.at),
        **place,
        "data": event_data(event),
    }


def is_over(action: Action) -> bool:
    """True once nothing can follow in the Action's feed."""
    return action.state is State.SETTLED
