"""The promises, checked on a world: what is stored against itself, and against the provider's own ledger."""

from __future__ import annotations

from collections import Counter, defaultdict

from domain import action as actions
from domain import binding, stream
from domain.action import Action, State
from domain.events import (
    ActionAccepted,
    ActionSettled,
    AttemptClaimed,
    AttemptClosed,
    AttemptUnknown,
    Event,
    FramesStored,
    GapClosed,
    GapOpened,
    KeyReserved,
    RunEnded,
    StatusSeen,
)
from domain.history import Recorded
from domain.provider import TERMINAL_STATES
from domain.values import Effect
from tests.world.host import World
from tests.world.process import BEGAN

SENDS = {"run_start": "start", "run_approval": "approval", "run_stop": "stop"}


async def check(world: World) -> None:
    """Every law at once, at the end of a story."""
    log = await world.events()
    histories: dict[str, list[Recorded]] = defaultdict(list)
    for event in log:
        histories[event.history].append(event)
    _histories_are_whole(histories)
    folded = {name: actions.replay(found) for name, found in histories.items() if "/act/" in name}
    _each_attempt_is_claimed_before_it_is_sent_and_sent_once(world, log, folded)
    for name, found in histories.items():
        if "/act/" in name:
            _an_action_settles_once_and_says_why(name, found)
        elif "/run/" in name:
            _an_end_cites_its_evidence(name, found, histories)
        elif "/str/" in name:
            _frames_are_numbered_and_gaps_have_names(name, found)
    _what_was_told_is_stored(world, histories)
    _keys_name_one_action(histories)
    _runs_of_the_provider_are_bound_or_explained(world, histories, folded)


def _histories_are_whole(histories: dict[str, list[Recorded]]) -> None:
    for name, found in histories.items():
        assert [event.version for event in found] == list(range(1, len(found) + 1)), name
        positions = [event.position for event in found]
        assert positions == sorted(positions), name


def _each_attempt_is_claimed_before_it_is_sent_and_sent_once(
    world: World, log: list[Recorded], folded: dict[str, Action]
) -> None:
    claims: dict[tuple[str, str], list[AttemptClaimed]] = defaultdict(list)
    for recorded in log:
        event = recorded.event
        if isinstance(event, AttemptClaimed):
            claims[SENDS[event.operation.value], event.key].append(event)
    arrived = Counter((entry.operation, entry.key) for entry in world.hermes.ledger)
    applied = Counter((entry.operation, entry.key) for entry in world.hermes.ledger if entry.applied)
    for place, number in arrived.items():
        assert number <= len(claims[place]), f"{place}: {number} requests for {len(claims[place])} claims"
        assert applied[place] <= 1, f"{place} was applied {applied[place]} times"
        first = min(entry.at for entry in world.hermes.ledger if (entry.operation, entry.key) == place)
        assert (min(claim.at for claim in claims[place]) - BEGAN).total_seconds() <= first
    for action in folded.values():
        for attempt in action.attempts[:-1]:
            assert attempt.closed is not None, "a further attempt needs a proven lack of effect"
        if action.effect is Effect.NONE and action.accepted and action.attempts:
            assert applied[SENDS[action.request.operation.value], action.request.key] == 0, "told as without effect"
        if action.effect is Effect.CONFIRMED and action.accepted:
            assert applied[SENDS[action.request.operation.value], action.request.key] == 1, "confirmed"


def _an_action_settles_once_and_says_why(name: str, found: list[Recorded]) -> None:
    kinds = [type(event.event) for event in found]
    assert kinds[0] is ActionAccepted, name
    assert kinds.count(ActionSettled) <= 1, name
    results: Counter[str] = Counter()
    action = Action()
    for recorded in found:
        before = action
        action = actions.evolve(action, recorded.event, recorded.version)
        if before.state is State.SETTLED:
            assert (action.state, action.settled) == (State.SETTLED, before.settled), name
        if isinstance(recorded.event, AttemptUnknown | AttemptClosed):
            results[recorded.event.attempt_id] += 1
    assert action == actions.replay(found)
    assert action.state in (State.SETTLED, State.UNKNOWN, State.AWAITING), f"{name} stands in {action.state}"
    if action.state is State.UNKNOWN:
        assert action.attempt is not None
        assert action.attempt.unknown is not None


def _an_end_cites_its_evidence(name: str, found: list[Recorded], histories: dict[str, list[Recorded]]) -> None:
    run = binding.replay(found)
    for recorded in found:
        event = recorded.event
        if not isinstance(event, RunEnded):
            continue
        kind, _, number = event.evidence.partition(":")
        if event.source == "status":
            cited = found[int(number) - 1].event
            assert kind == "run"
            assert isinstance(cited, StatusSeen)
            assert cited.state == event.state
            assert cited.state in TERMINAL_STATES
        else:
            frames = [item.event for item in histories[name.replace("/run/", "/str/")]]
            assert any(isinstance(item, FramesStored) and item.terminal_seq == int(number) for item in frames), name
    assert sum(isinstance(event.event, RunEnded) for event in found) <= 1
    assert run == binding.replay(found)


def _frames_are_numbered_and_gaps_have_names(name: str, found: list[Recorded]) -> None:
    expected, opened, closed = 1, set(), set()
    for recorded in found:
        event: Event = recorded.event
        if isinstance(event, FramesStored):
            assert event.first == expected, name
            expected += event.count
        elif isinstance(event, GapOpened):
            opened.add(event.number)
        elif isinstance(event, GapClosed):
            assert event.number in opened, name
            closed.add(event.number)
    seen = stream.replay(found)
    assert {gap.number for gap in seen.gaps} == opened
    if seen.closed_at is not None and not seen.open and not seen.terminal_seq:
        assert seen.gaps, f"{name} ended without its end and names no gap"


def _what_was_told_is_stored(world: World, histories: dict[str, list[Recorded]]) -> None:
    """An answer is a fold of a prefix of what is stored now; what it settled stays settled in the same words."""
    for _, told in world.told:
        found = histories[f"{told.request.tenant}/act/{told.request.action_id}"]
        assert actions.replay(found[: told.version]) == told, "told and not stored, or changed since"
    by_key: dict[tuple[str, str], set[str]] = defaultdict(set)
    for key, told in world.told:
        if key:
            by_key[told.request.capability_id, key].add(told.request.action_id)
    assert all(len(names) == 1 for names in by_key.values()), "one key named two Actions"


def _keys_name_one_action(histories: dict[str, list[Recorded]]) -> None:
    for name, found in histories.items():
        if "/key/" in name:
            assert len(found) == 1, name
            reserved = found[0].event
            assert isinstance(reserved, KeyReserved)
            assert histories[f"{name.split('/')[0]}/act/{reserved.action_id}"], name


def _runs_of_the_provider_are_bound_or_explained(
    world: World, histories: dict[str, list[Recorded]], folded: dict[str, Action]
) -> None:
    """A run that exists without a binding belongs to a start whose outcome is unknown, and is told as such."""
    bound = {binding.replay(found).tie.run_id for name, found in histories.items() if "/run/" in name}
    unknown = sum(1 for action in folded.values() if action.state is State.UNKNOWN)
    assert len(set(world.hermes.created) - bound) <= unknown
