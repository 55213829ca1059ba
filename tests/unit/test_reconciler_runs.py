"""Observing a run: reads only, one subscription, pauses that grow, and an end that is confirmed or given up."""

from __future__ import annotations

from typing import Any

import pytest

from domain.events import OwnerChanged, RunDeadlinePassed
from domain.reconciler import (
    CONFIRMING_POLLS,
    POLL_BLIND_MS,
    POLL_LIVE_MS,
    POLL_LOST_MS,
    Finished,
    Hold,
    PollRun,
    RecordRun,
    RunFacts,
    RunStep,
    Subscribe,
    WaitUntil,
    next_run_step,
)
from tests.builders import (
    OTHER,
    OWNER,
    REPLAYING,
    History,
    bound,
    closed,
    ended,
    frame,
    missing,
    moment,
    run,
    seen,
    stopped,
    stored,
    stream,
    subscribed,
)

LATER = 30.0


def run_step(history: History, frames: History = (), at: float = LATER, **facts: Any) -> RunStep:
    return next_run_step(
        RunFacts(**({"run": run(history), "stream": stream(frames), "owner": OWNER} | facts)), at=moment(at)
    )


CUT = closed(stored(subscribed(), frame("a")))
READING = stored(subscribed(), frame("a"))
ENDED_STREAM = closed(stored(subscribed(), frame("run.completed")))
FRAME_THEN_404 = missing(ended(bound(), source="frame"))
TAKEN = (*bound(), OwnerChanged(at=moment(1), owner=OTHER, previous=OWNER))


@pytest.mark.proves("A089", "A090", "A092", "A126", "A139", "A140", "A157")
@pytest.mark.parametrize(
    ("name", "history", "frames", "facts", "then"),
    [
        ("bound", bound(), (), {}, Subscribe()),
        ("reading, not yet polled", bound(), READING, {"live": True}, PollRun()),
        ("cut, not yet polled", bound(), CUT, {}, PollRun()),
        ("subscription refused", bound(), closed(subscribed(), "refused"), {}, PollRun()),
        ("cut on a provider that replays", bound(REPLAYING), CUT, {}, Subscribe()),
        ("terminal frame, not confirmed", ended(bound(), source="frame"), ENDED_STREAM, {}, PollRun()),
        ("terminal status and frame", ended(bound()), ENDED_STREAM, {}, Finished(why="end_known")),
        ("ended, stream never opened", ended(bound()), (), {}, Subscribe()),
        ("ended, still reading", ended(bound()), READING, {"live": True}, Hold(why="stream_open")),
        ("ended by frame, then 404", FRAME_THEN_404, ENDED_STREAM, {}, Finished(why="end_known")),
        ("missing", missing(bound()), CUT, {}, PollRun()),
        ("another owner", bound(owner=OTHER), (), {}, Hold(why="owned_elsewhere")),
        ("taken over", TAKEN, (), {}, Hold(why="owned_elsewhere")),
    ],
)
def test_every_state_of_a_run_has_one_next_step(
    name: str, history: History, frames: History, facts: dict[str, Any], then: RunStep
) -> None:
    assert run_step(history, frames, **facts) == then


def test_a_subscription_whose_reader_is_gone_is_closed_with_a_gap() -> None:
    step = run_step(bound(), READING)
    assert isinstance(step, RecordRun)
    assert (step.why, [type(event).__name__ for event in step.stream]) == (
        "subscriber_lost",
        ["StreamClosed", "GapOpened"],
    )


@pytest.mark.parametrize(("source", "by"), [("status", "terminal_status"), ("frame", "terminal_frame")])
def test_a_known_end_closes_the_far_edge_of_the_gap(source: str, by: str) -> None:
    step = run_step(ended(bound(), source=source), CUT)
    assert isinstance(step, RecordRun)
    (gap,) = stream((*CUT, *step.stream)).gaps
    assert (gap.after, gap.before, gap.closed_by) == (1, 2, by)


@pytest.mark.proves("A127")
def test_a_run_past_its_deadline_is_marked_before_anything_else_and_polled_on() -> None:
    step = run_step(bound(deadline=20), READING, live=True)
    assert isinstance(step, RecordRun)
    assert [type(event) for event in step.run] == [RunDeadlinePassed]
    assert run_step((*bound(deadline=20), *step.run), READING, live=True) == PollRun()


def polled(history: History, frames: History, polls: int, live: bool = False) -> float:
    """The pause before the next poll in milliseconds."""
    step = run_step(history, frames, at=0, polled_at=moment(0), polls=polls, live=live)
    assert isinstance(step, WaitUntil)
    return (step.at - moment(0)).total_seconds() * 1000


@pytest.mark.proves("A065", "A066", "A068", "A114", "A139")
@pytest.mark.parametrize(
    ("history", "frames", "live", "ladder"),
    [
        (seen(bound(), "queued"), READING, True, POLL_LIVE_MS),
        (seen(bound(), "running"), READING, True, POLL_LIVE_MS),
        (seen(bound(), "running"), CUT, False, POLL_BLIND_MS),
        (seen(stopped(bound()), "stopping"), CUT, False, POLL_BLIND_MS),
        (missing(bound()), CUT, False, POLL_LOST_MS),
    ],
)
def test_polling_goes_on_with_growing_and_bounded_pauses(
    history: History, frames: History, live: bool, ladder: tuple[int, ...]
) -> None:
    found = tuple(polled(history, frames, polls, live) for polls in range(len(ladder)))
    assert found == ladder == tuple(sorted(ladder))
    assert polled(history, frames, 10_000, live) == ladder[-1]
    assert run_step(history, frames, at=400, polled_at=moment(0), polls=10_000, live=live) == PollRun()


def test_a_poll_is_not_due_later_than_the_runs_deadline() -> None:
    step = run_step(missing(bound(deadline=31)), CUT, at=30, polled_at=moment(30), polls=9)
    assert step == WaitUntil(at=moment(31), why="poll")


def test_an_end_that_no_status_confirms_is_left_after_some_polls() -> None:
    history = ended(bound(), source="frame")
    assert run_step(history, ENDED_STREAM, polls=CONFIRMING_POLLS - 1) == PollRun()
    assert run_step(history, ENDED_STREAM, polls=CONFIRMING_POLLS) == Finished(why="end_known")


def test_a_lost_run_is_observed_for_a_day_and_a_run_that_answers_for_ever() -> None:
    day = 86_400
    assert run_step(missing(bound()), CUT, at=day - 1) == PollRun()
    assert run_step(missing(bound()), CUT, at=day) == Finished(why="evidence_lost")
    assert run_step(seen(bound(), "running"), CUT, at=day * 30) == PollRun()


@pytest.mark.proves("A087")
@pytest.mark.parametrize("history", [bound(), seen(bound(), "running"), missing(bound()), ended(bound())])
def test_a_stream_that_was_opened_once_is_never_opened_again_without_replay(history: History) -> None:
    for frames in (READING, CUT, ENDED_STREAM, closed(subscribed(), "refused")):
        for live in (True, False):
            for at in (LATER, 3_600.0, 10**6):
                assert run_step(history, frames, at, live=live) != Subscribe()
