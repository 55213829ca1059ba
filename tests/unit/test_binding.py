"""A run as its history tells it: ends need proof, late words stand beside them, choices and stops are checked first."""

from __future__ import annotations

from typing import Any

import pytest

from domain import binding
from domain.binding import (
    NEXT,
    Phase,
    Run,
    check_choice,
    check_resolved,
    check_stop,
    evolve,
    marks,
    observe_end_frame,
    observe_status,
    pass_deadline,
    told_state,
)
from domain.errors import CallerError
from domain.events import (
    TOPICS,
    ChoiceAnswered,
    ChoiceClaimed,
    EndDisputed,
    Event,
    IntegrityMarked,
    OwnerChanged,
    RunDeadlinePassed,
    RunEnded,
    StatusSeen,
    StatusUnread,
)
from domain.provider import LIVE_STATES, TERMINAL_STATES, Exchange, Failure, read_status
from domain.stream import RunStream
from domain.values import Plain
from tests.builders import (
    ASK,
    OTHER,
    OWNER,
    PREFIX,
    REPLAYING,
    RUN,
    History,
    answer,
    asking,
    bound,
    broken,
    closed,
    decided,
    ended,
    error_body,
    frame,
    missing,
    moment,
    run,
    seen,
    status_answer,
    stopped,
    stored,
    stream,
    subscribed,
)

RESULT = Plain(content=b"{}")


def observe(known: Run, exchange: Exchange, at: float = 30) -> tuple[Event, ...]:
    return observe_status(known, read_status(exchange, RUN), exchange, "d1", at=moment(at))


def after(history: History, exchange: Exchange, at: float = 30) -> History:
    return (*history, *observe(run(history), exchange, at))


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("queued", "running"),
        ("running", "running"),
        ("waiting_for_approval", "waiting_for_approval"),
        ("stopping", "stopping"),
        ("paused_by_a_newer_release", "running"),
    ],
)
def test_a_live_word_is_kept_and_ends_nothing(word: str, told: str) -> None:
    events = observe(run(bound()), status_answer(word))
    assert [type(event) for event in events] == [StatusSeen]
    known = run((*bound(), *events))
    assert (told_state(known), known.phase, known.ended) == ((told, ""), Phase.FOLLOWED, None)
    assert known.seen is not None
    assert known.seen.state == word


@pytest.mark.proves("A069", "A070", "A071", "A063")
@pytest.mark.parametrize("word", sorted(TERMINAL_STATES))
def test_a_terminal_word_is_an_end_that_cites_the_status_object(word: str) -> None:
    exchange = status_answer(word, output="done", usage={"n": 1})
    events = observe(run(bound()), exchange)
    assert [type(event) for event in events] == [StatusSeen, RunEnded]
    end = events[1]
    assert isinstance(end, RunEnded)
    assert (end.state, end.source, end.evidence) == (word, "status", "run:2")
    assert end.result == Plain(content=exchange.body)
    known = run((*bound(), *events))
    assert (told_state(known), known.phase, known.confirmed) == ((word, ""), Phase.ENDED, True)


def test_a_run_that_nothing_is_known_of_but_its_receipt_is_running() -> None:
    known = run(bound())
    assert (told_state(known), marks(known), known.phase) == (("running", ""), (), Phase.FOLLOWED)


@pytest.mark.proves("A058", "A125", "A153")
def test_404_is_lost_evidence_and_neither_a_failure_nor_an_end() -> None:
    history = after(bound(), answer(404, error_body("run_not_found")))
    known = run(history)
    assert (told_state(known), known.phase, known.ended) == (("unknown", "evidence_lost"), Phase.LOST, None)
    found_again = run(after(history, status_answer("running"), at=40))
    assert (told_state(found_again), found_again.phase) == (("running", ""), Phase.FOLLOWED)


@pytest.mark.parametrize(
    "exchange",
    [
        answer(500, b""),
        answer(404, b"Not Found"),
        answer(401, error_body("invalid_api_key")),
        broken(Failure.READ_ERROR),
        status_answer("completed", run_id="run_0002"),
    ],
)
def test_a_read_that_failed_otherwise_changes_nothing_that_is_told(exchange: Exchange) -> None:
    before = run(seen(bound(), "running"))
    known = run(after(seen(bound(), "running"), exchange))
    assert (told_state(known), known.phase) == (told_state(before), Phase.FOLLOWED)
    assert known.unread is not None


def test_an_end_that_is_stored_survives_its_expiry_at_the_provider() -> None:
    known = run(after(ended(bound()), answer(404, error_body("run_not_found"))))
    assert (told_state(known), known.phase) == (("completed", ""), Phase.ENDED)


def test_the_same_reading_twice_is_stored_once() -> None:
    history = after(bound(), status_answer("running"))
    assert observe(run(history), status_answer("running", updated_at=9.0)) == ()
    assert len(observe(run(history), status_answer("running", last_event="tool.started"))) == 1
    lost = after(history, answer(500, b""))
    assert observe(run(lost), answer(500, b"")) == ()
    assert len(observe(run(lost), answer(502, b""))) == 1
    assert len(observe(run(lost), status_answer("running"))) == 1


def test_a_stopping_word_may_be_followed_by_running_and_an_end_by_nothing() -> None:
    history = after(after(bound(), status_answer("stopping")), status_answer("running"), at=31)
    assert told_state(run(history)) == ("running", "")
    over = run(after(ended(history, at=40), status_answer("running"), at=41))
    assert (told_state(over), over.phase) == (("completed", ""), Phase.ENDED)


@pytest.mark.parametrize("word", sorted(LIVE_STATES))
def test_a_live_word_after_the_end_is_evidence_and_no_way_back(word: str) -> None:
    history = ended(bound())
    events = observe(run(history), status_answer(word))
    assert [type(event) for event in events] == [StatusSeen, EndDisputed]
    known = run((*history, *events))
    assert (known.phase, told_state(known), marks(known)) == (Phase.ENDED, ("completed", ""), ())


@pytest.mark.parametrize("source", ["status", "frame"])
def test_two_ends_that_differ_are_contradicted_whichever_came_first(source: str) -> None:
    history = ended(bound(), "completed", source)
    other = (
        observe(run(history), status_answer("cancelled"))
        if source == "frame"
        else observe_end_frame(run(history), "cancelled", RESULT, "stream:9", False, (), at=moment(30))
    )
    known = run((*history, *other))
    assert (known.phase, told_state(known)) == (Phase.CONTRADICTED, ("unknown", "contradicted"))
    assert known.ended == run(history).ended
    assert "contradicted" in marks(known)


def test_a_frame_end_is_confirmed_by_the_same_word_of_a_status_once() -> None:
    history = ended(bound(), "completed", "frame")
    assert run(history).confirmed is False
    confirmed = after(history, status_answer("completed"))
    assert (run(confirmed).confirmed, run(confirmed).phase) == (True, Phase.ENDED)
    assert observe(run(confirmed), status_answer("completed", last_event="subagent.complete")) == ()


def test_the_same_end_twice_or_the_same_dispute_twice_adds_nothing() -> None:
    history = ended(bound(), "completed")
    assert observe_end_frame(run(history), "completed", RESULT, "stream:9", True, (), at=moment(30)) == ()
    disputed = (*history, *observe_end_frame(run(history), "failed", RESULT, "stream:9", False, (), at=moment(30)))
    assert observe_end_frame(run(disputed), "failed", RESULT, "stream:10", False, (), at=moment(31)) == ()
    assert observe(run(disputed), status_answer("failed")) == ()


@pytest.mark.proves("A082")
def test_a_terminal_frame_is_an_end_that_cites_the_frame() -> None:
    (end,) = observe_end_frame(run(bound()), "failed", RESULT, "stream:12", False, ("interrupted",), at=moment(30))
    assert isinstance(end, RunEnded)
    assert (end.state, end.source, end.evidence, end.marks) == ("failed", "frame", "stream:12", ("interrupted",))


# ---- deadlines and doubt ---------------------------------------------------------------------------------------------


@pytest.mark.proves("A127")
def test_a_run_that_outlives_its_deadline_is_told_so_once_and_observed_on() -> None:
    history = bound(deadline=60)
    assert pass_deadline(run(history), at=moment(59.999)) == ()
    (passed,) = pass_deadline(run(history), at=moment(60))
    assert isinstance(passed, RunDeadlinePassed)
    over = (*history, passed)
    assert told_state(run(over)) == ("unknown", "deadline_passed")
    assert pass_deadline(run(over), at=moment(61)) == ()
    late = run(ended(over, at=70))
    assert (told_state(late), marks(late)) == (("completed", ""), ("ended_after_deadline",))


def test_an_end_or_no_deadline_passes_none() -> None:
    assert pass_deadline(run(bound()), at=moment(10**6)) == ()
    assert pass_deadline(run(ended(bound(deadline=60))), at=moment(61)) == ()


@pytest.mark.proves("A069", "A071")
@pytest.mark.parametrize(
    ("history", "found"),
    [
        (ended(bound(), "completed"), ()),
        (ended(bound(), "failed"), ()),
        (ended(bound(), "cancelled"), ("cancelled_without_stop",)),
        (ended(stopped(bound()), "cancelled"), ()),
        (ended(stopped(bound(), "unknown"), "cancelled"), ()),
        (ended(stopped(bound(), "refused"), "cancelled"), ("cancelled_without_stop",)),
        (ended(stopped(bound()), "completed"), ("completed_after_stop",)),
        (ended(stopped(bound(), "not_sent"), "completed"), ()),
    ],
)
def test_an_end_is_doubted_by_what_was_sent_before_it(history: History, found: tuple[str, ...]) -> None:
    assert marks(run(history)) == found


def test_the_marks_of_the_providers_answer_are_kept_with_the_end() -> None:
    exchange = status_answer("completed", output="Operation interrupted: shutdown")
    assert marks(run(after(bound(), exchange))) == ("interruption_text",)


@pytest.mark.proves("A017", "A112", "A138")
@pytest.mark.parametrize("verdict", ["", "accepted", "unknown"])
def test_a_stop_alone_tells_stopping_and_never_cancelled(verdict: str) -> None:
    known = run(stopped(bound(), verdict))
    assert (told_state(known), known.ended, known.phase) == (("stopping", ""), None, Phase.FOLLOWED)


@pytest.mark.parametrize("verdict", ["refused", "not_sent"])
def test_a_stop_that_did_not_act_tells_nothing(verdict: str) -> None:
    assert told_state(run(stopped(bound(), verdict))) == ("running", "")


# ---- choices ---------------------------------------------------------------------------------------------------------


def choose(
    known: Run | None = None, seen_frames: RunStream | None = None, *, choice: str = "once", **members: Any
) -> tuple[int, ...]:
    given: dict[str, Any] = {
        "resolve_all": False,
        "reviewed": (ASK,),
        "approval_timeout_ms": 60_000,
        "at": moment(10),
    } | members
    chosen = check_choice(
        known or run(bound()), stream(asked(ASK)) if seen_frames is None else seen_frames, choice=choice, **given
    )
    return tuple(item.ask.generation for item in chosen)


def refusal(*arguments: Any, **members: Any) -> str:
    with pytest.raises(CallerError) as caught:
        choose(*arguments, **members)
    return caught.value.code


def asked(*digests: str) -> History:
    return stored(subscribed(), *(asking(digest) for digest in digests))


TWO = stream(asked("a1", "a2"))


@pytest.mark.proves("A093", "A094")
@pytest.mark.parametrize("choice", ["once", "session", "always", "deny"])
def test_a_reviewed_pending_request_may_be_answered_with_what_it_offers(choice: str) -> None:
    assert choose(choice=choice) == (1,)


@pytest.mark.proves("A094")
def test_a_choice_without_a_reviewed_request_is_refused() -> None:
    assert refusal(reviewed=()) == "approval.review_required"
    assert refusal(reviewed=(), resolve_all=True) == "approval.review_required"


def test_a_choice_for_a_request_that_is_not_pending_is_refused() -> None:
    assert refusal(reviewed=("zz",)) == "approval.not_pending"
    assert refusal(None, RunStream()) == "approval.not_pending"
    answered = stored(asked(ASK), frame("approval.responded", 3, choice="once", resolved=1))
    assert refusal(None, stream(answered)) == "approval.not_pending"
    timed_out = stored(asked(ASK), frame("tool.completed", 3, tool="terminal", error=True))
    assert refusal(None, stream(timed_out)) == "approval.not_pending"


def test_one_choice_is_for_the_oldest_pending_request_because_the_provider_answers_by_position() -> None:
    assert choose(None, TWO, reviewed=("a1",)) == (1,)
    assert refusal(None, TWO, reviewed=("a2",)) == "approval.not_oldest"
    assert refusal(None, TWO, reviewed=("a1", "a2")) == "approval.review_required"


def test_a_provider_that_answers_by_exact_request_takes_any_pending_one() -> None:
    exact, named = (
        run(bound(REPLAYING)),
        stored(subscribed(), asking("a1", request_id="r1"), asking("a2", request_id="r2")),
    )
    assert choose(exact, stream(named), reviewed=("a2",)) == (2,)
    assert choose(exact, stream(closed(named)), reviewed=("a2",)) == (2,)
    assert refusal(exact, stream(closed(named)), reviewed=("a1", "a2"), resolve_all=True) == "approval.not_pending"


@pytest.mark.parametrize("request_id", ["", "r1", "\ud800", 7])
def test_a_request_without_an_id_of_its_own_is_answered_by_position_everywhere(request_id: Any) -> None:
    two = stream(stored(subscribed(), asking("a1", request_id="r1"), asking("a2", request_id=request_id)))
    assert refusal(run(bound(REPLAYING)), two, reviewed=("a2",)) == "approval.not_oldest"


@pytest.mark.proves("A100")
def test_a_choice_for_all_names_every_pending_request_and_no_other() -> None:
    assert choose(None, TWO, reviewed=("a2", "a1"), resolve_all=True) == (2, 1)
    assert refusal(None, TWO, reviewed=("a1",), resolve_all=True) == "approval.review_required"
    assert refusal(None, TWO, reviewed=("a1", "a2", "a3"), resolve_all=True) == "approval.not_pending"


def test_nothing_is_chosen_by_position_while_frames_may_have_been_missed() -> None:
    with pytest.raises(CallerError) as caught:
        choose(None, stream(closed(asked(ASK))))
    assert (caught.value.code, caught.value.details["reason"]) == ("approval.not_pending", "events_missed")


def test_a_request_that_the_provider_has_given_up_by_now_is_not_answered() -> None:
    assert choose(at=moment(60.999)) == (1,)  # asked at 2, given up at 62, and a second kept clear of it
    assert refusal(at=moment(61)) == "approval.provider_timeout"
    assert choose(at=moment(6.499), approval_timeout_ms=5_000) == (1,)
    assert refusal(at=moment(6.5), approval_timeout_ms=5_000) == "approval.provider_timeout"


@pytest.mark.proves("A093")
def test_only_offered_choices_are_taken() -> None:
    offer = stream(stored(subscribed(), asking(choices=("once", "deny"))))
    assert choose(None, offer, choice="deny") == (1,)
    assert refusal(None, offer, choice="always") == "approval.choice_not_offered"
    silent = stream(stored(subscribed(), asking(choices=())))
    assert choose(None, silent, choice="once") == (1,)


@pytest.mark.parametrize("verdict", ["", "accepted", "unknown"])
def test_after_a_stop_that_may_have_acted_no_choice_is_sent(verdict: str) -> None:
    assert refusal(run(stopped(bound(), verdict))) == "approval.after_stop"


@pytest.mark.parametrize("verdict", ["refused", "not_sent"])
def test_after_a_stop_that_did_not_act_a_choice_may_be_sent(verdict: str) -> None:
    assert choose(run(stopped(bound(), verdict))) == (1,)


@pytest.mark.proves("A137")
@pytest.mark.parametrize("verdict", ["", "accepted", "unknown"])
def test_a_request_for_which_a_choice_may_have_been_sent_is_never_answered_again(verdict: str) -> None:
    assert refusal(run(decided(bound(), (1,), verdict))) == "approval.already_decided"
    later = run(decided(bound(), (1,), verdict))
    assert choose(later, stream(stored(asked("a1"), frame("tool.completed"), asking("a2"))), reviewed=("a2",)) == (2,)


@pytest.mark.parametrize("verdict", ["refused", "not_sent"])
def test_a_choice_that_did_not_act_leaves_the_request_open(verdict: str) -> None:
    assert choose(run(decided(bound(), (1,), verdict))) == (1,)


@pytest.mark.parametrize("word", sorted(TERMINAL_STATES))
def test_after_the_end_neither_a_choice_nor_a_stop_is_sent(word: str) -> None:
    over = run(ended(bound(), word))
    assert refusal(over) == "run.already_terminal"
    with pytest.raises(CallerError) as caught:
        check_stop(over)
    assert (caught.value.code, caught.value.details) == ("run.already_terminal", {"state": word})


@pytest.mark.proves("A108")
@pytest.mark.parametrize("history", [bound(), seen(bound(), "stopping"), missing(bound()), stopped(bound(), "refused")])
def test_a_run_whose_end_is_not_known_may_be_stopped(history: History) -> None:
    check_stop(run(history))
    assert run(history).ended is None


@pytest.mark.proves("A102")
@pytest.mark.parametrize(
    ("verdict", "resolved", "marked"),
    [
        ("accepted", 1, False),
        ("accepted", 2, True),
        ("accepted", 0, True),
        ("accepted", None, False),
        ("refused", 3, False),
    ],
)
def test_a_count_other_than_reviewed_is_an_integrity_mark(verdict: str, resolved: int | None, marked: bool) -> None:
    claim = ChoiceClaimed(at=moment(4), action_id="act_1", attempt_id="att_1", choice="once", generations=(1,))
    told = ChoiceAnswered(at=moment(5), action_id="act_1", attempt_id="att_1", verdict=verdict, resolved=resolved)
    found = check_resolved(told, claim, at=moment(5))
    assert [type(event) for event in found] == ([IntegrityMarked] if marked else [])
    if marked:
        assert "integrity" in marks(run((*bound(), claim, told, *found)))


# ---- the table -------------------------------------------------------------------------------------------------------

PHASES: dict[Phase, Run] = {
    Phase.NEW: Run(),
    Phase.FOLLOWED: run(bound()),
    Phase.LOST: run(missing(bound())),
    Phase.ENDED: run(ended(bound())),
    Phase.CONTRADICTED: run((*ended(bound()), EndDisputed(at=moment(9), state="failed", source="frame", evidence="e"))),
}
SAMPLES: tuple[Event, ...] = (
    *bound(),
    *seen((), "running"),
    *seen((), "completed"),
    *missing(()),
    StatusUnread(at=moment(1), code=PREFIX + "transport", cause="read_error"),
    *ended((), source="frame"),
    EndDisputed(at=moment(9), state="failed", source="frame", evidence="e"),
    EndDisputed(at=moment(9), state="running", source="status", evidence="e"),
    *stopped(()),
    *decided(()),
    IntegrityMarked(at=moment(9), kind="k", detail="d"),
    RunDeadlinePassed(at=moment(9)),
    OwnerChanged(at=moment(9), owner=OTHER, previous=OWNER),
)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_that_the_table_does_not_name_changes_no_phase(phase: Phase, event: Event) -> None:
    known = PHASES[phase]
    assert known.phase is phase
    named = NEXT.get((phase, type(event)), phase)
    if isinstance(event, StatusUnread) and not event.missing:
        named = phase
    if isinstance(event, EndDisputed) and event.state not in TERMINAL_STATES:
        named = phase
    assert evolve(known, event, 99).phase is named


def test_nothing_leads_out_of_an_end_but_a_contradiction() -> None:
    assert [(kind, then) for (phase, kind), then in NEXT.items() if phase is Phase.ENDED] == [
        (EndDisputed, Phase.CONTRADICTED)
    ]
    assert not [row for row in NEXT if row[0] is Phase.CONTRADICTED]
    assert {kind for (_, kind), then in NEXT.items() if then is Phase.ENDED} == {RunEnded}


def test_the_samples_are_every_event_of_a_run() -> None:
    names = {kind.__name__ for kind in TOPICS.values() if kind.topic.startswith("run.")}
    assert {type(event).__name__ for event in SAMPLES} == names | {"OwnerChanged"}


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_second_end_does_not_replace_the_first(state: str) -> None:
    twice = run((*ended(bound()), RunEnded(at=moment(9), state=state, source="frame", evidence="e", result=RESULT)))
    assert twice.ended == run(ended(bound())).ended


def test_a_run_that_was_never_bound_is_not_there() -> None:
    with pytest.raises(CallerError) as caught:
        assert binding.replay(()).tie
    assert caught.value.code == "action.not_found"


def test_another_host_that_takes_a_run_over_is_its_owner() -> None:
    assert run(bound()).owner == OWNER
    assert run((*bound(), OwnerChanged(at=moment(1), owner=OTHER, previous=OWNER))).owner == OTHER
