"""Approval: the provider's own requests and governed decisions. Each test is a problem met in the field."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from domain.action import Action, State, told_state
from domain.approval import TenantPolicy
from domain.errors import CallerError
from domain.events import ApprovalDecided, AttemptClaimed, AttemptUnknown, ChoiceClaimed, FramesStored
from domain.values import Effect, Operation
from projections.runs import pending_approvals
from tests.world.host import BO, World, play, world
from tests.world.laws import check

WIDE = TenantPolicy(
    id="acme", direct=("run_approval", "run_stop"), choices=("once", "session", "always", "deny"), resolve_all=True
)


async def choose(w: World, run_id: str, reviewed: Any, key: str, choice: str = "once", **more: Any) -> Action:
    """Answer a reviewed request of the provider."""
    given = {"run_id": run_id, "choice": choice, "reviewed": reviewed, **more}
    return await w.answered(await w.submit(Operation.RUN_APPROVAL, given, key=key))


def code_of(action: Action) -> str:
    """The code of a settled Action."""
    return action.settled.code if action.settled else "not settled"


@pytest.mark.proves("A081", "A093", "A094", "A102")
def test_with_two_approvals_pending_in_one_run_the_answer_lands_on_the_older_one() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("ask", "rm a", "rm b"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            first, second = await w.pending(run_id, 2)
            refused = await choose(w, run_id, second, "c-b")
            assert (code_of(refused), refused.effect) == ("approval.not_oldest", Effect.NONE)
            assert not w.hermes.sent("approval")
            w.hermes.extra_resolved = 1
            accepted = await choose(w, run_id, first, "c-a")
            assert accepted.settled is not None
            assert accepted.settled.details["resolved"] == 2
            assert code_of(await choose(w, run_id, second, "c-b1")) == "approval.not_oldest"
            await anyio.sleep(1)
            assert [effect[2] for effect in w.hermes.effects] == []
            claims = [event.event for event in await w.events() if isinstance(event.event, ChoiceClaimed)]
            assert [(claim.generations, claim.choice) for claim in claims] == [((1,), "once")]
            run = await w.run(run_id)
            assert [mark.kind for mark in run.integrity] == ["resolved_count"]
            assert len(w.hermes.sent("approval")) == 1
            w.hermes.extra_resolved = 0
            assert (await choose(w, run_id, second, "c-b2")).effect is Effect.CONFIRMED
            await w.settle()
            await check(w)

    play(story)


def test_the_second_request_may_be_answered_as_soon_as_the_first_answer_is_stored() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("ask", "rm a", "rm b"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            first, second = await w.pending(run_id, 2)
            assert (await choose(w, run_id, first, "c-a")).effect is Effect.CONFIRMED
            assert code_of(await choose(w, run_id, first, "c-a2")) == "approval.already_decided"
            assert (await choose(w, run_id, second, "c-b")).effect is Effect.CONFIRMED
            await w.settle()
            assert [effect[2] for effect in w.hermes.effects] == ["rm a", "rm b"]
            await check(w)

    play(story)


def test_with_two_approvals_pending_an_answer_by_exact_request_may_be_for_either() -> None:
    async def story() -> None:
        async with world(replay=True) as w:
            w.hermes.scripts["plain"] = (("ask", "rm a", "rm b"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            _, second = await w.pending(run_id, 2)
            assert (await choose(w, run_id, second, "c-b")).effect is Effect.CONFIRMED
            assert b'"request_id"' in w.hermes.sent("approval")[0].body
            assert [item[0]["command"] for item in w.hermes.runs[run_id].queue] == ["rm a"]

    play(story)


@pytest.mark.proves("A135", "A137", "A142")
def test_a_late_or_repeated_answer_releases_the_next_command() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("ask", "rm a"), ("wait", 5), ("ask", "rm b"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            (first,) = await w.pending(run_id)
            w.hermes.faults["approval"] = ["lost"]
            action = await choose(w, run_id, first, "c1")

            async def asked_again() -> bool:
                return (await w.stream(run_id)).asked == 2

            await w.until(asked_again)
            again = await choose(w, run_id, first, "c1")
            assert again.request.action_id == action.request.action_id
            other = await choose(w, run_id, first, "c2")
            assert (code_of(other), other.effect) == ("approval.not_pending", Effect.NONE)
            assert len(w.hermes.sent("approval")) == 1
            found = await w.action(action)
            assert (found.state, found.effect) == (State.SETTLED, Effect.CONFIRMED)
            assert found.attempt is not None
            assert found.attempt.found is not None
            assert found.attempt.found.source == "approval.responded"
            assert any(isinstance(event.event, AttemptUnknown) for event in await w.events())
            (second,) = await w.pending(run_id)
            assert [effect[2] for effect in w.hermes.effects] == ["rm a"]
            assert (await choose(w, run_id, second, "c3")).effect is Effect.CONFIRMED
            await w.settle()
            await check(w)

    play(story)


def test_the_same_command_asked_twice_is_two_requests_to_be_reviewed() -> None:
    async def story() -> None:
        async with world() as w:
            frame = {"command": "rm a", "choices": ["once", "deny"], "timestamp": 1}
            w.hermes.scripts["plain"] = (
                ("frame", "approval.request", frame),
                ("wait", 1),
                ("frame", "approval.responded", {"choice": "deny", "resolved": 1}),
                ("wait", 1),
                ("frame", "approval.request", frame),
                ("never",),
            )
            run_id = await w.bound(await w.begin())
            (first,) = await w.pending(run_id)
            await anyio.sleep(3)
            (second,) = await w.pending(run_id)
            assert first != second
            assert code_of(await choose(w, run_id, first, "c1")) == "approval.not_pending"
            assert not w.hermes.sent("approval")

    play(story)


@pytest.mark.proves("A050", "A052", "A100", "A101")
def test_two_runs_share_one_conversation_and_one_answer_resolves_both() -> None:
    async def story() -> None:
        async with world(policy=WIDE) as w:
            w.hermes.scripts["plain"] = (("ask", "rm a"), ("complete", "done"))
            runs = []
            for key in ("k1", "k2"):
                given = {"input": "plain", "session_id": "talk"}
                runs.append(await w.bound(await w.submit(Operation.RUN_START, given, key=key)))
            first, second = runs
            (mine,) = await w.pending(first)
            (other,) = await w.pending(second)
            w.hermes.extra_resolved = 1
            assert code_of(await choose(w, first, [mine, other], "c0", resolve_all=True)) == "approval.not_pending"
            done = await choose(w, first, [mine], "c1", resolve_all=True)
            assert done.settled is not None
            assert done.settled.details["resolved"] == 2
            assert [entry.run_id for entry in w.hermes.sent("approval")] == [first]
            assert await w.pending(second) == [other]
            assert [mark.kind for mark in (await w.run(first)).integrity] == ["resolved_count"]
            assert not (await w.run(second)).integrity
            await check(w)

    play(story)


@pytest.mark.proves("A067", "A107")
def test_an_unattended_run_stalls_because_nobody_knows_that_it_waits() -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("wait", 5), ("ask", "rm a"), ("complete", "done"))
            w.policy = TenantPolicy(id="acme")
            run_id = await w.bound(await w.begin())
            (digest,) = await w.pending(run_id)
            await anyio.sleep(20)
            row = await w.run_row(run_id)
            (waiting,) = pending_approvals(row, 60_000)
            assert (waiting["digest"], row.state) == (digest, "waiting_for_approval")
            assert [need.reason for need in row.open_needs] == ["provider_approval_pending"]
            choice = await choose(w, run_id, digest, "c1")
            assert told_state(choice) == "pending_approval"
            await w.ask(lambda intake: intake.decide(BO, choice.request.action_id, granted=True, reason="fine"))
            assert (await w.answered(choice)).effect is Effect.CONFIRMED
            assert len(w.hermes.sent("approval")) == 1
            await w.settle()
            await check(w)

    play(story)


@pytest.mark.proves("A103", "A104", "A142", "A156")
def test_the_user_said_yes_the_yes_never_arrived_and_the_run_was_denied_by_time_out() -> None:
    async def story() -> None:
        async with world() as w:
            w.policy = TenantPolicy(id="acme")
            w.hermes.scripts["plain"] = (("ask", "rm a"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            (digest,) = await w.pending(run_id)

            async def granted(key: str) -> Action:
                action = await choose(w, run_id, digest, key)
                await w.ask(lambda intake: intake.decide(BO, action.request.action_id, granted=True, reason="fine"))
                return await w.answered(action)

            w.hermes.faults["approval"] = ["unreached", "lost_before_effect"]
            unsent = await granted("c1")
            assert (code_of(unsent), unsent.effect) == ("connector.hermes_agent.not_sent", Effect.NONE)
            doubtful = await granted("c2")
            assert (doubtful.state, doubtful.effect) == (State.UNKNOWN, Effect.POSSIBLE)
            assert code_of(await granted("c3")) == "approval.already_decided"
            await anyio.sleep(70)
            assert not (await w.stream(run_id)).pending
            assert (await w.action(doubtful)).state is State.UNKNOWN
            assert not w.hermes.sent("approval")
            assert not w.hermes.effects
            kinds = {type(event.event) for event in await w.events()}
            assert {ApprovalDecided, AttemptClaimed, AttemptUnknown, FramesStored} <= kinds
            late = await granted("c4")
            assert code_of(late) in ("approval.not_pending", "run.already_terminal")
            await check(w)

    play(story)


@pytest.mark.parametrize(
    ("word", "stored"), [("once", "once"), ("approve", "once"), ("allow", "once"), ("deny", "deny")]
)
@pytest.mark.proves("A096", "A098", "A099")
def test_a_single_yes_becomes_a_standing_permission(word: str, stored: str) -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("ask", "rm a"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            (digest,) = await w.pending(run_id)
            action = await choose(w, run_id, digest, "c1", word)
            assert action.request.choice == stored
            assert [entry.choice for entry in w.hermes.sent("approval")] == [stored]
            await w.settle()
            await check(w)

    play(story)


@pytest.mark.parametrize(
    ("choice", "code"),
    [
        ("session", "policy.choice_denied"),
        ("always", "policy.choice_denied"),
        ("yes", "action.input_schema_invalid"),
        ("", "action.input_schema_invalid"),
        (None, "action.input_schema_invalid"),
    ],
)
@pytest.mark.proves("A096")
def test_a_single_yes_becomes_a_standing_permission_and_is_refused(choice: Any, code: str) -> None:
    async def story() -> None:
        async with world() as w:
            w.hermes.scripts["plain"] = (("ask", "rm a"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            (digest,) = await w.pending(run_id)
            with pytest.raises(CallerError) as refused:
                await choose(w, run_id, digest, "c1", choice)
            assert (refused.value.code, refused.value.effect) == (code, Effect.NONE)
            assert not w.hermes.sent("approval")

    play(story)


@pytest.mark.parametrize("choice", ["session", "always"])
def test_a_wider_choice_is_sent_as_it_is_where_the_policy_allows_it(choice: str) -> None:
    async def story() -> None:
        async with world(policy=WIDE) as w:
            w.hermes.scripts["plain"] = (("ask", "rm a"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            (digest,) = await w.pending(run_id)
            assert (await choose(w, run_id, digest, "c1", choice)).effect is Effect.CONFIRMED
            assert [entry.choice for entry in w.hermes.sent("approval")] == [choice]

    play(story)


@pytest.mark.proves("A106")
def test_a_grant_that_was_not_used_in_time_sends_nothing() -> None:
    async def story() -> None:
        async with world() as w:
            w.policy = TenantPolicy(id="acme")
            w.approval_timeout_ms = 3_600_000
            w.hermes.approval_timeout_s = 3_600
            w.hermes.scripts["plain"] = (("ask", "rm a"), ("complete", "done"))
            run_id = await w.bound(await w.begin())
            (digest,) = await w.pending(run_id)
            choice = await choose(w, run_id, digest, "c1")
            await anyio.sleep(930)
            with pytest.raises(CallerError) as refused:
                await w.ask(lambda intake: intake.decide(BO, choice.request.action_id, granted=True, reason="late"))
            assert refused.value.code in ("policy.approval_expired", "policy.approval_not_pending")
            assert code_of(await w.action(choice)) == "policy.approval_expired"
            assert not w.hermes.sent("approval")

    play(story)
