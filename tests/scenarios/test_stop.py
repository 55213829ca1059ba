"""Stop: cancellation and what it does not prove. Each test is a problem met in the field."""

from __future__ import annotations

import json
from collections.abc import Callable

import anyio
import pytest

from domain import action as actions
from domain.action import Action, State
from domain.approval import TenantPolicy
from domain.binding import Phase, told_state
from domain.errors import CallerError
from domain.events import EndDisputed, RunEnded, StopAnswered
from domain.provider import Exchange
from domain.values import Effect, Mode, Operation
from projections.runs import pending_approvals
from tests.world.hermes import answer, refusal
from tests.world.host import ADA, World, play, world
from tests.world.laws import check


async def stop(w: World, run_id: str, key: str) -> Action:
    """Ask for a stop."""
    return await w.answered(await w.submit(Operation.RUN_STOP, {"run_id": run_id}, key=key))


def saying(state: str) -> Callable[[str, Exchange], Exchange]:
    """Every status read of a known run gives this word."""

    def bent(run_id: str, told: Exchange) -> Exchange:
        return answer(200, json.loads(told.body) | {"status": state}) if told.status == 200 else told

    return bent


@pytest.mark.proves("A112", "A115", "A125", "A135")
def test_stop_removes_the_run_from_the_books_while_its_thread_works_on() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("wait", 15), ("effect", "written"), ("never",))
            run_id = await w.bound(await w.begin())
            await anyio.sleep(5)
            w.hermes.runs[run_id].stop_takes = 10_000
            first = await stop(w, run_id, "s1")
            assert first.effect is Effect.CONFIRMED
            del w.hermes.runs[run_id]
            await anyio.sleep(60)
            assert [effect[2] for effect in w.hermes.effects] == ["written"]
            run = await w.run(run_id)
            assert (told_state(run), run.ended) == (("unknown", "evidence_lost"), None)
            assert (await stop(w, run_id, "s1")).request.action_id == first.request.action_id
            assert len(w.hermes.sent("stop")) == 1
            second = await stop(w, run_id, "s2")
            assert second.settled is not None
            assert (second.settled.code, second.effect) == ("connector.hermes_agent.run_not_found", Effect.NONE)
            assert len(w.hermes.sent("stop")) == 2
            assert (await w.run(run_id)).ended is None
            await check(w)

    play(story)


@pytest.mark.proves("A108", "A115")
def test_stopping_a_finished_run_overwrites_its_good_result() -> None:
    async def story() -> None:
        async with world() as w:
            run_id = await w.bound(await w.begin())
            before = await w.ended(run_id)
            await anyio.sleep(5)
            late = await stop(w, run_id, "s1")
            assert late.settled is not None
            assert (late.settled.code, late.effect) == ("run.already_terminal", Effect.NONE)
            assert not w.hermes.sent("stop")
            w.hermes.bend["status"] = saying("stopping")
            await w.answered(await w.submit(Operation.RUN_STATUS, {"run_id": run_id}))
            after = await w.run(run_id)
            assert (after.ended, told_state(after)) == (before.ended, ("completed", ""))
            assert [dispute.state for dispute in after.disputes] == ["stopping"]
            assert any(isinstance(event.event, EndDisputed) for event in await w.events())
            assert after.ended is not None
            assert b"hello world" in await w.vault.open(after.ended.result)
            await check(w)

    play(story)


@pytest.mark.proves("A112", "A114", "A138", "A139")
def test_the_local_time_out_settles_the_job_while_the_remote_run_is_still_stopping() -> None:
    async def story() -> None:
        async with world() as w:
            w.run_deadline_ms = 60_000
            w.hermes.scripts["plain"] = (("never",),)
            run_id = await w.bound(await w.begin())
            await anyio.sleep(70)
            assert told_state(await w.run(run_id)) == ("unknown", "deadline_passed")
            w.hermes.runs[run_id].stop_takes = 300
            receipt = await stop(w, run_id, "s1")
            assert receipt.settled is not None
            assert receipt.settled.details["status"] == "stopping"
            w.hermes.stall["status"] = 60
            await anyio.sleep(65)
            w.hermes.stall.clear()
            assert (await w.run(run_id)).unread is not None
            await anyio.sleep(100)
            run = await w.run(run_id)
            assert (told_state(run), run.ended) == (("stopping", ""), None)
            reads = len(w.hermes.reads)
            await anyio.sleep(60)
            assert len(w.hermes.reads) > reads
            run = await w.ended(run_id)
            assert told_state(run) == ("cancelled", "")
            assert len(w.hermes.sent("stop")) == 1
            found = await w.events()
            answered = next(event.event for event in found if isinstance(event.event, StopAnswered))
            ended = next(event.event for event in found if isinstance(event.event, RunEnded))
            assert (ended.at - answered.at).total_seconds() > 290
            await check(w)

    play(story)


@pytest.mark.proves("A116", "A117")
def test_cancelling_something_that_waits_between_retries_has_no_effect() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.faults["start"] = [refusal(429, "rate_limit_exceeded", retry_after="30")]
            waiting = await w.begin(mode=Mode.ASYNC)
            await anyio.sleep(5)
            done = await w.ask(lambda intake: intake.cancel(ADA, waiting.request.action_id, "enough"))
            assert done.what == "cancelled_without_effect"
            await anyio.sleep(120)
            found = await w.action(waiting)
            assert found.settled is not None
            assert (found.settled.status, found.effect) == ("cancelled", Effect.NONE)
            assert len(w.hermes.sent("start")) == 1
            await check(w)

    play(story)


def test_cancelling_a_start_in_flight_that_is_then_refused_for_now_sends_nothing_more() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.slots = 0
            w.hermes.stall["start"] = 3.0
            sending = await w.begin(mode=Mode.ASYNC)
            await anyio.sleep(1)
            done = await w.ask(lambda intake: intake.cancel(ADA, sending.request.action_id, "enough"))
            assert done.what == "wish_stored"
            w.hermes.slots = None
            found = await w.answered(sending)
            assert found.settled is not None
            assert (found.settled.status, found.effect) == ("cancelled", Effect.NONE)
            await anyio.sleep(100)
            assert len(w.hermes.sent("start")) == 1
            assert not w.hermes.created
            await check(w)

    play(story)


def test_cancelling_what_is_polled_or_held_stops_once_or_keeps_the_wish() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("never",),)
            run_id = await w.bound(await w.begin())
            follow = await w.submit(Operation.RUN_EVENTS, {"run_id": run_id}, key="e1", mode=Mode.ASYNC)
            for _ in range(3):
                done = await w.ask(lambda intake: intake.cancel(ADA, follow.request.action_id, "enough"))
                assert done.what == "stop_requested"
            await w.ended(run_id)
            assert len(w.hermes.sent("stop")) == 1
            w.hermes.faults["start"] = ["lost"]
            held = await w.answered(await w.begin("k2"))
            assert held.state is State.UNKNOWN
            done = await w.ask(lambda intake: intake.cancel(ADA, held.request.action_id, "enough"))
            assert done.what == "wish_stored"
            found = await w.action(held)
            assert (found.state, found.cancel is not None) == (State.UNKNOWN, True)
            settled = await w.answered(await w.begin("k3"))
            with pytest.raises(CallerError) as refused:
                await w.ask(lambda intake: intake.cancel(ADA, settled.request.action_id, "enough"))
            assert refused.value.code == "action.already_settled"
            assert refused.value.details["run_id"] == actions.started_run(settled)
            assert len(w.hermes.sent("stop")) == 1

    play(story)


@pytest.mark.proves("A112", "A068")
def test_stop_reports_success_while_the_run_still_waits_for_an_approval() -> None:
    async def story() -> None:
        async with world() as w:
            w.approval_timeout_ms = 300_000
            w.hermes.approval_timeout_s = 300
            w.hermes.scripts["plain"] = (("ask", "rm a"), ("never",))
            run_id = await w.bound(await w.begin())
            (digest,) = await w.pending(run_id)
            w.hermes.runs[run_id].stop_takes = 300
            await stop(w, run_id, "s1")
            await anyio.sleep(100)
            row = await w.run_row(run_id)
            assert (told_state(row.run), row.run.ended) == (("stopping", ""), None)
            assert [item["digest"] for item in pending_approvals(row, 300_000)] == [digest]
            assert not w.hermes.sent("approval")
            given = {"run_id": run_id, "reviewed": digest}
            yes = await w.answered(await w.submit(Operation.RUN_APPROVAL, given | {"choice": "once"}, key="c1"))
            assert yes.settled is not None
            assert (yes.settled.code, yes.effect) == ("approval.after_stop", Effect.NONE)
            no = await w.answered(await w.submit(Operation.RUN_APPROVAL, given | {"choice": "deny"}, key="c2"))
            assert no.effect is Effect.CONFIRMED
            assert [entry.choice for entry in w.hermes.sent("approval")] == ["deny"]
            assert told_state(await w.ended(run_id)) == ("cancelled", "")
            assert not w.hermes.effects
            await check(w)

    play(story)


@pytest.mark.proves("A002", "A122", "A125", "A153")
def test_the_provider_is_gone_but_what_it_started_keeps_working() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("never",),)
            action = await w.begin()
            run_id = await w.bound(action)
            await anyio.sleep(10)
            w.hermes.restart()
            await anyio.sleep(20)
            w.hermes.effects.append((anyio.current_time(), run_id, "a child process wrote"))
            run = await w.run(run_id)
            assert (told_state(run), run.phase, run.ended) == (("unknown", "evidence_lost"), Phase.LOST, None)
            refused = await stop(w, run_id, "s1")
            assert refused.settled is not None
            assert (refused.settled.status, refused.effect) == ("failed", Effect.NONE)
            assert refused.settled.code == "connector.hermes_agent.run_not_found"
            assert (await w.action(action)).effect is Effect.CONFIRMED
            assert (await w.run_row(run_id)).open_needs
            assert len(w.hermes.sent("start")) == 1
            await check(w)

    play(story)


@pytest.mark.proves("A109")
def test_a_stop_that_nobody_granted_is_never_sent() -> None:
    async def story() -> None:
        async with world() as w:
            w.policy = TenantPolicy(id="acme")
            w.hermes.scripts["plain"] = (("never",),)
            run_id = await w.bound(await w.begin())
            waiting = await stop(w, run_id, "s1")
            assert waiting.state is State.AWAITING
            await anyio.sleep(1_000)
            found = await w.action(waiting)
            assert found.settled is not None
            assert found.settled.code == "policy.approval_expired"
            assert not w.hermes.sent("stop")

    play(story)


@pytest.mark.proves("A122", "B001", "B122")
def test_runs_whose_executor_died_stay_running_for_ever() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("never",),)
            runs = [await w.bound(await w.begin(f"k{number}")) for number in range(5)]
            await anyio.sleep(10)
            w.hermes.restart()
            await w.current().kill()
            for _ in range(2):
                host = w.start()
                await host.ready.wait()
                await anyio.sleep(60)
                for run_id in runs:
                    row = await w.run_row(run_id)
                    assert (row.state, row.unknown_reason) == ("unknown", "evidence_lost")
                    assert row.reason == "run_evidence_lost"
                    assert row.seen_at is not None
                assert host.recovery is not None
                assert (host.recovery.resumed, host.recovery.unknown) == (5, 0)
                await host.kill()
            assert len(w.hermes.sent("start")) == 5
            await check(w)

    play(story)
