"""Every port call of each flow is a point at which the process may end, pause, be cancelled or lose an answer.

The points are found by counting one undisturbed pass. At each of them each kind of fault is tried in its own world;
then callers repeat what was not answered, a new process takes over, time passes, and every promise is checked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import msgspec
import pytest

from domain.approval import TenantPolicy
from domain.errors import CallerError
from domain.values import Mode, Operation
from tests.world.hermes import refusal
from tests.world.host import ADA, BO, World, play, world
from tests.world.laws import check
from tests.world.process import FAULTS, Fault

Flow = Callable[[World], Awaitable[None]]


async def start(w: World) -> None:
    """A start, its run to the end, and the same request once more."""
    action = await w.begin()
    await w.answered(action)
    again = await w.begin()
    assert again.request.action_id == action.request.action_id


async def queued_start(w: World) -> None:
    """A queued start that is refused twice before it is taken."""
    w.hermes.faults["start"] = [refusal(429, "rate_limit_exceeded", retry_after="1"), "unreached"]
    action = await w.begin(mode=Mode.ASYNC)
    await w.answered(action)


async def approval(w: World) -> None:
    """A choice for a reviewed request of the provider."""
    w.hermes.scripts["plain"] = (("ask", "rm x"), ("complete", "done"))
    run_id = await w.bound(await w.begin())
    if not run_id:
        return
    run = w.hermes.runs[run_id]

    async def asked_or_lost() -> bool:
        seen = await w.stream(run_id)
        return bool(seen.pending or seen.gaps)

    await w.until(asked_or_lost)
    pending = [item.ask.digest for item in (await w.stream(run_id)).pending]
    if not pending or run.state != "waiting_for_approval":
        return
    given = {"run_id": run_id, "choice": "once", "reviewed": pending[0]}
    await w.answered(await w.submit(Operation.RUN_APPROVAL, given, key="c1"))


async def governed_stop(w: World) -> None:
    """A stop that a person grants."""
    w.policy = TenantPolicy(id="acme")
    w.hermes.scripts["plain"] = (("wait", 150), ("complete", "done"))
    run_id = await w.bound(await w.begin())
    if not run_id:
        return
    action = await w.submit(Operation.RUN_STOP, {"run_id": run_id}, key="s1")
    try:
        await w.ask(lambda intake: intake.decide(BO, action.request.action_id, granted=True, reason="enough"))
    except CallerError as error:
        assert error.code == "policy.approval_not_pending"  # noqa: PT017  the first decision was stored, its answer lost
    await w.answered(action)


async def cancel_driven_stop(w: World) -> None:
    """A cancel of a following Action, which asks for a stop of its run."""
    w.hermes.scripts["plain"] = (("wait", 150), ("complete", "done"))
    run_id = await w.bound(await w.begin())
    if not run_id:
        return
    follow = await w.submit(Operation.RUN_EVENTS, {"run_id": run_id}, key="e1", mode=Mode.ASYNC)
    try:
        done = await w.ask(lambda intake: intake.cancel(ADA, follow.request.action_id, "enough"))
    except CallerError as error:
        assert error.code == "action.already_settled"  # noqa: PT017  its stream was lost before it could be cancelled
        return
    assert done.what == "stop_requested"
    await w.answered(await w.action(done.stop_action_id))


async def unfinished_work(w: World) -> None:
    """One Action or run in each state that a process can leave behind; then the process is gone."""
    w.policy = TenantPolicy(id="acme", direct=("run_approval",))
    w.hermes.approval_timeout_s = 10.0
    w.hermes.scripts |= {"long": (("wait", 10), ("complete", "done")), "asks": (("ask", "rm x"), ("complete", "done"))}
    run_id = await w.bound(await w.begin("k-bound", "long"))
    asking = await w.bound(await w.begin("k-asks", "asks"))
    await w.pending(asking)
    await w.submit(Operation.RUN_STOP, {"run_id": run_id}, key="s-waiting")
    await w.submit(Operation.RUN_EVENTS, {"run_id": run_id}, key="e-following", mode=Mode.ASYNC)
    w.hermes.faults["start"] = ["lost", refusal(429, "rate_limit_exceeded", retry_after="8")]
    await w.answered(await w.begin("k-unknown"))
    await w.begin("k-refused", mode=Mode.ASYNC)
    await anyio.sleep(1)
    w.hermes.stall["start"] = 5.0
    await w.begin("k-claimed", mode=Mode.ASYNC)
    await anyio.sleep(1)
    w.hermes.stall.clear()
    await w.current().kill()


async def recovery(w: World) -> None:
    """Go on with unfinished work; a person grants what waits."""
    waiting = next(action for key, action in w.told if key == "s-waiting")
    try:
        await w.ask(lambda intake: intake.decide(BO, waiting.request.action_id, granted=True, reason="enough"))
    except CallerError as error:
        assert error.code == "policy.approval_not_pending"  # noqa: PT017  the first decision was stored, its answer lost
    await w.answered(waiting)


async def nothing_before(w: World) -> None:
    """A fresh store."""


FAULTS_ALONE = tuple(kind for kind in FAULTS if kind != "pause")


class Case(msgspec.Struct, frozen=True):
    """A flow, what is there before it, and the provider's flavour. ``booting`` counts the process's start as well."""

    flow: Flow
    before: Flow = nothing_before
    replay: bool = False
    booting: bool = False


CASES = {
    "start": Case(start),
    "start on a replaying provider": Case(start, replay=True),
    "queued start": Case(queued_start),
    "approval": Case(approval),
    "governed stop": Case(governed_stop),
    "cancel-driven stop": Case(cancel_driven_stop),
    "recovery": Case(recovery, before=unfinished_work, booting=True),
}


async def perform(case: Case, fault: Fault | None, beside: bool = False) -> tuple[list[str], str]:
    """One pass; the points that the counted process passed, and the one at which the fault struck.

    With ``beside`` a second host lives on the same journal.
    """
    async with world(replay=case.replay) as w:
        await case.before(w)
        w.supervised = True
        counted = w.start(fault=fault)
        counted.process.counting = case.booting
        await counted.ready.wait()
        counted.process.counting = True
        if beside:
            w.start("b")
        with anyio.fail_after(3_000):
            await case.flow(w)
            await w.settle()
        counted.process.counting = False
        if fault is not None:
            await anyio.sleep(fault.seconds)
            await w.settle()
        await check(w)
        return counted.process.trace, counted.process.hit


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.proves("A002", "A012")
def test_no_fault_at_any_port_call_breaks_a_promise(name: str) -> None:
    case = CASES[name]
    tried = points = 0
    for beside, kinds in ((False, FAULTS_ALONE), (True, ("pause",))):
        passed, _ = play(perform, case, None, beside)
        points = max(points, len(passed))
        for place, point in enumerate(passed, 1):
            for kind in kinds:
                try:
                    _, hit = play(perform, case, Fault(kind, place), beside)
                except BaseException as error:
                    error.add_note(f"{name}: {kind} at call {place}, {point}")
                    raise
                assert hit, f"{name}: call {place} was not reached"
                tried += 1
    print(f"{name}: {points} points, {tried} faults")
    assert tried > 300
