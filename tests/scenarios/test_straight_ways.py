"""The straight ways: start, approval, stop and reads on a world in which nothing goes wrong."""

from __future__ import annotations

from domain import action as actions
from domain.action import State
from domain.binding import told_state
from domain.values import Effect, Operation
from tests.world.host import play, world


def test_a_start_is_sent_once_bound_and_observed_to_its_end() -> None:
    async def story() -> None:
        async with world() as w:
            action = await w.answered(await w.begin())
            run = await w.ended(actions.started_run(action))
            assert (action.state, action.effect, told_state(run)) == (
                State.SETTLED,
                Effect.CONFIRMED,
                ("completed", ""),
            )
            assert [entry.operation for entry in w.hermes.ledger] == ["start"]
            assert len(w.hermes.subscriptions) == 1
            assert not (await w.stream(run.tie.run_id)).gaps

    play(story)


def test_a_reviewed_choice_is_sent_once_and_releases_the_command() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("wait", 1), ("ask", "rm -rf /tmp/x"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            (digest,) = await w.pending(run_id)
            given = {"run_id": run_id, "choice": "approve", "reviewed": digest}
            choice = await w.answered(await w.submit(Operation.RUN_APPROVAL, given, key="c1"))
            assert choice.settled is not None
            assert choice.settled.details["choice"] == "once"
            await w.ended(run_id)
            assert [effect[2] for effect in w.hermes.effects] == ["rm -rf /tmp/x"]
            assert len(w.hermes.sent("approval")) == 1

    play(story)


def test_a_stop_is_a_receipt_and_the_end_comes_from_the_run() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("never",),)
            run_id = await w.bound(await w.begin())
            stop = await w.answered(await w.submit(Operation.RUN_STOP, {"run_id": run_id}, key="s1"))
            assert stop.settled is not None
            assert stop.settled.details["status"] == "stopping"
            assert told_state(await w.ended(run_id)) == ("cancelled", "")
            assert len(w.hermes.sent("stop")) == 1

    play(story)


def test_status_and_events_are_read_and_followed() -> None:
    async def story() -> None:
        async with world() as w:
            run_id = await w.bound(await w.begin())
            status = await w.answered(await w.submit(Operation.RUN_STATUS, {"run_id": run_id}))
            assert status.settled is not None
            assert status.settled.details["status"] == "running"
            events = await w.answered(await w.submit(Operation.RUN_EVENTS, {"run_id": run_id}))
            assert events.settled is not None
            assert (events.settled.status, events.settled.details["events"]) == ("completed", 3)

    play(story)
