"""Laws that hold for every history, not only for those that somebody thought of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from domain import action as actions
from domain import attempt as attempts
from domain import binding
from domain import stream as streams
from domain.action import Action, State
from domain.binding import Phase, Run
from domain.contracts import capability_id, normal_endpoint_id, parse_capability
from domain.errors import CallerError
from domain.events import EndDisputed, Event, EvidenceFound, OwnerChanged
from domain.idempotency import fingerprint_text
from domain.provider import Exchange, Failure, RawFrame, Verdict, end_marks, judge, read_status
from domain.stream import Received, RunStream, store_frames
from domain.values import MUTATIONS, Operation, canonical
from tests.builders import (
    OTHER,
    OWNER,
    RUN,
    accepted,
    asking,
    bound,
    closed,
    decided,
    denied,
    ended,
    error_body,
    frame,
    in_doubt,
    missing,
    moment,
    not_sent,
    received,
    recorded,
    refused,
    seen,
    settled,
    stopped,
    stored,
    stream,
    subscribed,
    wished,
)

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ---- folds -----------------------------------------------------------------------------------------------------------

EVIDENCE = EvidenceFound(at=moment(40), attempt_id="att_1", proves="applied", source="s", reference="r")
STORIES = (
    *(
        story(operation)
        for operation in sorted(MUTATIONS)
        for story in (received, in_doubt, refused, not_sent, settled)
    ),
    denied(),
    wished(accepted()),
    (*in_doubt(Operation.RUN_STOP), EVIDENCE, msgspec.structs.replace(EVIDENCE, proves="nothing")),
    (OwnerChanged(at=moment(50), owner=OTHER, previous=OWNER),),
)
RUN_STORIES = (
    ended(seen(bound(), "running")),
    ended(missing(bound()), "cancelled", "frame"),
    stopped(decided(bound(), verdict="unknown")),
    (EndDisputed(at=moment(9), state="failed", source="frame", evidence="e"),),
    (EndDisputed(at=moment(9), state="running", source="status", evidence="e"),),
)
CUT = closed(subscribed())
STREAM_STORIES = (
    closed(stored(stored(subscribed(), frame("a"), asking()), frame("approval.responded", choice="once", resolved=1))),
    closed(stored(subscribed(), frame("run.completed"))),
    (*CUT, *streams.end_gap(stream(CUT), "terminal_status", at=moment(20))),
)


def any_order(*stories: tuple[Event, ...]) -> st.SearchStrategy[list[Event]]:
    pool = [event for story in stories for event in story]
    return st.lists(st.sampled_from(pool), max_size=14)


FOLDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], Any], st.SearchStrategy[list[Event]]]] = {
    "action": (actions.replay, actions.evolve, Action, any_order(*STORIES)),
    "run": (binding.replay, binding.evolve, Run, any_order(*RUN_STORIES)),
    "stream": (streams.replay, streams.evolve, RunStream, any_order(*STREAM_STORIES)),
}


@pytest.mark.parametrize("name", FOLDS)
@QUICK
@given(data=st.data())
def test_a_replay_equals_the_fold_step_by_step_from_any_point(name: str, data: st.DataObject) -> None:
    replay, evolve, empty, histories = FOLDS[name]
    history = recorded(data.draw(histories))
    cut = data.draw(st.integers(0, len(history)))
    state = replay(history[:cut]) if cut else empty()
    for item in history[cut:]:
        state = evolve(state, item.event, item.version)
    assert state == replay(history)


@pytest.mark.parametrize("name", FOLDS)
@QUICK
@given(data=st.data())
def test_positions_ids_and_causes_in_the_journal_decide_nothing(name: str, data: st.DataObject) -> None:
    replay, _, _, histories = FOLDS[name]
    history = recorded(data.draw(histories))
    elsewhere = [
        msgspec.structs.replace(item, position=item.position * 7 + 1, event_id="x", cause="restored", fence=OTHER)
        for item in history
    ]
    assert replay(elsewhere) == replay(history)


def reachable(table: dict[Any, Any], start: Any) -> set[Any]:
    found = {start}
    while True:
        more = {then for (state, _), then in table.items() if state in found} - found
        if not more:
            return found
        found |= more


@QUICK
@given(any_order(*STORIES))
def test_an_action_moves_along_its_table_and_a_settlement_stands(events: list[Event]) -> None:
    known, answered = Action(), None
    for version, event in enumerate(events, 1):
        after = actions.evolve(known, event, version)
        allowed = {known.state, actions.NEXT.get((known.state, type(event)), known.state)}
        assert after.state in allowed & reachable(actions.NEXT, State.NEW)
        answered = answered or after.settled
        assert after.settled == answered
        assert len(after.attempts) >= len(known.attempts)
        known = after


@QUICK
@given(any_order(*RUN_STORIES))
def test_a_run_moves_along_its_table_and_an_end_stands(events: list[Event]) -> None:
    known, end = Run(), None
    for version, event in enumerate(events, 1):
        after = binding.evolve(known, event, version)
        allowed = {known.phase, binding.NEXT.get((known.phase, type(event)), known.phase)}
        assert after.phase in allowed & reachable(binding.NEXT, Phase.NEW)
        end = end or after.ended
        assert after.ended == end
        assert len(after.disputes) >= len(known.disputes)
        known = after


@QUICK
@given(any_order(*STREAM_STORIES))
def test_no_gap_and_no_frame_vanishes(events: list[Event]) -> None:
    known = RunStream()
    for version, event in enumerate(events, 1):
        after = streams.evolve(known, event, version)
        assert len(after.gaps) >= len(known.gaps)
        assert sum(after.kinds.values()) >= sum(known.kinds.values())
        assert not known.terminal_seq or after.terminal_seq == known.terminal_seq
        known = after


def test_every_state_of_the_tables_can_be_reached() -> None:
    assert reachable(actions.NEXT, State.NEW) == set(State)
    assert reachable(binding.NEXT, Phase.NEW) == set(Phase)
    assert reachable(attempts.NEXT, attempts.AttemptState.CLAIMED) == set(attempts.AttemptState)


# ---- frames ----------------------------------------------------------------------------------------------------------

KINDS = ("message.delta", "tool.started", "tool.completed", "approval.responded", "run.steered", "run.completed")


@st.composite
def frames(draw: st.DrawFn, *, numbered: bool = False) -> list[Received]:
    made = []
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from((*KINDS, "approval.request")))
        body: dict[str, Any] = {"seq": number} if numbered else {}
        if kind == "approval.request":
            made.append(frame(kind, number, f"a{number}", choices=["once", "deny"], **body))
        else:
            made.append(frame(kind, number, choice="once", resolved=draw(st.integers(0, 3)), **body))
    return made


def told(known: RunStream) -> tuple[Any, ...]:
    """What a stream says, whichever batches its frames came in."""
    return (
        known.last_seq,
        known.kinds,
        known.asked,
        [item.ask for item in known.pending],
        [(item.generation, item.how, item.seq) for item in known.answered],
        (known.terminal_seq, known.terminal_state, known.last_provider_seq),
    )


@QUICK
@given(frames(), st.data())
def test_how_frames_are_cut_into_batches_changes_nothing_that_is_told(
    batch: list[Received], data: st.DataObject
) -> None:
    history = subscribed()
    left = list(batch)
    while left:
        size = data.draw(st.integers(1, len(left)))
        history, left = stored(history, *left[:size]), left[size:]
    assert told(stream(history)) == told(stream(stored(subscribed(), *batch)))


@QUICK
@given(frames(numbered=True), st.data())
def test_a_replay_from_any_earlier_frame_adds_each_frame_once(batch: list[Received], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(batch)))
    back = data.draw(st.integers(0, cut))
    replayed = stored(stored(subscribed(), *batch[:cut]), *batch[back:])
    assert told(stream(replayed)) == told(stream(stored(subscribed(), *batch)))


@QUICK
@given(frames())
def test_every_request_is_either_pending_or_answered_and_keeps_its_generation(batch: list[Received]) -> None:
    known = stream(stored(subscribed(), *batch))
    waiting = [item.ask.generation for item in known.pending]
    gone = [item.generation for item in known.answered]
    assert sorted(waiting + gone) == list(range(1, known.asked + 1))
    assert waiting == sorted(waiting)


@QUICK
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=6), st.booleans())
def test_no_bytes_of_a_provider_break_the_reading_of_frames(contents: list[bytes], named: bool) -> None:
    batch = [
        Received(
            at=moment(2),
            frame=RawFrame(raw=raw, data=raw.decode("utf-8", "replace"), event="approval.request" if named else ""),
            digest="x",
        )
        for raw in contents
    ]
    event = store_frames(RunStream(), batch, "b")
    assert event is not None
    assert (event.first, sum(count for _, count in event.kinds)) == (1, event.count)


# ---- text ------------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=5)


def shuffled(value: Any, order: Callable[[list[Any]], list[Any]]) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(item, order) for key, item in order(list(value.items()))}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


@QUICK
@given(OBJECT, st.randoms(use_true_random=False))
def test_a_fingerprint_ignores_the_order_of_members_at_every_depth(value: dict[str, Any], chance: Any) -> None:
    other = shuffled(value, lambda items: chance.sample(items, len(items)))
    assert fingerprint_text("cap", other) == fingerprint_text("cap", value)


@QUICK
@given(JSON)
def test_canonical_text_is_its_own_canonical_text_and_loses_nothing(value: Any) -> None:
    text = canonical(value)
    assert canonical(json.loads(text)) == text
    assert json.loads(text) == value


@QUICK
@given(OBJECT, OBJECT)
def test_requests_that_differ_have_different_fingerprints(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (fingerprint_text("cap", one) == fingerprint_text("cap", other)) is same


@pytest.mark.proves("A003")
@QUICK
@given(st.text(max_size=140))
def test_an_endpoint_id_is_normal_after_one_normalisation_or_refused(value: str) -> None:
    try:
        normal = normal_endpoint_id(value)
    except CallerError:
        return
    assert normal_endpoint_id(normal) == normal
    assert parse_capability(capability_id(normal, Operation.RUN_STATUS)) == (normal, Operation.RUN_STATUS)


@QUICK
@given(st.text(max_size=60) | st.text("cap:hermes_agent_run_start", max_size=40))
def test_any_text_is_a_known_capability_or_refused_as_unsupported(value: str) -> None:
    refused_as, named = "", value
    try:
        named = capability_id(*parse_capability(value))
    except CallerError as error:
        refused_as = error.code
    assert refused_as in ("", "capability.unsupported")
    assert named == value


# ---- answers ---------------------------------------------------------------------------------------------------------

EXCHANGES = st.builds(
    Exchange,
    sent=st.booleans(),
    failure=st.sampled_from(Failure),
    status=st.none() | st.integers(100, 599),
    retry_after=st.text(max_size=4),
    body=st.binary(max_size=40)
    | st.builds(lambda value: json.dumps(value).encode(), JSON)
    | st.sampled_from(
        [
            json.dumps(body).encode()
            for body in (error_body("c"), {"run_id": RUN, "status": "stopping", "choice": "once"})
        ]
    ),
)


@pytest.mark.proves("A013", "A156")
@QUICK
@given(st.sampled_from(sorted(MUTATIONS)), EXCHANGES)
def test_any_answer_is_judged_and_only_a_complete_expected_one_is_accepted(
    operation: Operation, exchange: Exchange
) -> None:
    judgement = judge(operation, exchange, RUN)
    expected = 202 if operation is Operation.RUN_START else 200
    if judgement.verdict is Verdict.ACCEPTED:
        assert (exchange.complete, exchange.status) == (True, expected)
    if judgement.verdict is Verdict.REFUSED:
        assert exchange.complete
        assert exchange.status is not None
        assert 400 <= exchange.status < 500 or exchange.status == 503
    if not exchange.complete:
        assert judgement.verdict is (Verdict.AMBIGUOUS if exchange.sent else Verdict.NOT_SENT)


@QUICK
@given(EXCHANGES)
def test_any_status_answer_is_a_state_of_this_run_or_a_named_problem(exchange: Exchange) -> None:
    reading = read_status(exchange, RUN)
    assert bool(reading.state) is not bool(reading.problem)
    assert not reading.missing or exchange.status == 404


@QUICK
@given(st.sampled_from(["completed", "failed", "cancelled", "interrupted", "running"]), OBJECT)
def test_any_terminal_body_can_be_weighed(state: str, body: dict[str, Any]) -> None:
    assert len(set(end_marks(state, body))) == len(end_marks(state, body))
