"""What is stored, held against itself and against what the provider counted."""

from __future__ import annotations

from collections import Counter, defaultdict

from domain import action as actions
from domain.action import Action, State
from domain.events import AttemptClaimed, AttemptUnknown, RunEnded, SequenceExpired, SequenceTaken
from domain.history import Recorded
from domain.values import Effect
from tests.pg import until
from tests.process.site import Site

ROUTES = {"run_start": "start", "run_approval": "approval", "run_stop": "stop"}
STANDING = (State.SETTLED, State.UNKNOWN, State.AWAITING)


def folded(events: list[Recorded]) -> dict[str, Action]:
    """Every Action by its id."""
    histories: dict[str, list[Recorded]] = defaultdict(list)
    for event in events:
        histories[event.history].append(event)
    for name, held in histories.items():
        assert [event.version for event in held] == list(range(1, len(held) + 1)), name
    return {name.rpartition("/")[2]: actions.replay(held) for name, held in histories.items() if "/act/" in name}


def standing(place: Site) -> bool:
    """Whether no Action is on its way any more."""
    return all(action.state in STANDING for action in folded(place.events()).values())


def nothing_was_sent_twice(place: Site) -> dict[str, int]:
    """The provider received no more than was claimed, one run for each Action at most; the counts."""
    events, ledger = place.events(), place.hermes.ledger()
    claims = Counter(ROUTES[e.event.operation.value] for e in events if isinstance(e.event, AttemptClaimed))
    for route, claimed in claims.items():
        assert ledger["requests"].get(route, 0) <= claimed, f"{route}: {ledger['requests']} for {claims}"
    sessions = Counter(place.hermes.sessions_started())
    assert [name for name, times in sessions.items() if times > 1] == []
    commands = Counter(effect["command"] for effect in ledger["effects"])
    assert [name for name, times in commands.items() if times > 1] == []
    choices = Counter((choice["run_id"], choice["command"]) for choice in ledger["choices"])
    assert [name for name, times in choices.items() if times > 1] == []
    return {"claims": claims.total(), "runs": ledger["runs_created"], "choices": len(ledger["choices"])}


def every_state_is_justified(place: Site) -> dict[str, Action]:
    """Each Action comes to stand where its facts and the provider's ledger put it."""
    until(lambda: standing(place), 60)
    events, ledger = place.events(), place.hermes.ledger()
    created, started = set(ledger["created"]), set(place.hermes.sessions_started())
    told = folded(events)
    for action_id, action in told.items():
        for attempt in action.attempts[:-1]:
            assert attempt.closed is not None, f"{action_id}: a further attempt needs a proven lack of effect"
        if action.request.operation.value != "run_start":
            continue
        if action.effect is Effect.NONE:
            assert f"aip-{action_id}" not in started, f"{action_id} is told as without effect"
        if action.effect is Effect.CONFIRMED:
            assert actions.started_run(action) in created, f"{action_id} names a run that was never created"
    orphans_had_no_living_owner(events)
    for event in events:
        if isinstance(event.event, RunEnded):
            assert event.event.evidence, f"{event.history} ended without evidence"
    return told


def orphans_had_no_living_owner(events: list[Recorded]) -> None:
    """A claim is given up only after a newer sequence of its owner's replica was stored."""
    newest: dict[str, int] = {}
    claims: dict[str, AttemptClaimed] = {}
    for recorded in events:
        event = recorded.event
        if isinstance(event, SequenceTaken | SequenceExpired):
            newest[recorded.history.rpartition("/")[2]] = recorded.version
        elif isinstance(event, AttemptClaimed):
            claims[event.attempt_id] = event
        elif isinstance(event, AttemptUnknown) and event.cause == "sender_lost":
            owner = claims[event.attempt_id].owner
            assert newest[owner.replica] > owner.sequence, f"{event.attempt_id} of a living owner was given up"
