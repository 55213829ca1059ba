"""Two hosts on one journal: one key is one Action, a living host's work is left alone, an old fence decides nothing."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from domain import action as actions
from domain.action import State
from domain.events import AttemptAccepted, AttemptUnknown, OwnerChanged, SequenceExpired
from domain.values import Effect, Fence, Mode, Operation
from tests.world.hermes import SimHermes
from tests.world.host import World, play, world
from tests.world.laws import check

LONG = (("wait", 600), ("complete", "done"))


async def both(w: World) -> None:
    """Two hosts that are ready."""
    for replica in ("a", "b"):
        await w.start(replica).ready.wait()


async def owners(w: World) -> list[str]:
    """Whose word each change of owner was, in order."""
    found = [event.event for event in await w.events()]
    return [event.owner.replica for event in found if isinstance(event, OwnerChanged)]


@pytest.mark.proves("A046")
def test_fifty_equal_starts_at_two_hosts_are_one_request_one_action_and_fifty_equal_answers() -> None:
    async def story() -> None:
        async with world() as w:
            await both(w)
            w.hermes.stall["start"] = 2.0
            answers: list[str] = []

            async def caller(number: int) -> None:
                action = await w.begin(replica="ab"[number % 2])
                answers.append(actions.started_run(await w.answered(action, replica="ab"[number % 2])))

            async with anyio.create_task_group() as callers:
                for number in range(50):
                    callers.start_soon(caller, number)
            assert len(answers) == 50
            assert set(answers) == set(w.hermes.created)
            assert len(w.hermes.ledger) == 1
            assert len({action.request.action_id for _, action in w.told}) == 1
            await w.settle()
            await check(w)

    play(story)


def test_a_claim_in_flight_at_a_living_host_is_never_orphaned_by_the_other() -> None:
    async def story() -> None:
        async with world() as w:
            await both(w)
            w.hermes.stall["start"] = 50.0
            action = await w.begin()
            await anyio.sleep(45)
            assert (await w.action(action)).state is State.CLAIMED
            assert not await owners(w)
            settled = await w.answered(action)
            assert settled.effect is Effect.CONFIRMED
            await w.settle(700)
            await check(w)

    play(story)


def test_work_of_a_dead_host_goes_on_at_the_other_after_a_full_lease_time_of_silence() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = LONG
            await both(w)
            run_id = await w.bound(await w.begin())
            w.hermes.stall["start"] = 5.0
            caught = await w.begin("k2", mode=Mode.ASYNC)
            await anyio.sleep(1)
            died = anyio.current_time()
            await w.current("a").kill()

            async def taken() -> bool:
                owner = (await w.run(run_id)).owner
                return owner == Fence("b", 1)

            await w.until(taken)
            assert anyio.current_time() - died > 20
            assert (await w.action(caught)).state is State.UNKNOWN
            assert len(w.hermes.sent("start")) == 2
            assert (await w.ended(run_id, 900)).ended is not None
            await check(w)

    play(story)


def test_a_host_that_ends_cleanly_is_followed_at_once() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = LONG
            await both(w)
            run_id = await w.bound(await w.begin())
            await anyio.sleep(5)
            await w.current("a").stop()
            left = anyio.current_time()

            async def taken() -> bool:
                return (await w.run(run_id)).owner == Fence("b", 1)

            await w.until(taken)
            assert anyio.current_time() - left < 10
            await w.ended(run_id, 900)
            assert len((await w.stream(run_id)).gaps) == 1
            await check(w)

    play(story)


def _answers_slowly(hermes: SimHermes) -> None:
    hermes.stall["start"] = 50.0


def test_the_receipt_of_a_host_that_was_expired_meanwhile_is_stored_late_and_settles() -> None:
    async def story() -> None:
        async with world() as w:
            await both(w)
            first = w.current("a")
            _answers_slowly(w.hermes)
            action = await w.begin()
            await anyio.sleep(1)
            first.process.freeze()

            async def unknown() -> bool:
                return (await w.action(action)).state is State.UNKNOWN

            await w.until(unknown)
            await anyio.sleep(60)
            first.process.thaw()

            async def settled() -> bool:
                return (await w.action(action)).state is State.SETTLED

            await w.until(settled)
            found = await w.action(action)
            assert found.effect is Effect.CONFIRMED
            assert found.attempt is not None
            assert found.attempt.accepted is not None
            assert found.attempt.accepted.late
            await w.ended(actions.started_run(found))
            events = [event for event in await w.events() if isinstance(event.event, AttemptUnknown | AttemptAccepted)]
            assert [type(event.event) for event in events] == [AttemptUnknown, AttemptAccepted]
            assert events[1].fence is None, "an observation, not a decision"
            assert len(w.hermes.sent("start")) == 1
            await check(w)

    play(story)


def test_a_host_whose_lease_was_expired_sends_nothing_under_its_old_fence() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = LONG
            await both(w)
            first = w.current("a")
            run_id = await w.bound(await w.begin())
            # it accepts a stop, and stands still before its claim is committed
            stopping: list[object] = []

            async def ask() -> None:
                stopping.append(await w.submit(Operation.RUN_STOP, {"run_id": run_id}, key="s1"))

            async with anyio.create_task_group() as callers:
                callers.start_soon(ask)
                await anyio.lowlevel.checkpoint()
                first.process.freeze()
                await anyio.sleep(100)
                first.process.thaw()
            expired = [event.event for event in await w.events() if isinstance(event.event, SequenceExpired)]
            assert [event.by.replica for event in expired] == ["b"]
            await w.settle(900)
            decided: dict[str, int] = {}
            for event in await w.events():
                if event.fence is not None and event.fence.replica == "a":
                    assert decided.get("a", 0) <= event.fence.sequence, "a decision under an older sequence"
                    decided["a"] = event.fence.sequence
            assert len(w.hermes.sent("stop")) <= 1
            await check(w)

    play(story)


def test_a_new_process_of_a_replica_ends_the_older_one_for_good() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = LONG
            older = w.start("a")
            run_id = await w.bound(await w.begin())
            newer = w.start("a")
            await newer.ready.wait()
            await anyio.sleep(40)
            assert older.lease.superseded
            assert not older.lease.valid()
            assert not newer.lease.superseded
            assert (await w.run(run_id)).owner == newer.lease.fence
            assert older.observer.following == 0
            await w.ended(run_id, 900)
            await check(w)

    play(story)
