"""Values: canonical text, digests, times, and what a principal may do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from domain.values import (
    ID_PATTERN,
    MUTATIONS,
    SYSTEM,
    Actor,
    Operation,
    Plain,
    after,
    canonical,
    from_unix,
    milliseconds,
    rfc3339,
    sha256,
    t9,
)


def test_canonical_text_sorts_keys_by_their_bytes_at_every_depth_and_drops_nothing() -> None:
    value = {"b": [{"z": None, "a": 1.5}], "é": "ü", "Z": True, "a": {}}
    assert canonical(value) == '{"Z":true,"a":{},"b":[{"a":1.5,"z":null}],"é":"ü"}'.encode()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_know_has_no_canonical_text(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical({"n": number})


def test_keys_above_the_basic_plane_sort_by_bytes_and_not_by_utf16_units() -> None:
    assert canonical({"\U0001f600": 1, "\uffee": 2}) == '{"\uffee":2,"\U0001f600":1}'.encode()


def test_a_digest_is_64_lower_case_hex_digits() -> None:
    assert sha256(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC), "2026-03-01T12:00:00Z"),
        (datetime(2026, 3, 1, 12, 0, 0, 120_000, tzinfo=UTC), "2026-03-01T12:00:00.12Z"),
        (datetime(2026, 3, 1, 12, 0, 0, 1, tzinfo=UTC), "2026-03-01T12:00:00.000001Z"),
        (datetime(2026, 3, 1, 13, 30, 10, tzinfo=timezone(timedelta(hours=1, minutes=30))), "2026-03-01T12:00:10Z"),
    ],
)
def test_a_time_is_told_in_utc_without_trailing_zeros(at: datetime, text: str) -> None:
    assert rfc3339(at) == text


def test_the_nine_integers_are_year_day_time_nanoseconds_and_no_offset() -> None:
    assert t9(datetime(2026, 3, 1, 12, 34, 56, 789_000, tzinfo=UTC)) == [2026, 60, 12, 34, 56, 789_000_000, 0, 0, 0]


def test_times_are_shifted_and_measured_in_whole_milliseconds() -> None:
    at = datetime(2026, 3, 1, tzinfo=UTC)
    assert milliseconds(after(at, 86_400_001) - at) == 86_400_001
    assert milliseconds(timedelta(microseconds=1_999)) == 1
    assert from_unix(1_772_366_400.5) == datetime(2026, 3, 1, 12, 0, 0, 500_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("scopes", "own", "others"),
    [
        ((), False, False),
        (("action:read",), True, False),
        (("action:read:any",), True, True),
        (("*",), True, True),
        (("action:write:any", "action:reader"), False, False),
    ],
)
def test_a_scope_reaches_own_objects_and_only_its_any_form_those_of_others(
    scopes: tuple[str, ...], own: bool, others: bool
) -> None:
    actor = Actor(id="user:ada", scopes=scopes)
    assert (actor.may("action:read"), actor.may_any("action:read")) == (own, others)


def test_the_system_itself_holds_no_scope() -> None:
    assert (SYSTEM.kind, SYSTEM.scopes, SYSTEM.may("action:write")) == ("system", (), False)


def test_private_content_is_not_printed() -> None:
    assert repr(Plain(content=b"secret words")) == "Plain(<12 bytes>)"


def test_three_of_the_five_operations_change_the_provider() -> None:
    assert {Operation.RUN_START, Operation.RUN_APPROVAL, Operation.RUN_STOP} == MUTATIONS
    assert set(Operation) - MUTATIONS == {Operation.RUN_STATUS, Operation.RUN_EVENTS}


@pytest.mark.parametrize("text", ["", "a" * 129, "a b", "a\n", "ä", "a/b", "a:b"])
def test_an_id_that_could_leave_its_place_in_a_name_is_none(text: str) -> None:
    assert not ID_PATTERN.match(text)
