"""What a caller's input becomes: exact bodies, one path segment, trusted headers, and refusals before any send."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from domain.errors import CallerError
from domain.requests import (
    BODY_LIMIT,
    RunInput,
    StartBody,
    Trusted,
    approval_request,
    capabilities_request,
    check_run_input,
    check_start_input,
    events_request,
    health_detailed_request,
    health_request,
    models_request,
    session_messages_request,
    session_request,
    start_request,
    status_request,
    stop_request,
)
from domain.values import Operation

TRUSTED = Trusted(
    principal="user:ada",
    tenant="tenant-a",
    issuer="https://issuer.example",
    trace_id="trace-1",
    session_id="session-1",
    correlation_id="correlation-1",
    delegation_chain="[]",
    idempotency_key="key-1",
    deadline_unix_ms=1_796_070_479_000,
)
RUN = "run_6854b04f35b44fa7abc42b89cd3c3c37"


def body_of(start: StartBody) -> Any:
    return json.loads(start.content)


def problems(given: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(CallerError) as caught:
        check_start_input(given)
    assert caught.value.code == "action.input_schema_invalid"
    return {found["path"]: found["problem"] for found in caught.value.details["violations"]}


@pytest.mark.proves("A036", "A037", "A038")
def test_provider_members_travel_in_the_body_and_transport_members_stay_beside_it() -> None:
    body = {
        "input": "hello",
        "model": {"any": 1},
        "instructions": "be brief",
        "session_id": "s1",
        "conversation_history": [{"role": "user", "content": "before"}],
        "previous_response_id": "resp_1",
    }
    start = check_start_input({"body": body, "session_key": "memory-1", "idempotency_key": "k", "extra": 1})
    assert body_of(start) == body
    assert (start.session_key, start.requested_session, start.history) == ("memory-1", "s1", "explicit")
    assert start.dropped == ("extra",)


@pytest.mark.proves("A036", "A011")
def test_without_a_wrapper_the_whole_input_but_transport_and_powerless_members_is_the_body() -> None:
    start = check_start_input(
        {
            "input": "hi",
            "session_key": "m",
            "idempotency_key": "k",
            "temperature": 1,
            "base_url": "http://x",
            "_aip": {},
        }
    )
    assert body_of(start) == {"input": "hi", "temperature": 1}
    assert start.dropped == ("_aip", "base_url")


def test_a_body_that_is_no_object_is_the_input_and_one_more_body_is_unwrapped() -> None:
    assert body_of(check_start_input({"body": "hi"})) == {"input": "hi"}
    inner = check_start_input({"body": {"body": {"input": "hi", "body": 5, "session_key": "m"}, "note": 1}})
    assert body_of(inner) == {"input": "hi", "body": 5}
    assert inner.dropped == ("body.note", "body.session_key")


def test_a_session_that_stands_beside_the_body_travels_as_header_and_is_named_as_left_out() -> None:
    start = check_start_input({"body": {"input": "hi"}, "session_id": "s9"})
    assert (start.session_header, start.requested_session, start.dropped) == ("s9", None, ("session_id",))


@pytest.mark.proves("A040")
@pytest.mark.parametrize(
    ("members", "session"),
    [
        ({}, "own"),
        ({"session_id": None}, "own"),
        ({"session_id": "s1"}, "s1"),
        ({"previous_response_id": "resp_1"}, None),
    ],
)
def test_the_default_session_never_displaces_what_the_caller_named(members: dict[str, Any], session: str) -> None:
    start = check_start_input({"input": "hi"} | members, default_session_id="own")
    assert start.requested_session == session
    assert body_of(start).get("session_id") == session


@pytest.mark.proves("A034", "A035")
@pytest.mark.parametrize(
    "prompt",
    [
        "text",
        "   ",
        [{"role": "user", "content": "text"}],
        [{"role": "system"}, {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "image"}]}],
    ],
)
def test_a_string_or_messages_with_usable_last_content_are_accepted(prompt: Any) -> None:
    start = check_start_input({"input": prompt})
    assert body_of(start)["input"] == prompt
    assert start.history == ("messages" if isinstance(prompt, list) and len(prompt) > 1 else "none")


@pytest.mark.proves("A033", "A035")
@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        0,
        7,
        True,
        {},
        {"content": "x"},
        ["text"],
        [{"content": "x"}, "text"],
        [{"role": "user"}],
        [{"content": ""}],
        [{"content": []}],
        [{"content": ["text"]}],
        [{"content": [{"type": "text", "text": ""}]}],
        [{"content": [{"type": "text", "text": 5}]}],
    ],
)
def test_an_unusable_input_is_refused_before_any_send(prompt: Any) -> None:
    assert "input" in problems({"input": prompt})


@pytest.mark.proves("A033")
def test_a_missing_input_is_refused() -> None:
    assert list(problems({})) == ["input"]


def test_every_wrong_member_is_named_at_once() -> None:
    found = problems(
        {
            "session_id": 1,
            "instructions": [],
            "previous_response_id": {},
            "conversation_history": [{"role": "user"}],
            "session_key": "a\nb",
        }
    )
    assert set(found) == {
        "input",
        "session_id",
        "instructions",
        "previous_response_id",
        "conversation_history",
        "session_key",
    }


@pytest.mark.parametrize("history", ["text", {}, [1], [{"role": "user"}], [{"content": "x"}]])
def test_a_history_that_the_provider_would_refuse_is_refused(history: Any) -> None:
    assert list(problems({"input": "hi", "conversation_history": history})) == ["conversation_history"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", "a\0b", 1 << 70, {"k\udfff": 1}, {1, 2}])
def test_what_json_or_the_store_cannot_carry_is_refused(value: Any) -> None:
    assert list(problems({"input": "hi", "extra": [value]})) == ["extra"]


def test_a_name_that_cannot_be_stored_is_refused_without_being_repeated() -> None:
    assert list(problems({"input": "hi", "a\ud800": 1})) == ["a?"]


def test_nesting_is_bounded() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert list(problems({"input": "hi", "extra": deep})) == ["extra"]
    while isinstance(deep, list):  # unwound by hand: freeing it in one piece is a deep recursion
        deep = deep[0]


@pytest.mark.parametrize("key", ["", " a", "a\r", "a\nb", "a\0", "\u00e4", "x" * 257, 5])
def test_a_session_key_that_cannot_be_a_header_is_refused(key: Any) -> None:
    assert list(problems({"input": "hi", "session_key": key})) == ["session_key"]


@pytest.mark.proves("A147")
@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, True), (1, False)])
def test_a_body_of_exactly_the_providers_limit_passes_and_one_byte_more_does_not(over: int, fits: bool) -> None:
    text = "x" * (BODY_LIMIT - len('{"input":""}') + over)
    if fits:
        assert len(check_start_input({"input": text}).content) == BODY_LIMIT + over
    else:
        with pytest.raises(CallerError) as caught:
            check_start_input({"input": text})
        assert caught.value.code == "request.too_large"


def test_a_prompt_does_not_show_in_a_representation() -> None:
    assert "canary" not in repr(check_start_input({"input": "canary"}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(["input", "body", "session_id", "session_key", "conversation_history", "other"]), json_values
    )
)
def test_any_json_input_is_either_a_sendable_body_or_a_named_refusal(given: dict[str, Any]) -> None:
    try:
        start = check_start_input(given)
    except CallerError:
        assert problems(given)
    else:
        assert body_of(start)["input"]


@pytest.mark.proves("A097", "A098", "A099")
@pytest.mark.parametrize(
    ("word", "choice"),
    [
        ("once", "once"),
        ("approve", "once"),
        ("allow", "once"),
        ("session", "session"),
        ("always", "always"),
        ("deny", "deny"),
    ],
)
def test_a_choice_is_made_canonical(word: str, choice: str) -> None:
    given = {"run_id": RUN, "choice": word, "resolve_all": False, "reviewed": "d1"}
    checked = check_run_input(Operation.RUN_APPROVAL, given)
    assert checked == RunInput(run_id=RUN, choice=choice, reviewed=("d1",))


@pytest.mark.parametrize("word", ["approved", "yes", "", "ONCE", None, True, ["once"], {}])
def test_an_unknown_choice_is_refused(word: Any) -> None:
    with pytest.raises(CallerError, match="input"):
        check_run_input(Operation.RUN_APPROVAL, {"run_id": RUN, "choice": word})


@pytest.mark.parametrize(
    ("given", "resolve_all", "reviewed"),
    [
        ({"body": {"choice": "deny", "all": True}, "reviewed": ["a", "b", "a"]}, True, ("a", "b")),
        ({"choice": "deny", "resolve_all": True}, True, ()),
        ({"choice": "deny", "body": {"all": True}}, False, ()),
    ],
)
def test_a_decision_is_read_from_the_body_that_holds_the_choice(
    given: dict[str, Any], resolve_all: bool, reviewed: tuple[str, ...]
) -> None:
    checked = check_run_input(Operation.RUN_APPROVAL, {"run_id": RUN} | given)
    assert (checked.choice, checked.resolve_all, checked.reviewed) == ("deny", resolve_all, reviewed)


@pytest.mark.parametrize(
    ("name", "value"),
    [("all", 1), ("resolve_all", "true"), ("all", None), ("reviewed", 5), ("reviewed", [""]), ("reviewed", ["a b"])],
)
def test_a_member_of_a_decision_of_the_wrong_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(CallerError) as caught:
        check_run_input(Operation.RUN_APPROVAL, {"run_id": RUN, "choice": "once", name: value})
    assert [found["path"] for found in caught.value.details["violations"]] == [name]


@pytest.mark.proves("A076", "A077")
def test_the_event_limit_is_a_positive_integer_with_a_default() -> None:
    assert check_run_input(Operation.RUN_EVENTS, {"run_id": RUN}).max_events == 4096
    assert check_run_input(Operation.RUN_EVENTS, {"run_id": RUN, "max_events": 100_000}).max_events == 100_000
    for bad in (0, -1, 100_001, 1.5, "5", True, None):
        with pytest.raises(CallerError):
            check_run_input(Operation.RUN_EVENTS, {"run_id": RUN, "max_events": bad})


@pytest.mark.parametrize("run_id", [None, 5, "", "  ", ".", "..", "a\nb", "a\x7f", "\u0085", "x" * 513, "\ud800"])
def test_a_handle_that_cannot_stand_in_a_path_is_refused(run_id: Any) -> None:
    with pytest.raises(CallerError):
        check_run_input(Operation.RUN_STATUS, {"run_id": run_id})


def test_a_handle_may_stand_in_the_body() -> None:
    assert check_run_input(Operation.RUN_STOP, {"body": {"run_id": RUN}}).run_id == RUN


@pytest.mark.proves("A004", "A005", "A006", "A007", "A008", "A019", "A020")
def test_the_five_operations_have_their_method_path_and_time() -> None:
    start = start_request(b"{}", session_key=None, trusted=TRUSTED)
    status = status_request(RUN, TRUSTED)
    events = events_request(RUN, None, TRUSTED)
    approval = approval_request(RUN, "once", False, None, TRUSTED)
    stop = stop_request(RUN, TRUSTED)
    assert [(out.method, out.path, out.timeout_ms) for out in (start, status, events, approval, stop)] == [
        ("POST", "/v1/runs", 60_000),
        ("GET", f"/v1/runs/{RUN}", 30_000),
        ("GET", f"/v1/runs/{RUN}/events", 30_000),
        ("POST", f"/v1/runs/{RUN}/approval", 30_000),
        ("POST", f"/v1/runs/{RUN}/stop", 30_000),
    ]
    assert (start.body, status.body, stop.body) == (b"{}", None, None)
    assert json.loads(approval.body or b"") == {"choice": "once", "resolve_all": False}
    assert dict(events.headers)["Accept"] == "text/event-stream"


@pytest.mark.proves("A053", "A049")
def test_the_trusted_headers_are_on_every_operation_and_the_key_on_mutations_only() -> None:
    expected = {
        "X-AIP-Session-Id": "session-1",
        "X-AIP-Correlation-Id": "trace-1",
        "X-AIP-Delegation-Chain": "[]",
        "X-AIP-Principal-Id": "user:ada",
        "X-AIP-Authentication-Issuer": "https://issuer.example",
        "X-AIP-Tenant-Id": "tenant-a",
        "X-AIP-Trace-Id": "trace-1",
        "X-AIP-Deadline-Unix-Ms": "1796070479000",
        "X-Hermes-Session-Key": "memory-1",
    }
    mutations = (
        start_request(b"{}", session_key="memory-1", trusted=TRUSTED),
        approval_request(RUN, "deny", True, "req", TRUSTED, session_key="memory-1"),
        stop_request(RUN, TRUSTED, session_key="memory-1"),
    )
    reads = (
        status_request(RUN, TRUSTED, session_key="memory-1"),
        events_request(RUN, "4", TRUSTED, session_key="memory-1"),
    )
    for out in (*mutations, *reads):
        assert expected.items() <= dict(out.headers).items()
        assert dict(out.headers).get("Idempotency-Key") == ("key-1" if out in mutations else None)


def test_facts_that_are_not_there_give_no_header_and_the_correlation_stands_in_for_a_missing_trace() -> None:
    plain = Trusted(principal="p", tenant="t", issuer="i", correlation_id="c")
    names = dict(status_request(RUN, plain).headers)
    assert names["X-AIP-Correlation-Id"] == "c"
    assert not {"X-AIP-Trace-Id", "X-AIP-Session-Id", "X-AIP-Deadline-Unix-Ms", "Last-Event-ID"} & set(names)


@pytest.mark.parametrize("value", ["", "a\r\nX: y", "a\0", "\u00e4", " a", "a\t", "\x7f", "x" * (16 * 1024 + 1)])
def test_a_trusted_fact_that_is_no_header_value_is_refused(value: str) -> None:
    with pytest.raises(CallerError) as caught:
        status_request(RUN, Trusted(principal=value, tenant="t", issuer="i"))
    assert caught.value.code == "connector.hermes_agent.configuration_or_input"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=40))
def test_any_handle_is_one_visible_path_segment_or_refused(run_id: str) -> None:
    try:
        path = status_request(run_id, TRUSTED).path
    except CallerError:
        return
    assert re.fullmatch(r"/v1/runs/(?!\.{1,2}$)[A-Za-z0-9_.~%-]+", path)


@pytest.mark.parametrize("handle", ["a/../b", "a%2fb", "?x=1#y", "../stop", "a b"])
def test_a_handle_cannot_leave_its_segment(handle: str) -> None:
    path = stop_request(handle, TRUSTED).path
    assert path.count("/") == 4
    assert not set(" ?#") & set(path)


def test_probes_read_only_documented_routes_and_health_goes_without_the_key() -> None:
    outs = [
        health_request(),
        health_detailed_request(),
        models_request(),
        capabilities_request(),
        session_request("s/1"),
        session_messages_request("s1"),
    ]
    assert [out.path for out in outs] == [
        "/health",
        "/health/detailed",
        "/v1/models",
        "/v1/capabilities",
        "/api/sessions/s%2F1",
        "/api/sessions/s1/messages",
    ]
    assert [out.authenticated for out in outs] == [False, True, True, True, True, True]
    assert {out.method for out in outs} == {"GET"}
