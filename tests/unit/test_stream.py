"""What was received of a run's events, what may have been missed, and which requests wait for an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from domain import stream as streams
from domain.events import (
    Ask,
    Event,
    FramesStored,
    GapClosed,
    GapOpened,
    RunDeadlinePassed,
    StreamClosed,
    SubscriptionIntended,
    SubscriptionOpened,
)
from domain.provider import STREAM_TERMINAL_NAMES, RawFrame
from domain.stream import (
    FACTS_KEPT,
    Gap,
    Received,
    RunStream,
    bridge,
    close,
    end_gap,
    evolve,
    intend,
    may_subscribe,
    store_frames,
    subscribe_from,
    terminal_claim,
    view_frame,
)
from domain.values import Plain
from tests.builders import (
    OTHER,
    OWNER,
    RUN,
    asking,
    closed,
    frame,
    moment,
    stored,
    stream,
    subscribed,
)


def keep(*batch: Received, known: RunStream | None = None) -> FramesStored:
    event = store_frames(known or stream(subscribed()), batch, "b1")
    assert event is not None
    return event


def raw(data: str = "", event: str = "", identity: str = "", fault: str = "") -> Received:
    seen = RawFrame(raw=data.encode() or b"\xff", event=event, id=identity, data=data, fault=fault)
    return Received(at=moment(2), frame=seen, digest="x")


# ---- frames ----------------------------------------------------------------------------------------------------------

KINDS = (
    "message.delta",
    "tool.started",
    "tool.completed",
    "reasoning.available",
    "approval.request",
    "approval.responded",
    "run.completed",
    "run.failed",
    "run.cancelled",
)


@pytest.mark.proves("A078", "A079", "A080", "A081", "A082")
@pytest.mark.parametrize("kind", KINDS)
def test_each_event_kind_is_known_by_the_name_inside_its_data(kind: str) -> None:
    view = view_frame(frame(kind).frame)
    assert (view.kind, view.body["run_id"], view.terminal) == (kind, RUN, kind in STREAM_TERMINAL_NAMES)
    assert keep(frame(kind)).kinds == ((kind, 1),)


@pytest.mark.proves("A082")
@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("run.completed", "completed"),
        ("run.failed", "failed"),
        ("run.cancelled", "cancelled"),
        ("run.interrupted", "interrupted"),
        ("run.stopping", ""),
        ("run.finished", ""),
        ("message.delta", ""),
        ("done", ""),
        ("error", ""),
    ],
)
def test_only_the_ends_of_a_run_are_terminal_for_it(kind: str, state: str) -> None:
    event = keep(frame(kind))
    assert (event.terminal_state, event.terminal_seq) == (state, 1 if state else 0)


@pytest.mark.parametrize(
    ("given", "kind", "seq"),
    [
        (raw('{"event":"a"}', event="b"), "a", None),
        (raw('{"x":1}', event="b"), "b", None),
        (raw('{"x":1}'), "data", None),
        (raw("[DONE]"), "done", None),
        (raw("{"), "data", None),
        (raw("[1]", event="b"), "b", None),
        (raw('{"event":7}'), "data", None),
        (raw('{"event":"a","seq":4}', identity="9"), "a", 4),
        (raw('{"event":"a","seq":true}', identity="9"), "a", 9),
        (raw('{"event":"a"}', identity="x9"), "a", None),
        (raw('{"event":"a"}', fault="not_utf8"), "data", None),
        (raw("[" * 100_000), "data", None),
    ],
)
def test_a_frame_is_named_and_numbered_by_what_it_holds(given: Received, kind: str, seq: int | None) -> None:
    view = view_frame(given.frame)
    assert (view.kind, view.provider_seq) == (kind, seq)


def test_frames_get_our_own_numbers_from_one_without_holes() -> None:
    history = stored(stored(subscribed(), frame("a"), frame("b")), frame("b"), frame("b"), frame("c"))
    first, second = history[1:]
    assert isinstance(first, FramesStored)
    assert isinstance(second, FramesStored)
    assert (first.first, first.count, first.kinds) == (1, 2, (("a", 1), ("b", 1)))
    assert (second.first, second.count, second.kinds) == (3, 3, (("b", 2), ("c", 1)))
    known = stream(history)
    assert (known.last_seq, known.kinds, known.last_frame_at) == (5, {"a": 1, "b": 3, "c": 1}, moment(2))


def test_the_exact_texts_are_kept_as_private_content_with_the_time_of_each() -> None:
    one, two = frame("a", at=2), frame("b", at=2.25)
    event = keep(one, two)
    assert isinstance(event.frames, Plain)
    assert json.loads(event.frames.content) == [[0, one.frame.raw.decode()], [250, two.frame.raw.decode()]]
    assert event.size == len(one.frame.raw) + len(two.frame.raw)


def test_a_frame_that_cannot_be_read_is_a_numbered_fault_and_no_loss() -> None:
    event = keep(frame("a"), raw(fault="not_utf8"))
    assert (event.count, event.faults, event.kinds) == (2, ("2:not_utf8:1",), (("a", 1), ("data", 1)))


@pytest.mark.parametrize("kind", ["a b", "<script>", "k" * 65, "naïve", ""])
def test_a_name_that_may_hold_private_text_does_not_stand_in_clear(kind: str) -> None:
    assert {name for name, _ in keep(raw(json.dumps({"event": kind, "x": 1}))).kinds} <= {"other", "data"}


def test_a_frame_that_a_replay_gives_again_is_stored_once() -> None:
    history = stored(subscribed(), frame("a", seq=0), frame("b", seq=1))
    assert stored(history, frame("a", seq=0), frame("b", seq=1)) == history
    more = stream(stored(history, frame("b", seq=1), frame("c", seq=2), frame("c", seq=2)))
    assert (more.last_seq, more.last_provider_seq, more.kinds) == (3, 2, {"a": 1, "b": 1, "c": 1})


def test_frames_without_a_provider_number_are_never_taken_for_repeats() -> None:
    assert stream(stored(stored(subscribed(), frame("a")), frame("a"))).last_seq == 2


def test_the_first_end_of_a_stream_stays_its_end() -> None:
    known = stream(stored(stored(subscribed(), frame("run.completed")), frame("run.failed")))
    assert (known.terminal_seq, known.terminal_state) == (1, "completed")


@pytest.mark.parametrize(
    ("batch", "claim"),
    [
        ((frame("a"),), None),
        ((frame("a"), frame("run.failed", error="HTTP 401")), ("failed", ())),
        ((frame("run.completed", output="done", usage={"n": 1}),), ("completed", ())),
        ((frame("run.completed", output=None),), ("completed", ("empty_output", "no_usage"))),
        ((frame("run.cancelled"), frame("run.completed")), ("cancelled", ())),
    ],
)
def test_the_claim_of_a_terminal_frame_is_read_with_its_marks(
    batch: tuple[Received, ...], claim: tuple[str, tuple[str, ...]] | None
) -> None:
    found = terminal_claim(batch)
    assert (None if found is None else (found[0], found[2])) == claim


# ---- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.proves("A093", "A081")
def test_a_request_gets_a_generation_and_keeps_its_digest_and_offers() -> None:
    asked = frame("approval.request", digest="a9", choices=["once", "deny", 7], request_id="r1")
    known = stream(stored(stored(subscribed(), frame("a"), asking("a1")), asked))
    assert [item.ask for item in known.pending] == [
        Ask(generation=1, seq=2, digest="a1", choices=("once", "session", "always", "deny")),
        Ask(generation=2, seq=3, digest="a9", choices=("once", "deny"), request_id="r1"),
    ]
    assert known.asked == 2


def pending(*batch: Received) -> list[int]:
    return [item.ask.generation for item in stream(stored(subscribed(), *batch)).pending]


def responded(resolved: Any = 1, choice: str = "once") -> Received:
    return frame("approval.responded", choice=choice, resolved=resolved)


@pytest.mark.parametrize(
    ("batch", "left"),
    [
        ((asking("a1"),), [1]),
        ((asking("a1"), responded()), []),
        ((asking("a1"), asking("a2"), responded()), [2]),
        ((asking("a1"), asking("a2"), responded(2)), []),
        ((asking("a1"), asking("a2"), responded(9)), []),
        ((asking("a1"), responded(0)), [1]),
        ((asking("a1"), responded(-1)), [1]),
        ((asking("a1"), asking("a2"), responded("2")), [2]),
        ((asking("a1"), frame("tool.completed")), []),
        ((asking("a1"), frame("tool.completed"), asking("a2")), [2]),
        ((responded(), asking("a1")), [1]),
        ((asking("a1"), frame("tool.started")), [1]),
        ((asking("a1"), frame("message.delta"), frame("run.steered")), [1]),
    ],
)
def test_a_request_is_pending_until_an_answer_or_the_end_of_its_tool(
    batch: tuple[Received, ...], left: list[int]
) -> None:
    assert pending(*batch) == left


def test_how_a_request_left_the_queue_is_remembered() -> None:
    known = stream(
        stored(stored(subscribed(), asking("a1"), responded(choice="deny")), asking("a2"), frame("tool.completed"))
    )
    assert [(item.generation, item.how, item.seq) for item in known.answered] == [
        (1, "responded:deny", 2),
        (2, "tool.completed", 4),
    ]


@pytest.mark.parametrize(("named", "left"), [("r1", [2]), ("r2", [1]), ("r9", [2]), (7, [2])])
def test_an_answer_that_names_its_request_takes_that_one_and_no_older(named: Any, left: list[int]) -> None:
    one = frame("approval.request", digest="a1", request_id="r1")
    two = frame("approval.request", digest="a2", request_id="r2")
    named_answer = frame("approval.responded", choice="once", resolved=1, request_id=named)
    assert pending(one, two, named_answer) == left
    apart = stream(stored(stored(subscribed(), one, two), named_answer))
    assert [item.ask.generation for item in apart.pending] == left


def test_a_foreign_choice_word_does_not_stand_in_clear() -> None:
    known = stream(stored(subscribed(), asking("a1"), responded(choice="<b>secret</b>")))
    assert [item.how for item in known.answered] == ["responded:other"]


# ---- gaps ------------------------------------------------------------------------------------------------------------


@pytest.mark.proves("A140", "A157")
def test_a_stream_that_ends_without_a_terminal_frame_opens_a_gap_after_its_last_frame() -> None:
    history = stored(subscribed(), frame("a"), frame("b"))
    over, gap = close(stream(history), "cut", at=moment(9))
    assert over == StreamClosed(at=moment(9), number=1, reason="cut")
    assert gap == GapOpened(at=moment(9), number=1, after=2, reason="cut")
    known = stream((*history, over, gap))
    assert (known.open, known.closed_reason, known.terminal_seq) == (False, "cut", 0)
    assert known.open_gap is not None
    assert (known.open_gap.after, known.open_gap.before) == (2, None)


def test_a_stream_that_never_gave_a_frame_may_have_missed_all_from_the_first() -> None:
    known = stream(closed(subscribed(), "not_connected"))
    assert known.open_gap is not None
    assert (known.open_gap.after, known.open_gap.reason) == (0, "not_connected")


def test_a_stream_that_ends_after_its_terminal_frame_has_no_gap() -> None:
    known = stream(closed(stored(subscribed(), frame("a"), frame("run.completed")), "closed"))
    assert (known.gaps, known.open, known.terminal_state) == ((), False, "completed")


@pytest.mark.proves("A140")
@pytest.mark.parametrize("by", ["terminal_status", "terminal_frame"])
def test_a_known_end_gives_a_gap_its_far_edge_and_does_not_say_that_frames_came_back(by: str) -> None:
    history = closed(stored(subscribed(), frame("a")))
    known = stream((*history, *end_gap(stream(history), by, at=moment(20))))
    (gap,) = known.gaps
    assert (gap.after, gap.before, gap.closed_by, gap.reason) == (1, 2, by, "cut")
    assert (known.open_gap, known.last_seq) == (None, 1)
    assert end_gap(known, by, at=moment(21)) == ()


def test_a_replay_that_goes_on_exactly_where_we_stopped_closes_the_gap() -> None:
    known = stream(closed(stored(subscribed(), frame("a", seq=4), frame("b", seq=5))))
    (bridged,) = bridge(known, 6, at=moment(20))
    assert bridged == GapClosed(at=moment(20), number=1, before=3, by="replay")


def test_a_replay_that_goes_on_later_gives_the_gap_its_far_edge_where_it_resumes() -> None:
    history = closed(stored(subscribed(), frame("a", seq=4), frame("b", seq=5)))
    history = stored((*history, *bridge(stream(history), 9, at=moment(20))), frame("c", seq=9))
    (gap,) = stream((*history, *end_gap(stream(history), "terminal_status", at=moment(30)))).gaps
    assert (gap.after, gap.before, gap.closed_by) == (2, 3, "resumed")


@pytest.mark.parametrize("first", [None, 4, 5, 0])
def test_a_replay_that_goes_on_elsewhere_closes_no_gap(first: int | None) -> None:
    known = stream(closed(stored(subscribed(), frame("b", seq=5))))
    assert bridge(known, first, at=moment(20)) == ()


def test_without_a_gap_or_without_numbers_nothing_is_bridged() -> None:
    assert bridge(stream(stored(subscribed(), frame("b", seq=5))), 6, at=moment(20)) == ()
    assert bridge(stream(closed(stored(subscribed(), frame("b")))), 6, at=moment(20)) == ()


def test_a_second_cut_does_not_open_a_second_gap_over_the_same_frames() -> None:
    known = stream(closed(stored(subscribed(), frame("a"))))
    assert [type(event) for event in close(known, "cut", at=moment(30))] == [StreamClosed]


# ---- subscribing -----------------------------------------------------------------------------------------------------


@pytest.mark.proves("A086", "A087")
@pytest.mark.parametrize(
    ("history", "replaying", "at", "may"),
    [
        ((), False, 1, True),
        ((), True, 1, True),
        (subscribed(), False, 2, False),
        (closed(subscribed(), "not_connected"), False, 10, False),
        (closed(stored(subscribed(), frame("a"))), False, 10, False),
        (closed(stored(subscribed(), frame("a"))), True, 10, True),
        (closed(stored(subscribed(), frame("a"))), True, 69, True),
        (closed(stored(subscribed(), frame("a"))), True, 69.001, False),
        (closed(subscribed(), "not_connected"), True, 61, True),
        (closed(subscribed(), "not_connected"), True, 61.001, False),
        (closed(subscribed(), "idle", at=76), True, 136, True),
        (closed(subscribed(), "idle", at=76), True, 136.001, False),
        (stored(subscribed(), frame("run.failed")), True, 3, False),
    ],
)
def test_a_stream_is_opened_once_and_again_only_where_and_while_the_provider_replays(
    history: tuple[Event, ...], replaying: bool, at: float, may: bool
) -> None:
    assert may_subscribe(stream(history), replaying, at=moment(at)) is may


@pytest.mark.proves("A086")
def test_the_first_intent_resumes_nothing_and_the_next_one_after_the_last_stored_id() -> None:
    (first,) = intend(RunStream(), OWNER, at=moment(1))
    assert first == SubscriptionIntended(at=moment(1), owner=OWNER, number=1, resume_after="")
    numbered = Received(at=moment(2), frame=RawFrame(raw=b"x", id="17", data='{"event":"a","seq":17}'), digest="x")
    (again,) = intend(stream(closed(stored(subscribed(), numbered))), OTHER, at=moment(10))
    assert again == SubscriptionIntended(at=moment(10), owner=OTHER, number=2, resume_after="17")


def test_a_stream_is_resumed_a_second_after_it_was_closed() -> None:
    assert subscribe_from(RunStream(), at=moment(3)) == moment(3)
    assert subscribe_from(stream(closed(subscribed(), at=9)), at=moment(9)) == moment(10)


def test_tries_that_fail_at_once_do_not_prolong_the_time_for_resuming() -> None:
    history = closed(stored(subscribed(), frame("a")), at=9)
    for second in (20, 30, 40):
        history = closed((*history, *intend(stream(history), OWNER, at=moment(second))), "refused", at=second + 1)
    known = stream(history)
    assert (known.subscriptions, known.lived_until) == (4, moment(9))
    assert may_subscribe(known, True, at=moment(69))
    assert not may_subscribe(known, True, at=moment(69.001))


def test_an_intent_counts_as_the_one_subscription_even_if_nothing_was_opened() -> None:
    known = stream(subscribed())
    assert (known.subscriptions, known.open, known.owner) == (1, True, OWNER)
    assert not may_subscribe(known, False, at=moment(1))


def test_events_of_others_and_the_opening_itself_change_only_the_version() -> None:
    known = stream(subscribed())
    for event in (SubscriptionOpened(at=moment(2), number=1), RunDeadlinePassed(at=moment(2))):
        after = evolve(known, event, 9)
        assert (after.version, after.subscriptions, after.open, after.last_seq) == (9, 1, True, 0)
    assert streams.replay(()) == RunStream()


@pytest.mark.proves("A088", "A140")
def test_numbers_that_the_provider_skipped_are_a_gap_with_both_edges() -> None:
    batch = [frame("message.delta", seq=0), frame("message.delta", seq=1), frame("message.delta", seq=5)]
    opened, closed = streams.missing_frames(RunStream(), batch)
    assert isinstance(opened, GapOpened)
    assert isinstance(closed, GapClosed)
    assert (opened.after, opened.reason, closed.before) == (2, "provider_numbers_skipped", 3)


@pytest.mark.proves("A140")
def test_a_truncated_replay_is_a_gap_before_what_follows() -> None:
    batch = [frame("replay.truncated", oldest_retained_seq=40), frame("message.delta", seq=40)]
    known = RunStream(last_seq=7, last_provider_seq=20)
    gaps = streams.missing_frames(known, batch)
    assert next((gap.after, gap.reason) for gap in gaps if isinstance(gap, GapOpened)) == (7, "replay_truncated")


def test_frames_in_order_or_without_numbers_show_no_gap() -> None:
    assert streams.missing_frames(RunStream(), [frame("message.delta", seq=n) for n in range(4)]) == ()
    assert streams.missing_frames(RunStream(), [frame("message.delta"), frame("tool.completed")]) == ()


@pytest.mark.parametrize("word", ["\ud800", "a\0b", "x" * 100_000, 10**30, -(10**400), 1.5, True, None, []])
def test_whatever_a_frame_says_can_be_stored(word: Any) -> None:
    asked = keep(frame("approval.request", choices=[word], request_id=word, seq=word)).asks[0]
    assert all(len(text) <= 256 and "\0" not in text and text.encode() for text in (*asked.choices, asked.digest))
    assert asked.request_id == ""
    kept = keep(frame("approval.responded", resolved=word, choice=word, seq=word))
    assert kept.last_provider_seq is None or abs(kept.last_provider_seq) < 2**53
    assert all(len(fact) <= 256 for _, fact in kept.settles)


def test_a_stream_that_tells_more_than_any_sane_one_is_read_no_further_nor_again() -> None:
    gaps = tuple(Gap(number=number, after=number, reason="r", opened_at=moment(1)) for number in range(FACTS_KEPT))
    assert RunStream(gaps=gaps).crowded
    assert not RunStream(gaps=gaps[1:]).crowded
    assert not may_subscribe(RunStream(gaps=gaps, subscriptions=1), True, at=moment(1))
