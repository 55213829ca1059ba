"""Start: accepting work, keys, lost receipts, unknown outcomes. Each test is a problem met in the field."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from domain import action as actions
from domain.action import Action, State
from domain.binding import Phase, told_state
from domain.errors import CallerError
from domain.events import AttemptClaimed, AttemptUnknown
from domain.provider import Exchange, Failure
from domain.values import Effect, Mode, Operation
from projections.recovery import unfinished_action
from tests.world.hermes import PROXY_PAGE, answer
from tests.world.host import ENDPOINT, World, play, world
from tests.world.laws import check


def unsent(failure: Failure) -> Exchange:
    """No byte left."""
    return Exchange(sent=False, failure=failure)


def cut(failure: Failure) -> Exchange:
    """It broke after a byte may have left."""
    return Exchange(sent=True, failure=failure)


@pytest.mark.proves("A131", "A133", "A134", "A136", "A142")
def test_the_accepted_answer_to_a_start_is_lost_so_nobody_knows_the_run_handle() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.faults["start"] = ["lost"]
            action = await w.answered(await w.begin())
            for _ in range(3):
                assert (await w.begin()).request.action_id == action.request.action_id
            await w.current().kill()
            assert (await w.answered(await w.begin())).state is State.UNKNOWN
            await anyio.sleep(600)
            found = await w.action(action)
            assert (found.state, found.effect, found.settled) == (State.UNKNOWN, Effect.POSSIBLE, None)
            assert len(w.hermes.created) == len(w.hermes.sent("start")) == 1
            kinds = [type(event.event) for event in await w.events()]
            assert kinds.index(AttemptClaimed) < kinds.index(AttemptUnknown)
            held = unfinished_action(await w.row(action))
            assert (held["reason"], held["effect"]) == ("outcome_unknown", "possible")
            assert held["needs"]
            await check(w)

    play(story)


@pytest.mark.proves("A133")
def test_the_key_to_run_mapping_dies_with_the_process() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("wait", 30), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            await w.current().kill()
            assert await w.bound(await w.begin()) == run_id
            await w.ended(run_id)
            again = await w.answered(await w.begin())
            assert actions.started_run(again) == run_id
            assert again.settled is not None
            assert again.settled.output is not None
            assert len(w.hermes.sent("start")) == 1
            await check(w)

    play(story)


@pytest.mark.proves("A134")
def test_a_host_that_ends_while_the_store_is_away_does_not_wait_for_it_for_ever() -> None:
    async def story() -> None:
        async with world() as w:
            host = w.current()
            w.hermes.stall["start"] = 5.0
            action = await w.begin(mode=Mode.ASYNC)
            while not w.hermes.sent("start"):  # noqa: ASYNC110 - virtual time
                await anyio.sleep(0.1)
            host.process.store_away = True
            await anyio.sleep(600)
            assert host.driver.in_flight == 1, "what came back is kept in hand"
            host.sender.end()
            with anyio.fail_after(30):
                await host.stop()
            assert (await w.answered(await w.begin(mode=Mode.ASYNC))).state is State.UNKNOWN
            assert (await w.action(action)).state is State.UNKNOWN
            assert len(w.hermes.sent("start")) == 1
            await check(w)

    play(story)


@pytest.mark.parametrize("failure", [Failure.CONNECT_REFUSED, Failure.DNS, Failure.TLS, Failure.CONNECT_TIMEOUT])
@pytest.mark.proves("A156", "A158")
def test_connection_refused_and_accepted_but_timed_out_are_treated_alike_proven_not_sent(failure: Failure) -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.faults["start"] = [unsent(failure)]
            action = await w.answered(await w.begin())
            assert action.settled is not None
            assert (action.settled.status, action.effect) == ("failed", Effect.NONE)
            assert action.settled.code == "connector.hermes_agent.not_sent"
            assert action.settled.details["cause"] == failure.value
            assert not w.hermes.ledger
            queued = await w.answered(await w.begin("k2", mode=Mode.ASYNC))
            assert queued.effect is Effect.CONFIRMED
            await w.settle()
            await check(w)

    play(story)


@pytest.mark.parametrize("failure", [Failure.WRITE_ERROR, Failure.READ_ERROR, Failure.TIMEOUT, Failure.PROTOCOL])
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
@pytest.mark.proves("A142", "A156")
def test_connection_refused_and_accepted_but_timed_out_are_treated_alike_ambiguous(
    failure: Failure, mode: Mode
) -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.faults["start"] = [cut(failure)]
            action = await w.answered(await w.begin(mode=mode))
            await anyio.sleep(200)
            found = await w.action(action)
            assert (found.state, found.effect) == (State.UNKNOWN, Effect.POSSIBLE)
            assert found.attempt is not None
            assert found.attempt.unknown is not None
            assert found.attempt.unknown.cause == failure.value
            assert len(w.hermes.sent("start")) == 1
            await check(w)

    play(story)


@pytest.mark.proves("A139", "A142")
def test_work_that_lasts_longer_than_an_internal_heartbeat_is_executed_again() -> None:
    async def story() -> None:
        async with world() as w:
            w.start("b")
            w.hermes.stall["start"] = 200.0
            action = await w.answered(await w.begin(), 300)
            assert action.state is State.UNKNOWN
            assert action.attempt is not None
            assert action.attempt.unknown is not None
            assert action.attempt.unknown.cause == "timeout"
            w.hermes.stall.clear()
            w.run_deadline_ms = 3_600_000
            w.hermes.scripts["silent"] = (("wait", 1_200), ("complete", "done"))
            run_id = await w.bound(await w.begin("k2", "silent"))
            await w.ended(run_id, 1_500)
            assert len(w.hermes.sent("start")) == 2
            assert len([at for at, name in w.hermes.reads if name == run_id]) > 30
            assert [name for _, name in w.hermes.subscriptions] == [run_id]
            await check(w)

    play(story)


PAGES = {
    "502 page": PROXY_PAGE,
    "504 empty": answer(504, b""),
    "200 page": answer(200, b"<html></html>", kind="text/html"),
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.proves("A139", "A156", "A158")
def test_an_error_page_of_a_proxy_is_taken_for_the_answer_of_the_agent(page: str) -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.bend["start"] = lambda _, told: PAGES[page]
            action = await w.answered(await w.begin(mode=Mode.ASYNC))
            assert action.state is State.UNKNOWN
            w.hermes.bend.clear()
            w.hermes.scripts["long"] = (("wait", 60), ("complete", "the real output"))
            w.hermes.faults["events"] = [PAGES[page]] if PAGES[page].status != 200 else ["unreached"]
            run_id = await w.bound(await w.begin("k2", "long"))
            w.hermes.bend["status"] = lambda _, told: PAGES[page]
            began = len(w.hermes.reads)
            await anyio.sleep(30)
            run = await w.run(run_id)
            assert (told_state(run), run.ended, run.phase) == (("running", ""), None, Phase.FOLLOWED)
            assert run.unread is not None
            assert 2 < len(w.hermes.reads) - began < 12
            w.hermes.bend.clear()
            ended = await w.ended(run_id)
            assert ended.ended is not None
            assert b"html" not in await w.vault.open(ended.ended.result)
            assert len(w.hermes.sent("start")) == 2
            await check(w)

    play(story)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.proves("A142", "B001")
def test_accepted_work_that_had_not_been_sent_yet_vanishes_in_a_restart(seed: int) -> None:
    async def story() -> None:
        async with world() as w:
            w.supervised = True
            w.hermes.stall["start"] = 0.05
            told: list[Action] = []

            async def caller(number: int) -> None:
                await anyio.sleep(0.013 * number)
                told.append(await w.begin(f"k{number}", mode=Mode.ASYNC))

            async with anyio.create_task_group() as callers:
                for number in range(20):
                    callers.start_soon(caller, number)
                for moment in (0.05 + 0.007 * seed, 0.6 + 0.03 * seed):
                    await anyio.sleep(moment)
                    await w.current().kill()
            await w.settle()
            found = [await w.action(action) for action in told]
            assert len(found) == 20
            sent = {entry.key for entry in w.hermes.sent("start")}
            for action in found:
                if action.state is State.UNKNOWN:
                    assert action.attempt is not None
                    assert action.attempt.accepted is None
                else:
                    assert action.effect is Effect.CONFIRMED
                    assert action.request.key in sent
            assert any(action.state is State.UNKNOWN for action in found)
            assert any(action.state is State.SETTLED for action in found)
            await check(w)

    play(story)


async def _in_session(w: World, key: str, session: str = "talk", **more: Any) -> Action:
    given = {"input": "long", "session_id": session}
    return await w.answered(await w.submit(Operation.RUN_START, given, key=key, **more))


@pytest.mark.proves("A048", "A052")
def test_two_runs_of_one_conversation_act_on_each_others_stale_picture() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["long"] = (("wait", 60), ("complete", "done"))
            first, second = await _in_session(w, "k1"), await _in_session(w, "k2")
            assert len(w.hermes.created) == 2
            assert "session_has_other_active_run" not in first.request.notices
            assert "session_has_other_active_run" in second.request.notices
            await w.settle()
            third = await _in_session(w, "k3")
            assert third.request.notices == ()
            await check(w)

    play(story)


def test_two_runs_of_one_conversation_act_on_each_others_stale_picture_under_the_policy() -> None:
    async def story() -> None:
        async with world() as w:
            w.policy = type(w.policy)(id="acme", one_run_per_session=True)
            w.hermes.scripts["long"] = (("wait", 60), ("complete", "done"))
            first = await _in_session(w, "k1")
            with pytest.raises(CallerError) as refused:
                await _in_session(w, "k2")
            assert (refused.value.code, refused.value.status, refused.value.effect) == (
                "session.busy",
                409,
                Effect.NONE,
            )
            assert (await _in_session(w, "k1")).request.action_id == first.request.action_id
            assert (await _in_session(w, "k-other", "another talk")).effect is Effect.CONFIRMED
            await w.ended(actions.started_run(first))
            w.hermes.faults["start"] = ["lost"]
            unknown = await _in_session(w, "k3")
            assert unknown.state is State.UNKNOWN
            await anyio.sleep(3_600)
            with pytest.raises(CallerError) as blocked:
                await _in_session(w, "k4")
            assert blocked.value.code == "session.busy"
            assert len(w.hermes.sent("start")) == 3
            assert w.target.endpoint_id == ENDPOINT
            await check(w)

    play(story)


def test_two_starts_of_one_conversation_at_the_same_moment_at_two_hosts_are_one_under_the_policy() -> None:
    async def story() -> None:
        async with world() as w:
            w.policy = type(w.policy)(id="acme", one_run_per_session=True)
            w.hermes.scripts["long"] = (("wait", 60), ("complete", "done"))
            for replica in "ab":
                await w.start(replica).ready.wait()
            outcomes: list[str] = []

            async def caller(number: int) -> None:
                try:
                    action = await _in_session(w, f"k{number}", replica="ab"[number % 2])
                    outcomes.append(action.state.value)
                except CallerError as error:
                    outcomes.append(error.code)

            async with anyio.create_task_group() as callers:
                for number in range(8):
                    callers.start_soon(caller, number)
            assert sorted(outcomes) == ["session.busy"] * 7 + ["settled"]
            assert len(w.hermes.created) == 1
            await w.settle()
            await check(w)

    play(story)
