"""Runs as they are told: evidence with its time, gaps with both edges, requests that wait, and doubts by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain import binding, stream
from domain.events import (
    ChoiceAnswered,
    ChoiceClaimed,
    EndDisputed,
    GapClosed,
    GapOpened,
    IntegrityMarked,
    RunDeadlinePassed,
    StatusUnread,
    StopAnswered,
    StopClaimed,
    StreamClosed,
)
from domain.history import run_token
from domain.values import Operation
from projections import folded
from projections.recovery import REASONS, needs_after, needs_person, recovery_view, unfinished_run
from projections.runs import (
    RUNS,
    RunRow,
    missing_causes,
    pending_approvals,
    run_key,
    run_summary,
    run_view,
    sealed_result,
    sealed_status,
)
from tests.recorded import Log, at

RUN = "run_1"


def started(**more: object) -> Log:
    log = Log()
    log.start("act_1", RUN, **more)
    return log


def row_of(log: Log, run_id: str = RUN) -> RunRow:
    key = run_key("acme", "alpha", run_id)
    row = folded(RUNS, [e for e in log.recorded() if e.event.topic in RUNS.topics and RUNS.key(e) == key])
    assert row is not None
    return row


def lose_evidence(log: Log) -> None:
    log.run(
        RUN, StatusUnread(at=log.tick(), code="connector.hermes_agent.run_not_found", cause="http_404", missing=True)
    )


@pytest.mark.proves("A044")
def test_after_the_receipt_a_run_is_running_and_its_end_is_not_known() -> None:
    view = run_view(row_of(started()))
    assert (view["state"], view["end"]["known"], view["last_observed_at"]) == ("running", False, None)
    assert view["actions"] == {"run_start": ["act_1"]}


def test_events_of_run_stream_and_the_actions_that_name_it_meet_in_one_row() -> None:
    log = started()
    log.accept("act_2", Operation.RUN_STOP, run_id=RUN)
    log.accept("act_3", Operation.RUN_EVENTS, run_id=RUN)
    log.accept("act_4", Operation.RUN_STATUS, run_id="run_other")
    log.listen(RUN)
    log.hear(RUN, 1, (("message.delta", 3), ("tool.started", 1)))
    log.hear(RUN, 5, (("message.delta", 2),))
    view = run_view(row_of(log))
    assert view["actions"] == {"run_start": ["act_1"], "run_stop": ["act_2"], "run_events": ["act_3"]}
    assert view["events"]["by_kind"] == {"message.delta": 5, "tool.started": 1}
    assert view["events"]["stored"] == 6


def test_a_long_handle_finds_its_row_by_a_digest() -> None:
    log = Log()
    handle = "run " + "x" * 300
    log.start("act_1", handle)
    log.accept("act_2", Operation.RUN_STATUS, run_id=handle)
    assert run_key("acme", "alpha", handle).endswith(run_token(handle))
    assert run_view(row_of(log, handle))["actions"]["run_status"] == ["act_2"]


@pytest.mark.proves("A063", "A064")
def test_states_are_kept_with_first_and_last_time_and_the_end_with_its_evidence() -> None:
    log = started()
    log.see(RUN, "queued")
    log.see(RUN, "running", last_event="tool.started")
    log.see(RUN, "running", last_event="tool.completed")
    log.see(RUN, "completed", has_output=True)
    end = log.end(RUN)
    row = row_of(log)
    view = run_view(row, result={"output": "done"})
    assert [state["state"] for state in view["states"]] == ["queued", "running", "completed"]
    assert view["states"][1]["first_seen_at"] < view["states"][1]["last_seen_at"]
    assert view["end"]["evidence"] == f"{end.history}:{end.version}"
    assert (view["state"], view["result"]) == ("completed", {"output": "done"})
    result, status = sealed_result(row), sealed_status(row)
    assert result is not None
    assert result.version == end.version
    assert status is not None
    assert row.reason == ""


@pytest.mark.proves("A074", "A153")
def test_a_missing_status_names_the_causes_that_are_still_possible_and_ends_nothing() -> None:
    log = started()
    lose_evidence(log)
    never_seen = row_of(log)
    assert {cause["cause"] for cause in missing_causes(never_seen)} == {
        "unknown_id",
        "retention_expired",
        "process_restart",
    }
    log = started()
    log.see(RUN, "running")
    lose_evidence(log)
    row = row_of(log)
    view = run_view(row)
    assert (view["state"], view["unknown_reason"]) == ("unknown", "evidence_lost")
    assert [cause["cause"] for cause in view["end"]["missing_can_mean"]] == ["process_restart"]
    assert view["last_observed_at"] is not None
    assert view["status_reads"]["run_missing"] is True
    assert row.reason == "run_evidence_lost"


def test_silence_of_an_hour_leaves_expiry_possible() -> None:
    log = started()
    log.see(RUN, "running")
    log.clock += 3601
    lose_evidence(log)
    assert {cause["cause"] for cause in missing_causes(row_of(log))} == {"retention_expired", "process_restart"}


def test_gaps_are_told_with_both_edges_and_an_open_one_with_its_near_edge() -> None:
    log = started()
    log.listen(RUN)
    log.hear(RUN, 1, (("message.delta", 5),))
    log.frames(RUN, StreamClosed(at=log.tick(), number=1, reason="cut"))
    log.frames(RUN, GapOpened(at=log.tick(), number=1, after=5, reason="cut"))
    (gap,) = run_view(row_of(log))["events"]["gaps"]
    assert (gap["after"], gap["before"], gap["reason"]) == (5, None, "cut")
    log.frames(RUN, GapClosed(at=log.tick(), number=1, before=6, by="terminal_status"))
    (gap,) = run_view(row_of(log))["events"]["gaps"]
    assert (gap["before"], gap["closed_by"]) == (6, "terminal_status")
    assert "events_missed" not in run_summary(row_of(log))


def test_pending_requests_are_told_oldest_first_with_the_time_at_which_the_provider_gives_up() -> None:
    log = started()
    log.listen(RUN)
    log.hear(RUN, 1, (("approval.request", 2),), asks=2)
    asked = log.clock
    row = row_of(log)
    first, second = pending_approvals(row, 60_000)
    assert (first["generation"], first["oldest"], second["oldest"]) == (1, True, False)
    assert first["provider_gives_up_at"] == at(asked + 60).isoformat().replace("+00:00", "Z")
    assert first["choices"] == ["once", "deny"]
    assert row.reason == "provider_approval_pending"
    log.hear(RUN, 3, (("approval.responded", 1),), answered=1)
    row = row_of(log)
    assert [item["generation"] for item in pending_approvals(row)] == [2]
    assert run_view(row)["answered_approvals"][0]["how"] == "responded:once"
    assert [need.met_at is not None for need in row.needs] == [True, False]


@pytest.mark.proves("A016", "A102")
def test_choices_and_stops_are_told_with_what_became_of_them() -> None:
    log = started()
    log.run(RUN, ChoiceClaimed(at=log.tick(), action_id="act_2", attempt_id="att_2", choice="once", generations=(1,)))
    assert run_view(row_of(log))["choices"][0]["outcome"] == "in_flight"
    log.run(
        RUN,
        ChoiceAnswered(at=log.tick(), action_id="act_2", attempt_id="att_2", verdict="accepted", resolved=2),
    )
    log.run(RUN, IntegrityMarked(at=log.tick(), kind="resolved_count", detail="reviewed 1, resolved 2"))
    log.run(RUN, StopClaimed(at=log.tick(), action_id="act_3", attempt_id="att_3"))
    log.run(RUN, StopAnswered(at=log.tick(), action_id="act_3", attempt_id="att_3", verdict="unknown", code="x"))
    row = row_of(log)
    view = run_view(row)
    assert (view["choices"][0]["outcome"], view["choices"][0]["resolved"]) == ("accepted", 2)
    assert (view["stops"][0]["outcome"], view["state"], row.reason) == ("unknown", "stopping", "run_stopping")
    assert view["integrity"][0]["kind"] == "resolved_count"
    assert {need.reason for need in row.open_needs} == {"integrity", "stop_in_doubt"}


@pytest.mark.proves("A048", "A061")
def test_requested_sent_and_effective_session_stand_apart_and_a_difference_is_noticed() -> None:
    log = Log()
    log.accept("act_1")
    log.claim("act_1")
    log.receive("act_1", RUN)
    log.bind("act_1", RUN, requested_session="wanted", sent_session="wanted")
    log.see(RUN, "running", session_id="another")
    session = run_view(row_of(log), other_runs=["run_9"])["session"]
    assert (session["requested"], session["sent"], session["effective"]) == ("wanted", "wanted", "another")
    assert len(session["notices"]) == 1
    assert session["other_active_runs"] == ["run_9"]


@pytest.mark.proves("B160")
def test_two_ends_that_differ_are_contradicted_and_wait_for_a_person() -> None:
    log = started()
    log.end(RUN, "completed")
    log.run(RUN, EndDisputed(at=log.tick(), state="failed", source="frame", evidence="str:3"))
    row = row_of(log)
    assert (row.state, row.unknown_reason, row.reason) == ("unknown", "contradicted", "run_contradicted")
    assert [need["reason"] for need in needs_person([row])] == ["run_contradicted"]


@pytest.mark.proves("A127")
def test_a_run_beyond_its_deadline_is_unfinished_work_with_that_reason_until_it_ends() -> None:
    log = started()
    log.run(RUN, RunDeadlinePassed(at=log.tick()))
    row = row_of(log)
    assert (row.state, row.unknown_reason, row.reason) == ("unknown", "deadline_passed", "run_deadline_passed")
    log.end(RUN)
    row = row_of(log)
    assert (row.state, row.reason) == ("completed", "run_ended_in_doubt")
    assert "ended_after_deadline" in unfinished_run(row)["marks"]
    assert row.open_needs == ()


def test_recovery_groups_agree_with_the_counts_and_hold_unreadable_histories_apart() -> None:
    rows = []
    for number in range(3):
        log = started()
        if number:
            lose_evidence(log)
        rows.append(row_of(log))
    view = recovery_view(
        {"run_followed": 1, "run_evidence_lost": 2, "": 40},
        [],
        rows,
        unreadable=[{"history": "acme/act/x", "position": 4}],
        at_start={"resumed": 1},
    )
    assert view["total"] == 3
    assert {group["reason"]: len(group["work"]) for group in view["groups"]} == {
        "run_followed": 1,
        "run_evidence_lost": 2,
    }
    assert all(group["count"] == len(group["work"]) for group in view["groups"])
    assert (view["unreadable_count"], view["at_start"]) == (1, {"resumed": 1})


def test_each_need_is_one_entry_with_the_same_id_in_every_fold_and_a_place_in_the_journal() -> None:
    log = started()
    log.listen(RUN)
    log.hear(RUN, 1, (("approval.request", 1),), asks=1)
    first = needs_after([row_of(log)], 0)
    log.see(RUN, "waiting_for_approval")
    log.see(RUN, "running")
    again = needs_after([row_of(log)], 0)
    assert first == again
    assert len(first) == 1
    assert first[0]["decisions"]
    assert needs_after([row_of(log)], first[0]["position"]) == []


# ---- laws ----

STEPS = ("see", "missing", "end", "dispute", "hear", "ask", "answer", "stop", "deadline")


@settings(max_examples=120, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=14))
def test_after_every_prefix_run_and_stream_are_exactly_what_the_domain_replays(steps: list[str]) -> None:
    log = started()
    seq = 0
    for step in steps:
        match step:
            case "see":
                log.see(RUN, "running")
            case "missing":
                lose_evidence(log)
            case "end":
                log.end(RUN)
            case "dispute":
                log.run(RUN, EndDisputed(at=log.tick(), state="failed", source="frame", evidence="str:1"))
            case "hear" | "ask" | "answer":
                kind = {"hear": "message.delta", "ask": "approval.request", "answer": "approval.responded"}[step]
                log.hear(RUN, seq + 1, ((kind, 1),), asks=int(step == "ask"), answered=int(step == "answer"))
                seq += 1
            case "stop":
                log.run(RUN, StopClaimed(at=log.tick(), action_id="act_9", attempt_id=f"att_{log.clock}"))
            case _:
                log.run(RUN, RunDeadlinePassed(at=log.tick()))
    row: RunRow | None = None
    events = [e for e in log.recorded() if e.event.topic in RUNS.topics and RUNS.key(e) is not None]
    for number, recorded in enumerate(events, 1):
        row = RUNS.fold(row, recorded)
        past = events[:number]
        run = binding.replay(e for e in past if "/run/" in e.history)
        heard = stream.replay(e for e in past if "/str/" in e.history)
        assert (row.state, row.unknown_reason) == binding.told_state(run)
        assert binding.marks(row.run) == binding.marks(run)
        assert (row.stream.pending, row.stream.answered, row.stream.kinds) == (
            heard.pending,
            heard.answered,
            heard.kinds,
        )
        assert row.reason == "" or row.reason in REASONS
        facets = RUNS.facets(row)
        assert facets is None or facets.reason == row.reason
