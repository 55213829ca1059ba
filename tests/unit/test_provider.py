"""What each answer of Hermes proves: every row of the failure table, for each of the three mutations."""

from __future__ import annotations

from typing import Any

import pytest

from domain.errors import TABLE
from domain.provider import (
    TERMINAL_STATES,
    Exchange,
    Failure,
    Judgement,
    StatusReading,
    Verdict,
    end_marks,
    is_run_id,
    judge,
    judge_approval,
    judge_start,
    judge_stop,
    provider_error,
    read_features,
    read_status,
)
from domain.values import MUTATIONS, Effect, Operation
from tests.builders import PREFIX, RUN, answer, broken, error_body, receipt_of, status_answer

NEVER_LEFT = (
    Failure.CONNECT_REFUSED,
    Failure.DNS,
    Failure.TLS,
    Failure.CONNECT_TIMEOUT,
    Failure.POOL_TIMEOUT,
    Failure.BAD_REQUEST,
    Failure.CANCELLED,
    Failure.TIMEOUT,
)
MAY_HAVE_LEFT = (
    Failure.WRITE_ERROR,
    Failure.READ_ERROR,
    Failure.TIMEOUT,
    Failure.PROTOCOL,
    Failure.DECODING,
    Failure.TOO_LARGE,
    Failure.CANCELLED,
    Failure.TLS,
)
EACH_MUTATION = pytest.mark.parametrize("operation", sorted(MUTATIONS))


def judged(operation: Operation, exchange: Exchange) -> Judgement:
    return judge(operation, exchange, "" if operation is Operation.RUN_START else RUN)


@EACH_MUTATION
@pytest.mark.parametrize("failure", NEVER_LEFT)
def test_without_the_mark_nothing_was_sent_whatever_the_exception(operation: Operation, failure: Failure) -> None:
    judgement = judged(operation, broken(failure, sent=False))
    assert (judgement.verdict, judgement.effect, judgement.cause) == (Verdict.NOT_SENT, Effect.NONE, failure.value)


@pytest.mark.proves("A156")
@EACH_MUTATION
@pytest.mark.parametrize("failure", MAY_HAVE_LEFT)
def test_with_the_mark_any_broken_exchange_is_ambiguous(operation: Operation, failure: Failure) -> None:
    judgement = judged(operation, broken(failure))
    assert (judgement.verdict, judgement.effect) == (Verdict.AMBIGUOUS, Effect.POSSIBLE)


@EACH_MUTATION
def test_a_complete_answer_whose_body_broke_off_is_ambiguous_even_with_the_right_status(operation: Operation) -> None:
    cut = Exchange(sent=True, failure=Failure.READ_ERROR, status=receipt_of(operation).status, body=b'{"run_')
    assert judged(operation, cut).verdict is Verdict.AMBIGUOUS


@pytest.mark.proves("A013", "A043", "A044")
def test_a_start_is_accepted_by_a_202_with_a_handle_and_by_nothing_else() -> None:
    judgement = judge_start(answer(202, {"run_id": RUN, "status": "started"}))
    assert (judgement.verdict, judgement.effect) == (Verdict.ACCEPTED, Effect.CONFIRMED)
    assert (judgement.run_id, judgement.state, judgement.replayed) == (RUN, "started", False)
    assert judgement.state not in TERMINAL_STATES


@pytest.mark.proves("A043")
@pytest.mark.parametrize(
    ("exchange", "cause"),
    [
        (answer(200, {"run_id": RUN, "status": "started"}), "http_200"),
        (answer(201, {"run_id": RUN, "status": "started"}), "http_201"),
        (answer(204, b""), "http_204"),
        (answer(202, b""), "not_json"),
        (answer(202, b"started"), "not_json"),
        (answer(202, [RUN]), "not_json"),
        (answer(202, b"[" * 100_000), "not_json"),
        (answer(202, {"status": "started"}), "no_run_id"),
        (answer(202, {"run_id": None}), "no_run_id"),
        (answer(202, {"run_id": 7}), "no_run_id"),
        (answer(202, {"run_id": "   "}), "no_run_id"),
        (answer(202, {"run_id": "a\r\nb"}), "no_run_id"),
        (answer(202, {"run_id": "r" * 513}), "no_run_id"),
    ],
)
def test_any_other_shape_of_a_start_answer_is_ambiguous(exchange: Exchange, cause: str) -> None:
    judgement = judge_start(exchange)
    assert (judgement.verdict, judgement.cause) == (Verdict.AMBIGUOUS, cause)
    assert (judgement.code, judgement.run_id) == (PREFIX + "invalid_response", "")


def test_a_start_that_the_provider_recognised_as_a_repeat_says_so() -> None:
    assert judge_start(answer(202, {"run_id": RUN, "status": "completed", "replayed": True})).replayed is True


def test_an_accepted_choice_reports_the_choice_and_the_number_of_resolved_requests() -> None:
    judgement = judge_approval(answer(200, {"run_id": RUN, "choice": "once", "resolved": 2}), RUN)
    assert (judgement.verdict, judgement.choice, judgement.resolved) == (Verdict.ACCEPTED, "once", 2)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ({"run_id": "run_0002", "choice": "once", "resolved": 1}, "other_run_id"),
        ({"choice": "once", "resolved": 1}, "other_run_id"),
        (b"", "not_json"),
        ("once", "not_json"),
    ],
)
def test_a_choice_answer_for_another_run_or_without_an_object_is_ambiguous(body: Any, cause: str) -> None:
    judgement = judge_approval(answer(200, body), RUN)
    assert (judgement.verdict, judgement.cause) == (Verdict.AMBIGUOUS, cause)


@pytest.mark.parametrize("count", [True, "1", None, 1.0])
def test_a_count_that_is_no_integer_is_not_kept_as_one(count: Any) -> None:
    assert judge_approval(answer(200, {"run_id": RUN, "choice": "once", "resolved": count}), RUN).resolved is None


@pytest.mark.proves("A111", "A112")
def test_a_stop_receipt_says_stopping_which_is_no_end() -> None:
    judgement = judge_stop(answer(200, {"run_id": RUN, "status": "stopping"}), RUN)
    assert (judgement.verdict, judgement.state) == (Verdict.ACCEPTED, "stopping")
    assert judgement.state not in TERMINAL_STATES


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ({"run_id": "run_0002", "status": "stopping"}, "other_run_id"),
        ({"run_id": RUN}, "no_status"),
        ({"run_id": RUN, "status": 7}, "no_status"),
        (b"ok", "not_json"),
    ],
)
def test_a_stop_answer_for_another_run_or_without_a_state_is_ambiguous(body: Any, cause: str) -> None:
    judgement = judge_stop(answer(200, body), RUN)
    assert (judgement.verdict, judgement.cause) == (Verdict.AMBIGUOUS, cause)


@pytest.mark.parametrize("status", [201, 202, 206, 299])
def test_a_choice_or_stop_with_another_success_status_than_200_is_ambiguous(status: int) -> None:
    body = {"run_id": RUN, "status": "stopping", "choice": "once", "resolved": 1}
    assert judge_approval(answer(status, body), RUN).cause == f"http_{status}"
    assert judge_stop(answer(status, body), RUN).verdict is Verdict.AMBIGUOUS


REFUSALS = [
    (400, "invalid_approval_choice", "remote_rejected"),
    (400, "", "remote_rejected"),
    (401, "invalid_api_key", "authentication"),
    (403, "forbidden", "authentication"),
    (404, "run_not_found", "run_not_found"),
    (404, "", "remote_rejected"),
    (405, "", "remote_rejected"),
    (409, "approval_not_active", "approval_not_active"),
    (409, "approval_not_pending", "approval_not_pending"),
    (409, "idempotency_key_conflict", "remote_rejected"),
    (413, "body_too_large", "remote_rejected"),
    (429, "rate_limit_exceeded", "remote_refused_temporarily"),
    (503, "gateway_draining", "remote_refused_temporarily"),
]


@pytest.mark.proves("A103", "A104", "A151", "A153", "A158", "A159")
@EACH_MUTATION
@pytest.mark.parametrize(("status", "word", "code"), REFUSALS)
def test_a_refusal_in_the_providers_error_shape_is_definite_and_without_effect(
    operation: Operation, status: int, word: str, code: str
) -> None:
    judgement = judged(operation, answer(status, error_body(word)))
    assert (judgement.verdict, judgement.effect) == (Verdict.REFUSED, Effect.NONE)
    assert (judgement.code, judgement.provider_code, judgement.http_status) == (PREFIX + code, word, status)
    assert TABLE[judgement.code].retryable is False


@pytest.mark.proves("A158")
@EACH_MUTATION
@pytest.mark.parametrize(
    ("exchange", "code"),
    [
        (answer(500, error_body("internal")), "remote_temporary"),
        (answer(502, b"bad gateway"), "remote_temporary"),
        (answer(503, error_body("starting")), "remote_temporary"),
        (answer(503, b""), "remote_temporary"),
        (answer(504, error_body("gateway_draining")), "remote_temporary"),
        (answer(301, b"", location="https://elsewhere.example/"), "redirected"),
        (answer(307, error_body("moved")), "redirected"),
        (answer(400, b"Invalid JSON"), "remote_rejected"),
        (answer(404, b"<html>"), "remote_rejected"),
        (answer(409, {"detail": "no"}), "remote_rejected"),
        (answer(429, b"slow down"), "remote_refused_temporarily"),
    ],
)
def test_a_server_fault_a_redirect_or_an_answer_of_somebody_else_proves_nothing(
    operation: Operation, exchange: Exchange, code: str
) -> None:
    judgement = judged(operation, exchange)
    assert (judgement.verdict, judgement.effect) == (Verdict.AMBIGUOUS, Effect.POSSIBLE)
    assert judgement.code == PREFIX + code


@pytest.mark.parametrize(
    ("given", "kept"),
    [("1", 1_000), ("120", 120_000), ("", None), ("-1", None), ("1.5", None), ("1234567", None), ("²", None)],
)
def test_a_retry_hint_in_seconds_is_kept_as_milliseconds(given: str, kept: int | None) -> None:
    refused = judge_start(answer(429, error_body("rate_limit_exceeded"), retry_after=given))
    assert refused.retry_after_ms == kept


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"error":{"message":"no","code":"c"}}', ("c", "no")),
        (b'{"error":{"message":"no","code":null}}', ("", "no")),
        (b'{"error":"no"}', ("", "no")),
        (b'{"error":{"code":"c"}}', None),
        (b'{"error":[]}', None),
        (b'{"message":"no"}', None),
        (b"no", None),
    ],
)
def test_an_error_is_told_by_its_shape(body: bytes, found: tuple[str, str] | None) -> None:
    assert provider_error(body) == found


@pytest.mark.parametrize("operation", [Operation.RUN_STATUS, Operation.RUN_EVENTS])
def test_a_read_is_not_judged_as_a_mutation(operation: Operation) -> None:
    with pytest.raises(ValueError, match="no mutation"):
        judge(operation, answer(200, {}))


@pytest.mark.proves("A057")
@pytest.mark.parametrize("handle", ["a\rb", "a\nb", "a\0b", "", " ", ".", "..", "a\x85b", "\ud800", "é" * 257, None, 7])
def test_a_handle_that_cannot_be_kept_and_sent_is_none(handle: object) -> None:
    assert not is_run_id(handle)


@pytest.mark.parametrize("handle", [RUN, "a/b?c#d", "é" * 256, "a b", "...", "%2f"])
def test_a_handle_with_reserved_characters_is_one(handle: str) -> None:
    assert is_run_id(handle)


# ---- status ----------------------------------------------------------------------------------------------------------


@pytest.mark.proves("A059", "A060", "A061", "A062", "A063")
def test_a_status_object_of_this_run_is_read() -> None:
    reading = read_status(status_answer("completed", session_id="chat-1", last_event="run.completed"), RUN)
    assert (reading.state, reading.problem, reading.session_id) == ("completed", "", "chat-1")
    assert (reading.last_event, reading.updated_at, reading.has_output) == ("run.completed", 1_772_366_400.5, True)


@pytest.mark.proves("A059")
@pytest.mark.parametrize(
    ("exchange", "cause"),
    [
        (status_answer("completed", run_id="run_0002"), "other_run_id"),
        (status_answer("completed", object="hermes.session"), "other_object"),
        (answer(200, {"run_id": RUN, "status": "completed"}), "other_object"),
        (answer(200, {"object": "hermes.run", "run_id": RUN}), "not_a_status"),
        (answer(200, {"object": "hermes.run", "run_id": RUN, "status": ""}), "not_a_status"),
        (answer(200, b"completed"), "not_a_status"),
    ],
)
def test_an_object_of_another_run_or_kind_is_no_evidence_for_this_one(exchange: Exchange, cause: str) -> None:
    reading = read_status(exchange, RUN)
    assert (reading.state, reading.cause, reading.problem) == ("", cause, PREFIX + "invalid_response")


@pytest.mark.proves("A058", "A153")
@pytest.mark.parametrize(
    ("exchange", "code", "missing"),
    [
        (answer(404, error_body("run_not_found")), "run_not_found", True),
        (answer(404, b"Not Found"), "remote_rejected", False),
        (answer(401, error_body("invalid_api_key")), "authentication", False),
        (answer(429, error_body("rate_limit_exceeded")), "remote_temporary", False),
        (answer(503, error_body("gateway_draining")), "remote_temporary", False),
        (answer(500, b""), "remote_temporary", False),
        (answer(302, b""), "redirected", False),
        (broken(Failure.READ_ERROR), "transport", False),
        (broken(Failure.CONNECT_REFUSED, sent=False), "transport", False),
        (broken(Failure.TIMEOUT), "deadline_exceeded", False),
        (broken(Failure.TOO_LARGE, status=200), "invalid_response", False),
    ],
)
def test_a_failed_read_names_its_problem_and_only_one_says_that_the_run_is_missing(
    exchange: Exchange, code: str, missing: bool
) -> None:
    reading = read_status(exchange, RUN)
    assert (reading.problem, reading.missing, reading.state) == (PREFIX + code, missing, "")


@pytest.mark.proves("A069")
@pytest.mark.parametrize(
    ("state", "body", "marks"),
    [
        ("completed", {"output": "done", "usage": {"total_tokens": 3}}, ()),
        ("completed", {"output": None, "usage": {"total_tokens": 3}}, ("empty_output",)),
        ("completed", {"output": "  ", "usage": {"total_tokens": 3}}, ("empty_output",)),
        ("completed", {"usage": {"total_tokens": 3}}, ("empty_output",)),
        ("completed", {"output": "Operation interrupted: x", "usage": {"n": 1}}, ("interruption_text",)),
        ("completed", {"output": "\u26a0 no reply", "usage": {"n": 1}}, ("warning_text",)),
        ("completed", {"output": "done", "usage": {"total_tokens": 0}}, ("no_usage",)),
        ("completed", {"output": "done"}, ("no_usage",)),
        ("completed", {"output": "done", "usage": {"n": 1}, "completed": False}, ("not_finished",)),
        ("completed", {"output": "done", "usage": {"n": 1}, "partial": True}, ("not_finished",)),
        ("completed", {"output": "done", "usage": {"n": 1}, "interrupted": True}, ("not_finished",)),
        ("interrupted", {"error": "shutdown"}, ("interrupted",)),
        ("failed", {"error": "HTTP 401"}, ()),
        ("cancelled", {}, ()),
        ("running", {}, ()),
    ],
)
def test_an_end_that_may_be_none_is_marked(state: str, body: dict[str, Any], marks: tuple[str, ...]) -> None:
    assert end_marks(state, body) == marks


# ---- features --------------------------------------------------------------------------------------------------------


def test_features_are_those_that_the_endpoint_advertises() -> None:
    told = {"features": {"runs_idempotency": {"supported": True, "durable": True}, "streaming": True, "x": False}}
    features = read_features(answer(200, told), answer(200, {"status": "ok", "version": "0.22.0"}))
    assert (features.version, features.replay, features.durable_keys, features.request_ids) == (
        "0.22.0",
        True,
        True,
        True,
    )
    assert features.flags == ("runs_idempotency", "streaming")


@pytest.mark.parametrize(
    "told", [answer(200, {"features": {}}), answer(200, b"{"), answer(404, b""), broken(Failure.READ_ERROR)]
)
def test_what_is_not_advertised_is_not_there(told: Exchange) -> None:
    features = read_features(told, broken(Failure.CONNECT_REFUSED, sent=False))
    assert (features.replay, features.durable_keys, features.request_ids, features.version) == (False, False, False, "")


HOSTILE = ("\ud800", "a\0b", "x" * 100_000, 10**30, -(10**400), 1e400, float("nan"), True, None, [], {})


def plain(found: Judgement | StatusReading) -> bool:
    """True if every text and number of it can be written down."""
    members = [getattr(found, name) for name in found.__struct_fields__]
    texts = [item for item in members if isinstance(item, str)]
    numbers = [item for item in members if isinstance(item, int | float)]
    short = all(len(text.encode()) <= 2_048 and "\0" not in text for text in texts)
    return short and all(abs(item) <= 2**53 for item in numbers)


@EACH_MUTATION
@pytest.mark.parametrize("word", HOSTILE)
def test_whatever_stands_beside_the_proof_in_an_answer_can_be_stored(operation: Operation, word: Any) -> None:
    body = {"run_id": RUN, "status": word, "choice": word, "resolved": word, "updated_at": word}
    status = 202 if operation is Operation.RUN_START else 200
    assert plain(judged(operation, answer(status, body)))
    refused = judged(operation, answer(400, {"error": {"message": "no", "code": word}}))
    assert refused.verdict is Verdict.REFUSED
    assert plain(refused)


@pytest.mark.parametrize("word", HOSTILE)
def test_whatever_a_status_says_can_be_stored(word: Any) -> None:
    members = {"session_id": word, "last_event": word, "updated_at": word}
    reading = read_status(answer(200, {"object": "hermes.run", "run_id": RUN, "status": "running"} | members), RUN)
    assert (reading.state, reading.problem) == ("running", "")
    assert plain(reading)
    assert plain(read_status(answer(200, {"object": "hermes.run", "run_id": RUN, "status": word}), RUN))
