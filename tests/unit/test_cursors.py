"""Cursors hold their place, and nothing else is a cursor."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.http_cursor import (
    ActionPlace,
    RunPlace,
    action_cursor,
    list_cursor,
    read_action_cursor,
    read_list_cursor,
    read_run_cursor,
    run_cursor,
)
from domain.errors import CallerError

NUMBERS = st.integers(0, 2**62)
PLACES = st.builds(ActionPlace, NUMBERS, st.integers(-1, 2**62), NUMBERS)


def digest(content: bytes) -> str:
    """A keyed digest."""
    return hmac.new(b"key", content, hashlib.sha256).hexdigest()


@given(PLACES, st.text(min_size=1, max_size=40))
def test_a_place_in_an_actions_feed_comes_back_for_its_own_action_alone(place: ActionPlace, subject: str) -> None:
    cursor = action_cursor(digest, subject, place)
    assert read_action_cursor(digest, subject, cursor) == place
    with pytest.raises(CallerError, match="cursor"):
        read_action_cursor(digest, subject + "x", cursor)
    with pytest.raises(CallerError, match="cursor"):
        read_run_cursor(digest, subject, cursor)


@given(st.builds(RunPlace, NUMBERS, NUMBERS, st.integers(0, 10**8)))
def test_a_place_in_a_runs_feed_comes_back(place: RunPlace) -> None:
    assert read_run_cursor(digest, "s", run_cursor(digest, "s", place)) == place


@given(st.integers(0, 2**62) | st.lists(st.integers() | st.text(max_size=20), max_size=3))
def test_a_place_in_a_list_comes_back_for_its_own_filters_alone(place: Any) -> None:
    cursor = list_cursor(digest, "audit", {"tenant": "a"}, place)
    assert read_list_cursor(digest, "audit", {"tenant": "a"}, cursor) == place
    for route, filters in (("audit", {"tenant": "b"}), ("needs", {"tenant": "a"})):
        with pytest.raises(CallerError, match="cursor"):
            read_list_cursor(digest, route, filters, cursor)


@given(PLACES, st.data())
def test_a_cursor_with_one_character_changed_is_refused(place: ActionPlace, data: st.DataObject) -> None:
    cursor = action_cursor(digest, "s", place)
    at = data.draw(st.integers(0, len(cursor) - 1))
    other = data.draw(st.characters(codec="utf-8").filter(lambda char: char != cursor[at]))
    with pytest.raises(CallerError, match="cursor"):
        read_action_cursor(digest, "s", cursor[:at] + other + cursor[at + 1 :])


@given(st.text(min_size=1, max_size=80))
def test_any_other_text_is_refused(text: str) -> None:
    for read in (read_action_cursor, read_run_cursor):
        with pytest.raises(CallerError, match="cursor"):
            read(digest, "s", text)
    with pytest.raises(CallerError, match="cursor"):
        read_list_cursor(digest, "r", {}, text)


def test_no_cursor_is_the_beginning() -> None:
    assert read_action_cursor(digest, "s", "") == ActionPlace()
    assert read_run_cursor(digest, "s", "") == RunPlace()
    assert read_list_cursor(digest, "r", {}, "") is None
