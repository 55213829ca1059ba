"""The table of codes: stable words, and two answers that are never derived from each other."""

from __future__ import annotations

import pytest

from domain.errors import CATEGORY_STATUS, PREFIX, TABLE, CallerError, HostError
from domain.values import Effect

MUTATION_CODES = (
    "outcome_unknown",
    "authentication",
    "remote_refused_temporarily",
    "remote_rejected",
    "run_not_found",
    "approval_not_active",
    "approval_not_pending",
    "not_sent",
    "invalid_response",
    "redirected",
    "cancelled",
    "deadline_exceeded",
    "tenant_mismatch",
    "missing_credential",
    "configuration_or_input",
)


@pytest.mark.parametrize("code", TABLE)
def test_every_code_has_a_known_category_an_error_status_and_a_meaning(code: str) -> None:
    entry = TABLE[code]
    assert entry.category in CATEGORY_STATUS
    assert 400 <= entry.status < 600 or entry.code == "policy.human_approval_required"
    assert entry.meaning.endswith(".")


@pytest.mark.proves("A159")
@pytest.mark.parametrize("word", MUTATION_CODES)
def test_no_code_that_a_failed_mutation_settles_with_is_retryable(word: str) -> None:
    assert TABLE[PREFIX + word].retryable is False


@pytest.mark.proves("B117")
def test_whether_to_call_again_and_what_may_have_happened_are_independent() -> None:
    seen = {(row.retryable, row.effect) for row in TABLE.values()}
    assert {(False, Effect.NONE), (False, Effect.POSSIBLE), (True, Effect.NONE)} <= seen
    refused = HostError("connector_host.capacity", effect=Effect.POSSIBLE)
    assert (refused.retryable, refused.effect) == (True, Effect.POSSIBLE)


@pytest.mark.proves("A160")
def test_authentication_foreign_tenant_deadline_and_cancellation_are_four_failures() -> None:
    rows = [TABLE[PREFIX + word] for word in ("authentication", "tenant_mismatch", "deadline_exceeded", "cancelled")]
    assert len({row.code for row in rows}) == len({row.status for row in rows}) == 4
    assert not any(row.retryable for row in rows)


def test_only_codes_for_an_uncertain_sending_or_an_unfinished_stream_say_that_something_may_have_happened() -> None:
    assert {row.code for row in TABLE.values() if row.effect is not Effect.NONE} == {
        PREFIX + "outcome_unknown",
        PREFIX + "stream_incomplete",
        PREFIX + "stream_truncated",
        PREFIX + "stream_failed",
    }


@pytest.mark.parametrize(
    ("code", "status", "retryable"),
    [
        ("connector_host.capacity", 429, True),
        ("connector_host.not_ready", 503, True),
        ("idempotency.required", 400, False),
        ("idempotency.input_hash_mismatch", 409, False),
        ("auth.unverified_actor", 401, False),
        ("auth.not_authorized", 403, False),
        ("action.not_found", 404, False),
        ("policy.human_approval_required", 202, False),
        ("stream.cursor_expired", 410, False),
        (PREFIX + "deadline_exceeded", 504, False),
        (PREFIX + "remote_temporary", 503, True),
    ],
)
def test_a_published_code_keeps_its_status(code: str, status: int, retryable: bool) -> None:
    assert (TABLE[code].status, TABLE[code].retryable) == (status, retryable)


def test_the_error_object_holds_what_is_known_and_nothing_empty() -> None:
    assert CallerError("action.not_found").body() == {
        "code": "action.not_found",
        "message": "No such object for this caller.",
        "category": "permanent",
        "retryable": False,
        "effect": "none",
    }
    full = HostError("connector_host.capacity", "full", retry_after_ms=1_000, details={"in_flight": 8}).body()
    assert (full["message"], full["retry_after_ms"], full["details"]) == ("full", 1_000, {"in_flight": 8})


def test_a_code_that_is_not_in_the_table_cannot_be_raised() -> None:
    with pytest.raises(KeyError):
        HostError("no.such_code")
