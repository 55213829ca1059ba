"""Events, frames and chunks of a feed, told from stored values alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from domain.action import Action, replay
from domain.events import (
    ActionAccepted,
    ActionSettled,
    ApprovalDecided,
    AttemptUnknown,
    CancelWished,
    Event,
    FramesStored,
)
from domain.history import Recorded
from domain.values import Effect, Fence, Mode, Operation, Plain, Sealed
from projections import feed
from projections.masking import REDACTED
from tests.builders import AT

SEALED = Sealed(key="dk1", history="t/str/main/r", version=1, size=10, box="x")


def stored(
    *texts: str, kinds: tuple[tuple[str, int], ...] = (), faults: tuple[str, ...] = ()
) -> tuple[FramesStored, bytes]:
    """A stored batch and its content."""
    event = FramesStored(
        at=AT, first=1, count=len(texts), kinds=kinds or (("data", len(texts)),), digest="d", size=9, frames=SEALED,
        faults=faults,
    )  # fmt: skip
    return event, json.dumps([[number, text] for number, text in enumerate(texts)]).encode()


def accepted(operation: Operation = Operation.RUN_EVENTS, **more: Any) -> ActionAccepted:
    """An accepted Action."""
    return ActionAccepted(
        at=AT, action_id="act_1", tenant="t", principal="ada", principal_kind="human", endpoint_id="main",
        capability_id=f"cap:hermes_agent:main:{operation.value}", operation=operation, mode=Mode.SYNC,
        input=Plain(content=b"{}"), fingerprint="f", deadline=AT, timeout_ms=1, owner=Fence("a", 1), run_id="run_1",
        max_events=4096, **more,
    )  # fmt: skip


def action(*events: Event) -> Action:
    """The Action of these events."""
    return replay(
        Recorded(history="t/act/act_1", version=number, position=number, event_id=f"evt_{number}", event=event)
        for number, event in enumerate(events, 1)
    )


def settled(code: str = "", count: int = 2, **more: Any) -> ActionSettled:
    """The settlement of a read."""
    details = {"events": count, "terminal": not code, "truncated": code.endswith("truncated")}
    return ActionSettled(
        at=AT, status="failed" if code else "completed", effect=Effect.POSSIBLE, code=code, details=details, **more
    )


def test_a_frame_is_read_by_field_and_by_line_end_whatever_the_line_end_is() -> None:
    event, content = stored(
        'event: x\r\nid: 7\r\ndata: {"event":"message.delta",\r\ndata: "delta":"a"}\r\n\r\n',
        "data: [DONE]\n\n",
        "data: plain\n\n",
        "id: only\n\n",
        'data:{"text":"\u2028 stays in its line"}\n\n',
    )
    one, done, plain, only, odd = feed.frames_of(event, content)
    assert (one.kind, one.event, one.id, one.data) == (
        "message.delta",
        "x",
        "7",
        {"event": "message.delta", "delta": "a"},
    )
    assert (done.data, done.terminal) == ("[DONE]", True)
    assert (plain.data, plain.terminal) == ("plain", False)
    assert (only.data, only.id) == (None, "only")
    assert odd.data == {"text": "\u2028 stays in its line"}
    assert [frame.seq for frame in (one, done, plain, only, odd)] == [1, 2, 3, 4, 5]


def test_frames_that_are_not_opened_are_told_by_their_kind_alone() -> None:
    event, _ = stored("a", "b", "c", kinds=(("message.delta", 2), ("run.completed", 1)), faults=("2:not_utf8:9",))
    first, second, third = feed.frames_of(event, None)
    assert feed.told_frame(first) == {
        "event": "message.delta",
        "data": REDACTED,
        "raw_data": REDACTED,
        "terminal": False,
    }
    assert feed.told_frame(second)["fault"] == "not_utf8"
    assert feed.told_frame(third)["terminal"] is True
    assert [feed.chunk("act_1", frame)["kind"] for frame in (first, third)] == ["data", "done"]


@pytest.mark.proves("A032")
def test_credentials_in_a_frame_are_masked_in_its_data_and_in_its_raw_text() -> None:
    body = {"event": "approval.request", "command": "curl -H 'Authorization: Bearer abc123secret' x", "api_key": "k1k1"}
    event, content = stored(f"data: {json.dumps(body)}\n\n")
    (frame,) = feed.frames_of(event, content)
    told = json.dumps(feed.chunk("act_1", frame))
    assert "abc123secret" not in told
    assert "k1k1" not in told
    assert "curl" in told


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("message.delta", "data"), ("tool.started", "tool"), ("tool.completed", "tool"), ("tool.failed", "tool"),
        ("reasoning.available", "thought"), ("approval.request", "pending_approval"), ("run.completed", "done"),
        ("run.cancelled", "done"), ("run.failed", "error"), ("run.interrupted", "error"), ("anything", "data"),
    ],
)  # fmt: skip
def test_the_kind_of_a_chunk_follows_from_the_events_name(name: str, kind: str) -> None:
    assert feed.chunk_kind(name) == kind


@pytest.mark.parametrize(
    ("bodies", "text"),
    [
        ([{"delta": "a"}, {"delta": "b"}, {"event": "run.completed", "output": "other"}], "ab"),
        ([{"event": "run.completed", "output": "whole"}], "whole"),
        ([{"choices": [{"delta": {"content": "x"}}]}, {"choices": []}], "x"),
        ([{"content": "c"}], "c"),
        ([{"delta": "Authorization: Bea"}, {"delta": "rer abcdef123456"}], "Authorization: ***"),
        ([], ""),
    ],
)
def test_the_text_is_put_together_from_what_the_events_carry(bodies: list[dict[str, Any]], text: str) -> None:
    event, content = stored(*(f"data: {json.dumps(body)}\n\n" for body in bodies))
    assert feed.aggregate(feed.frames_of(event, content)) == text


def test_the_output_holds_what_was_read_at_the_settlement_and_nothing_after_it() -> None:
    event, content = stored(*(f'data: {{"delta":"{number}"}}\n\n' for number in range(5)))
    told = feed.events_output(action(accepted(), settled(count=2)), feed.frames_of(event, content), opened=True)
    assert len(told["events"]) == 2
    assert told["text"] == "01"
    assert (told["terminal"], told["truncated"], told["http_status"]) == (True, False, 200)
    masked = feed.events_output(action(accepted(), settled(count=2)), feed.frames_of(event, None), opened=False)
    assert masked["text"] == REDACTED
    assert [item["data"] for item in masked["events"]] == [REDACTED, REDACTED]


def test_only_an_incomplete_read_has_a_closing_chunk() -> None:
    incomplete = feed.closing_chunk(action(accepted(), settled("connector.hermes_agent.stream_incomplete", 2)))
    assert incomplete is not None
    assert (incomplete["sequence"], incomplete["kind"]) == (2, "error")
    assert feed.closing_chunk(action(accepted(), settled("connector.hermes_agent.stream_truncated", 2))) is None
    assert feed.closing_chunk(action(accepted(), settled())) is None
    assert feed.closing_chunk(action(accepted())) is None


def test_only_run_events_has_chunks() -> None:
    assert feed.chunk_limit(action(accepted(Operation.RUN_START))) == 0
    assert feed.chunk_limit(action(accepted())) == 4096
    assert feed.chunk_limit(action(accepted(), settled(count=3))) == 3


def test_an_event_is_told_without_what_is_internal_and_without_what_is_large() -> None:
    large = Sealed(key="dk1", history="t/act/act_1", version=1, size=300_000, box="x")
    first = Recorded(
        history="t/act/act_1", version=1, position=1, event_id="evt_1", event=accepted(correlation_id="corr_1")
    )
    told = feed.told_event(first, action(first.event))
    assert told["kind"] == "aip.action.ack"
    assert told["actor"] == {"id": "ada", "kind": "human"}
    assert told["correlation_id"] == "corr_1"
    assert not {"at", "owner", "fingerprint", "session_key"} & set(told["data"])
    assert feed.event_data(settled(output=large))["output"] == {"left_out": True, "size_bytes": 300_000}


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (settled(), "aip.action.result"),
        (ActionSettled(at=AT, status="cancelled", effect=Effect.NONE), "aip.action.cancelled"),
        (CancelWished(at=AT, by="ada", reason="x"), "action.cancel_wished"),
        (AttemptUnknown(at=AT, attempt_id="att_1", code="c", cause="x"), "attempt.unknown"),
        (
            ApprovalDecided(
                at=AT, approval_id="appr_1", decision_id="d", granted=False, by="b", by_kind="human", reason="n",
                policy_hash="h",
            ),
            "aip.approval.denied",
        ),
    ],
)  # fmt: skip
def test_events_have_the_published_kind_or_their_topic(event: Event, kind: str) -> None:
    assert feed.event_kind(event) == kind
