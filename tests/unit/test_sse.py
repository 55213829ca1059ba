"""The event stream splitter: every cutting of the same bytes gives the same items, and every bound holds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.sse import SseLimits, SseSplitter
from domain.provider import Comment, RawFrame

SMALL = SseLimits(line=40, frame=60, stream=200)
TRANSCRIPTS = sorted((Path(__file__).parent.parent / "golden" / "transcripts").glob("*.sse"))

Outcome = tuple[list[RawFrame | Comment], str, bytes]


def split(stream: bytes, cuts: list[int], limits: SseLimits | None = None) -> Outcome:
    splitter = SseSplitter(limits)
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    items: list[RawFrame | Comment] = []
    for start, end in itertools.pairwise(edges):
        items += splitter.feed(stream[start:end])
    last, rest = splitter.close()
    return items + last, splitter.fault, rest


def frames(stream: bytes) -> list[RawFrame]:
    return [item for item in split(stream, [])[0] if isinstance(item, RawFrame)]


pieces = st.sampled_from(
    [
        b"data: a",
        b"data:b",
        b"data",
        b"id: 7",
        b"event: run.completed",
        b"retry: 5",
        b": keepalive",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"\xef\xbb\xbf",
        b"\xff",
        "data: \u2028\u2029\u0085\u00e4".encode(),
        b"x" * 30,
    ]
)
streams = st.lists(pieces, max_size=20).map(b"".join)


@given(streams, st.lists(st.integers(0, 500), max_size=12), st.sampled_from([None, SMALL]))
@settings(max_examples=300, deadline=None)
def test_any_cutting_of_the_same_bytes_gives_the_same_items_and_the_same_fault(
    stream: bytes, cuts: list[int], limits: SseLimits | None
) -> None:
    whole = split(stream, [], limits)
    assert split(stream, cuts, limits) == whole
    assert split(stream, list(range(len(stream))), limits) == whole


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"])
def test_only_cr_and_lf_end_a_line(character: str) -> None:
    (frame,) = frames(f"data: a{character}b\n\n".encode())
    assert frame.data == f"a{character}b"


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_each_line_end_gives_the_same_fields_and_exact_bytes(end: bytes) -> None:
    stream = end.join([b"id: 4", b"event: tool.started", b"data: one", b"data: two", b"", b""])
    (frame,) = frames(stream)
    assert (frame.id, frame.event, frame.data, frame.fault) == ("4", "tool.started", "one\ntwo", "")
    assert frame.raw == stream


@pytest.mark.proves("A084")
def test_comments_are_items_of_their_own_and_never_frames() -> None:
    items, fault, rest = split(b": open\n\n: keepalive\n\ndata: 1\n: inside\n\n: stream closed\n\n", [])
    assert [item.text for item in items if isinstance(item, Comment)] == [
        "open",
        "keepalive",
        "inside",
        "stream closed",
    ]
    assert [item.raw for item in items if isinstance(item, RawFrame)] == [b"data: 1\n: inside\n\n"]
    assert (fault, rest) == ("", b"")


def test_one_byte_order_mark_is_stripped_and_a_second_belongs_to_the_first_field() -> None:
    assert [frame.data for frame in frames(b"\xef\xbb\xbfdata: 1\n\n")] == ["1"]
    assert frames(b"\xef\xbb\xbf\xef\xbb\xbfdata: 1\n\n") == []


def test_a_frame_counts_only_after_its_blank_line_and_the_rest_is_reported() -> None:
    items, _, rest = split(b"data: 1\n\ndata: 2\nda", [])
    assert [item.data for item in items if isinstance(item, RawFrame)] == ["1"]
    assert rest == b"data: 2\nda"


def test_a_last_cr_that_ends_a_frame_counts_when_the_stream_closes() -> None:
    splitter = SseSplitter()
    assert splitter.feed(b"data: 1\r\r") == []
    items, rest = splitter.close()
    assert [item.raw for item in items if isinstance(item, RawFrame)] == [b"data: 1\r\r"]
    assert rest == b""


def test_a_block_without_a_field_of_interest_is_no_frame() -> None:
    assert frames(b"retry: 10\n\nnonsense\n\n\n\n") == []


def test_an_empty_field_makes_a_frame() -> None:
    assert [(frame.data, frame.raw) for frame in frames(b"data\n\n")] == [("", b"data\n\n")]


def test_bytes_that_are_not_utf8_are_kept_with_their_fault_and_the_next_frame_is_read() -> None:
    bad, good = frames(b"data: \xff\n\ndata: 2\n\n")
    assert (bad.raw, bad.fault, bad.data) == (b"data: \xff\n\n", "not_utf8", "")
    assert (good.data, good.fault) == ("2", "")


def test_a_line_of_exactly_the_bound_passes_and_one_byte_more_does_not() -> None:
    assert split(b"data: " + b"x" * 34 + b"\n\n", [], SMALL)[1] == ""
    items, fault, _ = split(b"data: 1\n\ndata: " + b"x" * 35, [], SMALL)
    assert (len(items), fault) == (1, "line_too_large")


def test_a_frame_of_many_lines_is_bounded() -> None:
    assert split(b"data: 1\n" * 9, [], SMALL)[1] == "frame_too_large"


def test_a_stream_is_bounded_and_what_came_before_the_bound_counts() -> None:
    items, fault, _ = split(b"data: 1\n\n" * 30, [], SMALL)
    assert (len(items), fault) == (200 // 9, "stream_too_large")


def test_after_a_fault_nothing_is_taken() -> None:
    splitter = SseSplitter(SMALL)
    splitter.feed(b"x" * 41)
    assert splitter.fault == "line_too_large"
    assert splitter.feed(b"\n\ndata: 1\n\n") == []
    assert splitter.close()[0] == []


def test_single_bytes_of_a_long_line_are_split_in_linear_work() -> None:
    splitter = SseSplitter()
    for _ in range(200_000):
        splitter.feed(b"x")
    assert splitter.fault == ""
    assert len(splitter.close()[1]) == 200_000


def recorded(path: Path) -> tuple[bytes, list[str]]:
    """A stream of a real provider, and the names of its events as they were noted while it was recorded."""
    recording = json.loads((path.parent / (path.name.split(".")[0] + ".json")).read_text())
    (step,) = [step for step in recording["steps"] if step.get("file") == path.name]
    return path.read_bytes(), list(step["sequence"])


SAMPLE = (
    (
        b': open\n\nid: 0\ndata: {"event": "tool.started", "seq": 0}\n\n'
        b'id: 1\ndata: {"event": "tool.completed", "seq": 1}\n\n: keepalive\n\n'
        b'id: 2\ndata: {"event": "run.completed", "seq": 2}\n\n: stream closed\n\n'
    ),
    [": open", "tool.started", "tool.completed", ": keepalive", "run.completed", ": stream closed"],
)


@pytest.mark.parametrize(("stream", "names"), [SAMPLE, *(recorded(path) for path in TRANSCRIPTS)])
@pytest.mark.proves("A075", "A079")
def test_a_providers_stream_gives_the_events_that_it_was_seen_to_give(stream: bytes, names: list[str]) -> None:
    items, fault, _ = split(stream, list(range(0, len(stream), 7)))
    told = [f": {item.text}" if isinstance(item, Comment) else json.loads(item.data)["event"] for item in items]
    assert (fault, told) == ("", names)
