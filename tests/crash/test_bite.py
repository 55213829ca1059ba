"""The crash tests have teeth: ports that are broken in a known way break a promise somewhere, and the laws say so."""

from __future__ import annotations

import pytest

from domain.history import Command, Recorded
from domain.ports import AppendUnknown, NotStored
from domain.provider import Exchange, Failure, Outgoing
from tests.crash.test_every_step import CASES, Case, perform
from tests.world.host import World, play
from tests.world.process import Fault, SimLink, SimStore


class RepeatingLink(SimLink):
    """A client that sends again when the connection broke."""

    async def send(self, out: Outgoing) -> Exchange:
        """Twice, if need be."""
        exchange = await super().send(out)
        return await super().send(out) if exchange.failure is Failure.READ_ERROR else exchange


class TrustingStore(SimStore):
    """A store that takes every doubt and failure for success."""

    async def append(self, command: Command) -> tuple[Recorded, ...]:
        """Never says no."""
        try:
            return await super().append(command)
        except (AppendUnknown, NotStored):
            return tuple(
                Recorded(history=change.history, version=version, position=0, event_id="", event=event)
                for change in command.changes
                for version, event in enumerate(change.events, change.expected + 1)
            )


def _with(case: Case, store: type[SimStore] = SimStore, link: type[SimLink] = SimLink) -> Case:
    async def before(w: World) -> None:
        w.store_class, w.link_class = store, link
        await case.before(w)

    return Case(case.flow, before=before, replay=case.replay, booting=case.booting)


def _caught(case: Case, kind: str) -> int:
    points, _ = play(perform, case, None)
    caught = 0
    for place in range(1, len(points) + 1):
        try:
            play(perform, case, Fault(kind, place))
        except* AssertionError:
            caught += 1
    return caught


@pytest.mark.slow
def test_a_client_that_repeats_a_mutation_is_caught() -> None:
    assert _caught(_with(CASES["start"], link=RepeatingLink), "lost") >= 1


@pytest.mark.slow
def test_a_store_that_takes_failure_for_success_is_caught() -> None:
    assert _caught(_with(CASES["start"], store=TrustingStore), "away") >= 2


@pytest.mark.slow
def test_the_same_cases_with_whole_ports_are_not_caught() -> None:
    assert _caught(CASES["start"], "lost") == 0
