"""The explained Action: one decision table for every state, and every fact with the event that proves it."""

from __future__ import annotations

import itertools

import pytest

from domain.action import State
from domain.binding import Phase
from domain.events import GapOpened, StatusUnread
from domain.values import Effect, Operation
from projections import folded
from projections.actions import ACTIONS, UNFINISHED, ActionRow
from projections.explain import SAYS, TABLE, Advice, advise, explain_action
from projections.recovery import DECISIONS, REASONS, WHY, unfinished_action
from projections.runs import RUNS, RunRow, run_key
from tests.recorded import Log

PHASES: tuple[Phase | None, ...] = (None, *Phase)
EVERY = list(itertools.product(Operation, State, Effect, PHASES))
MUTATIONS = (Operation.RUN_START, Operation.RUN_APPROVAL, Operation.RUN_STOP)


def rows(log: Log, action_id: str = "act_1", run_id: str = "run_1") -> tuple[ActionRow, RunRow | None]:
    events = log.recorded()
    row = folded(ACTIONS, [event for event in events if event.history.endswith(f"/{action_id}")])
    assert row is not None
    key = run_key("acme", "alpha", run_id)
    return row, folded(RUNS, [event for event in events if event.event.topic in RUNS.topics and RUNS.key(event) == key])


@pytest.mark.proves("A153", "A155", "B118")
def test_every_operation_state_effect_and_phase_has_one_advice() -> None:
    for operation, state, effect, phase in EVERY:
        advice = advise(operation, state, effect, phase)
        assert isinstance(advice, Advice)
        assert advice.step.endswith(".")
        assert advice.who in ("host", "approver", "operator", "caller", "nobody")
        assert advice.why.endswith(".")


def test_every_row_of_the_table_is_reached() -> None:
    reached = {id(advise(*place)) for place in EVERY}
    assert all(id(rule.advice) in reached for rule in TABLE)


@pytest.mark.parametrize("operation", MUTATIONS)
@pytest.mark.parametrize("phase", PHASES)
def test_no_advice_about_a_mutation_that_may_have_acted_lets_it_be_sent_again(
    operation: Operation, phase: Phase | None
) -> None:
    for state in (State.CLAIMED, State.UNKNOWN, State.RECEIVED):
        advice = advise(operation, state, Effect.POSSIBLE, phase)
        assert advice.never
        assert "new Action" not in advice.step
        assert "again" not in advice.step.lower()
    unknown = advise(operation, State.UNKNOWN, Effect.POSSIBLE, phase)
    assert unknown.unknown
    assert any("Do not" in text for text in unknown.never)


def test_a_stop_that_was_taken_is_followed_until_an_end_and_never_called_one() -> None:
    advice = advise(Operation.RUN_STOP, State.SETTLED, Effect.CONFIRMED, Phase.FOLLOWED)
    assert "until it shows an end" in advice.step
    assert "Whether the run is over." in advice.unknown


@pytest.mark.proves("A141", "B016", "B022")
def test_an_unknown_start_is_explained_with_each_fact_and_the_event_that_proves_it() -> None:
    log = Log()
    log.accept("act_1")
    log.claim("act_1")
    log.lose("act_1")
    row, _ = rows(log)
    told = explain_action(row)
    assert (told["state"], told["effect"], told["run"]) == ("unknown", "possible", None)
    assert [fact["evidence"] for fact in told["facts_known"]] == [f"acme/act/act_1:{n}" for n in (1, 2, 3)]
    assert all(fact["at"] and fact["fact"].endswith(".") for fact in told["facts_known"])
    assert {"fact": "Whether a run was created."} in told["facts_unknown"]
    assert told["next_step"]["who"] == "operator"
    assert any("second run" in text for text in told["must_not"])
    assert told["needs"] == [row.needs[0].id]


def test_a_start_whose_run_was_lost_lists_the_causes_and_the_missed_events() -> None:
    log = Log()
    log.start("act_1", "run_1")
    log.listen("run_1")
    log.hear("run_1", 1, (("tool.started", 2),))
    log.frames("run_1", GapOpened(at=log.tick(), number=1, after=2, reason="cut"))
    log.run("run_1", StatusUnread(at=log.tick(), code="c", cause="http_404", missing=True))
    row, run = rows(log)
    told = explain_action(row, run)
    assert told["run"]["state"] == "unknown"
    assert told["run"]["unknown_reason"] == "evidence_lost"
    unknown = {entry["fact"]: entry for entry in told["facts_unknown"]}
    assert unknown["Which events were missed."]["after"] == 2
    assert len(unknown["Why the provider does not know the run."]["can_be"]) == 3
    assert told["next_step"]["who"] == "operator"


def test_an_ended_run_is_explained_by_its_end_and_by_what_tools_may_have_left() -> None:
    log = Log()
    log.start("act_1", "run_1")
    log.end("run_1")
    row, run = rows(log)
    told = explain_action(row, run)
    assert (told["effect"], told["run"]["state"]) == ("confirmed", "completed")
    assert "run's result" in told["next_step"]["do"]
    assert {"fact": "Effects of tools that were at work when the run ended."} in told["facts_unknown"]


def test_every_event_of_the_views_and_every_reason_has_words() -> None:
    told = (ACTIONS.topics | RUNS.topics) - {"stream.frames_stored"}
    assert told == set(SAYS)
    assert set(DECISIONS) == set(WHY)
    assert set(filter(None, UNFINISHED.values())) <= set(REASONS)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ("", "accepted_not_claimed"),
        ("c", "claimed_in_flight"),
        ("cl", "outcome_unknown"),
        ("cr", "attempt_closed_waiting"),
        ("cR", "received_not_settled"),
        ("p", "awaiting_approval"),
        ("cRs", ""),
    ],
)
def test_unfinished_work_has_the_reason_of_its_state(steps: str, reason: str) -> None:
    log = Log()
    log.accept("act_1")
    for step in steps:
        match step:
            case "c":
                log.claim("act_1")
            case "l":
                log.lose("act_1")
            case "r":
                log.refuse("act_1")
            case "R":
                log.receive("act_1", "run_1")
            case "p":
                log.ask_person("act_1", Operation.RUN_STOP)
            case _:
                log.settle("act_1")
    row, _ = rows(log)
    assert row.reason == reason
    if reason:
        entry = unfinished_action(row)
        assert entry["means"] == REASONS[reason]
        assert entry["evidence"] == row.facts[-1].evidence
