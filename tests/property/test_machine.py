"""Callers, crashes, lost answers, takeovers and time in any order, against the reference model and the promises."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from adapters.submission import Cancelled, Submission
from domain.action import Action
from domain.contracts import capability_id
from domain.errors import HostError
from domain.values import Actor, Mode, Operation
from tests.property import variants
from tests.property.reference import Asked
from tests.property.stage import ENDPOINT, Guest, Stage, disturb
from tests.world.hermes import PROXY_PAGE, refusal
from tests.world.host import ADA, BO, Host
from tests.world.process import Died

T = TypeVar("T")
CY = Actor(id="user:cy", tenant="acme", scopes=("action:write", "action:read"))
CALLERS = (ADA, ADA, ADA, CY)
PEOPLE = (
    BO,
    BO,
    BO,
    ADA,
    Actor(id="user:ada", kind="person", tenant="acme", scopes=("approval:write",), roles=("approver",)),
)
SCRIPTS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "quick": (("wait", 1), ("delta", "hello "), ("complete", "hello")),
    "asks": (("wait", 1), ("ask", "rm one"), ("effect", "work"), ("complete", "done")),
    "asks twice": (("ask", "rm one", "rm two"), ("wait", 2), ("complete", "done")),
    "endless": (("delta", "x"), ("never",)),
    "fails": (("wait", 2), ("fail", "boom")),
    "long": (("delta", "a"), ("wait", 40), ("delta", "b"), ("wait", 400), ("complete", "late")),
}
ANSWERS: dict[str, Any] = {
    "unreached": "unreached",
    "lost": "lost",
    "lost_before_effect": "lost_before_effect",
    "full": refusal(429, "rate_limit_exceeded", retry_after="1"),
    "draining": refusal(503, "gateway_draining", retry_after="2"),
    "proxy": PROXY_PAGE,
}
DIRECT = ((), ("run_approval", "run_stop"))
POINTS = (
    "store.append",
    "store.append",
    "provider.send",
    "provider.send",
    "provider.read",
    "provider.stream",
    "store",
    "",
)
PROMPTS = st.sampled_from(("asks", "asks", "asks twice", "asks twice", "quick", "endless", "fails", "long"))
KINDS = ("kill_before", "kill_after", "lost", "lost", "away", "cancel", "pause", "pause")
REPLICAS = st.sampled_from(("a", "a", "b"))
KEYS = st.sampled_from(("k1", "k2", "k3")) | st.integers(4, 60).map("k{}".format)
INDEX = st.integers(0, 5)
LONGEST_STEP_S = 2_000.0
FOR_EVER_S = 1e9


class Machine(RuleBasedStateMachine):
    """One example: a world, and what its callers and its misfortunes do to it."""

    vary: Callable[[Any], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.guest: Guest | None = None
        self.failed = False
        self.keys = 0

    @initialize(replay=st.booleans(), direct=st.sampled_from(DIRECT), second=st.booleans())
    def open(self, replay: bool, direct: tuple[str, ...], second: bool) -> None:
        def inside(tasks: Any) -> None:
            self.stage = Stage(tasks, type(self).vary, replay=replay, direct=direct)
            self.stage.hermes.scripts |= SCRIPTS

        self.direct = direct
        self.guest = Guest(inside)
        self.do(self._open, "a", *(["b"] if second else []))

    async def _open(self, *replicas: str) -> None:
        for replica in replicas:
            await self.stage.start(replica).ready.wait()

    def do(self, step: Callable[..., Awaitable[T]], *args: Any, off_s: float = 0) -> T:
        """Perform one step. L1: it ends; every call of a host does within minutes."""
        assert self.guest is not None

        async def bounded() -> T:
            with anyio.fail_after(LONGEST_STEP_S + off_s):
                return await step(*args)

        try:
            return self.guest.do(bounded)
        except BaseException:
            self.failed = True
            raise

    @property
    def audit(self) -> Any:
        return self.stage.audit

    @property
    def reference(self) -> Any:
        return self.stage.audit.reference

    # ---- callers -----------------------------------------------------------------------------------------------------

    async def _call(self, call: Callable[[Any], Awaitable[T]], replica: str) -> T | str:
        try:
            return await self.stage.ask(call, replica)
        except HostError as error:
            return error.code

    async def _submit(
        self, actor: Actor, operation: str, given: dict[str, Any], key: str, replica: str, queued: bool
    ) -> None:
        words = repr(sorted(given.items()))
        submission = Submission(
            capability_id=capability_id(ENDPOINT, Operation(operation)),
            input=given,
            mode=Mode.ASYNC if queued else Mode.STREAMING if operation == "run_events" else Mode.SYNC,
            idempotency_key=key or None,
        )
        at = anyio.current_time()
        found = await self._call(lambda intake: intake.submit(actor, submission), replica)
        allowed = self.reference.submit(actor.id, operation, key, words, anyio.current_time())
        allowed |= self.reference.submit(actor.id, operation, key, words, at)
        if "new" in allowed and operation != "run_start":
            run_id, choice = given["run_id"], given.get("choice", "")
            owner = next(run.tie.principal for run in self.audit.runs.values() if run.tie.run_id == run_id)
            refused = "action.not_found" if owner != actor.id else ""
            refused = refused or ("policy.choice_denied" if choice not in ("", "approve", "once", "deny") else "")
            allowed = {refused} if refused else allowed
        if isinstance(found, str):
            self.audit.expect(found in allowed, "S12 one key, one Action", f"{found}, not {allowed}")
            return
        name = found.action.request.action_id
        told = name if name in self.reference.asked else "new"
        self.audit.expect(told in allowed, "S12 one key, one Action", f"{told}, not {allowed}")
        if told == "new":
            governed = operation in ("run_approval", "run_stop") and operation not in self.direct
            self.reference.take(Asked(name, actor.id, operation, key, words, queued, at, governed))
        await self.audit.catch_up()
        self.audit.check_told(found.action)

    @rule(prompt=PROMPTS, replica=REPLICAS, queued=st.booleans(), blink=st.sampled_from((0, 0, 0, 1, 2, 3)))
    def start(self, prompt: str, replica: str, queued: bool, blink: int) -> None:
        """Something new; the store may lose the answer of one append on the way."""

        async def call() -> None:
            if blink:
                self._aim(self.stage.current(replica), "lost", "store.append", blink)
            self.keys += 1
            await self._submit(ADA, "run_start", {"input": prompt}, f"n{self.keys}", replica, queued)

        self.do(call)

    @rule(actor=st.sampled_from(CALLERS), key=KEYS, prompt=PROMPTS, replica=REPLICAS, queued=st.booleans())
    def start_by_key(self, actor: Actor, key: str, prompt: str, replica: str, queued: bool) -> None:
        """Perhaps something new, perhaps a repeat, perhaps another request or another caller under a key."""
        self.do(self._submit, actor, "run_start", {"input": prompt}, key, replica, queued)

    @rule(key=KEYS, prompts=st.tuples(*[st.sampled_from(("quick", "asks"))] * 2))
    def race(self, key: str, prompts: tuple[str, str]) -> None:
        """Two callers, two hosts, one key, at the same time: one Action, or one of them is refused."""

        async def both() -> None:
            found: list[Any] = []

            async def one(prompt: str, replica: str) -> None:
                submission = Submission(
                    capability_id=capability_id(ENDPOINT, Operation.RUN_START),
                    input={"input": prompt},
                    idempotency_key=key,
                )
                found.append((prompt, await self._call(lambda intake: intake.submit(ADA, submission), replica)))

            at = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one, prompts[0], "a")
                tasks.start_soon(one, prompts[1], "b")
            for prompt, answer in sorted(found, key=lambda item: isinstance(item[1], str)):
                words = repr([("input", prompt)])
                allowed = self.reference.submit(ADA.id, "run_start", key, words, anyio.current_time())
                allowed |= self.reference.submit(ADA.id, "run_start", key, words, at)
                told = answer if isinstance(answer, str) else answer.action.request.action_id
                if told not in self.reference.asked and not isinstance(answer, str):
                    self.reference.take(Asked(told, ADA.id, "run_start", key, words, False, at))
                    told = "new"
                self.audit.expect(told in allowed, "S12 one key, one Action", f"{told}, not {allowed}")

        self.do(both)

    @rule(index=INDEX, key=KEYS, actor=st.sampled_from(CALLERS), replica=REPLICAS)
    @precondition(lambda self: self.audit.runs)
    def stop(self, index: int, key: str, actor: Actor, replica: str) -> None:
        self.do(self._submit, actor, "run_stop", {"run_id": self._run_id(index)}, key, replica, False)

    @rule(
        index=INDEX,
        key=KEYS,
        choice=st.sampled_from(("approve", "once", "deny", "always")),
        place=st.integers(0, 1),
        replica=REPLICAS,
    )
    @precondition(lambda self: any(seen.asked for seen in self.audit.streams.values()))
    def choose(self, index: int, key: str, choice: str, place: int, replica: str) -> None:
        """Answer a provider request by its position; one that was answered or given up before may be named too."""
        asking = sorted(name for name, seen in self.audit.streams.items() if seen.asked)
        history = asking[index % len(asking)]
        run = self.audit.runs[history.replace("/str/", "/run/")]
        digests = [ask.digest for item in self.audit.log[history] for ask in getattr(item.event, "asks", ())]
        pending = [item.ask.digest for item in self.audit.streams[history].pending] or digests
        given = {"run_id": run.tie.run_id, "choice": choice, "reviewed": pending[place % len(pending)]}
        actor = ADA if run.tie.principal == ADA.id else CY
        self.do(self._submit, actor, "run_approval", given, key, replica, False)

    @rule(index=INDEX, operation=st.sampled_from(("run_status", "run_events")), replica=REPLICAS)
    @precondition(lambda self: self.audit.runs)
    def read(self, index: int, operation: str, replica: str) -> None:
        self.do(self._submit, ADA, operation, {"run_id": self._run_id(index)}, "", replica, False)

    def _run_id(self, index: int) -> str:
        runs = sorted(self.audit.runs.values(), key=lambda run: run.tie.at, reverse=True)
        found: str = runs[index % len(runs)].tie.run_id
        return found

    @rule(index=INDEX, person=st.sampled_from(PEOPLE), granted=st.booleans(), replica=REPLICAS)
    @precondition(lambda self: self._governed())
    def decide(self, index: int, person: Actor, granted: bool, replica: str) -> None:
        governed = self._governed()
        asked = governed[index % len(governed)]

        async def call() -> None:
            approver = "approval:write" in person.scopes and "approver" in person.roles
            allowed = self.reference.decide(asked, person.id, approver, anyio.current_time())
            found = await self._call(
                lambda intake: intake.decide(person, asked.action_id, granted=granted, reason="seen"), replica
            )
            await self.audit.catch_up()
            self.audit.check_changed()
            again = {"policy.approval_not_pending"} if asked.decision else set()  # its first answer may have been lost
            told = found if isinstance(found, str) else "stored"
            allowed |= self.reference.decide(asked, person.id, approver, anyio.current_time()) | again
            self.audit.expect(told in allowed, "S8 approvals are narrow", f"{told}, not {allowed}")

        self.do(call)

    def _governed(self) -> list[Asked]:
        return [asked for asked in reversed(self.reference.asked.values()) if asked.governed]

    @rule(index=INDEX, replica=REPLICAS)
    @precondition(lambda self: self.reference.asked)
    def cancel(self, index: int, replica: str) -> None:
        known = list(reversed(self.reference.asked.values()))
        asked = known[index % len(known)]
        actor = ADA if asked.principal == ADA.id else CY

        async def call() -> None:
            await self.audit.catch_up()
            self.audit.check_changed()
            before = self.reference.cancel(asked)
            found = await self._call(lambda intake: intake.cancel(actor, asked.action_id, "changed my mind"), replica)
            await self.audit.catch_up()
            told = found.what if isinstance(found, Cancelled) else str(found)
            allowed = before | self.reference.cancel(asked)
            self.audit.expect(told in allowed, "a cancel is told truly", f"{told}, not {allowed}")
            if isinstance(found, Cancelled) and found.stop_action_id:
                self._take_stop(asked, found.stop_action_id)

        self.do(call)

    def _take_stop(self, asked: Asked, name: str) -> None:
        """The stop that a cancel asked for is an Action like any other."""
        if name not in self.reference.asked:
            governed = "run_stop" not in self.direct
            key = f"cancel:{asked.action_id}"
            self.reference.take(
                Asked(name, asked.principal, "run_stop", key, "", False, anyio.current_time(), governed)
            )

    @rule(index=INDEX, seconds=st.sampled_from((0.5, 5, 40)), replica=REPLICAS)
    @precondition(lambda self: self.reference.asked)
    def wait_for_answer(self, index: int, seconds: float, replica: str) -> None:
        known = list(reversed(self.reference.asked.values()))
        asked = known[index % len(known)]

        async def call() -> None:
            found = await self._call(lambda intake: intake.settled("acme", asked.action_id, seconds), replica)
            await self.audit.catch_up()
            if isinstance(found, Action):
                self.audit.check_told(found)

        self.do(call)

    # ---- misfortunes -------------------------------------------------------------------------------------------------

    @rule(
        operation=st.sampled_from(("start", "start", "approval", "stop", "status", "events")),
        kind=st.sampled_from(sorted(ANSWERS)),
    )
    def bend_answer(self, operation: str, kind: str) -> None:
        queue = self.stage.hermes.faults.setdefault(operation, [])
        if len(queue) < 2 and not (operation == "events" and kind.startswith("lost")):
            queue.append(ANSWERS[kind])

    @rule(
        index=INDEX,
        kind=st.sampled_from(KINDS),
        point=st.sampled_from(POINTS),
        number=st.integers(1, 4),
        seconds=st.sampled_from((3, 45, 90)),
    )
    @precondition(lambda self: self.stage.alive())
    def aim(self, index: int, kind: str, point: str, number: int, seconds: float) -> None:
        """A process fails at a port call to come."""
        alive = self.stage.alive()
        self._aim(alive[index % len(alive)], kind, point, number, seconds)

    def _aim(self, host: Host, kind: str, point: str, number: int, seconds: float = 0) -> None:
        trace: Any = host.process.trace
        trace.kind, trace.point, trace.left, trace.seconds = kind, point, number, seconds

    @rule(index=INDEX, seconds=st.sampled_from((2, 20, 50, 90)))
    @precondition(lambda self: self.stage.alive())
    def freeze(self, index: int, seconds: float) -> None:
        alive = self.stage.alive()
        host = alive[index % len(alive)]

        async def begin() -> None:
            async def thaw() -> None:
                await anyio.sleep(seconds)
                host.process.thaw()

            disturb(host, seconds)
            host.process.freeze()
            self.stage.tasks.start_soon(thaw)

        self.do(begin)

    @rule(
        index=INDEX,
        how=st.sampled_from(("killed", "ended", "followed", "another", "all off")),
        hours=st.sampled_from((0.3, 3, 26)),
    )
    @precondition(lambda self: self.stage.alive())
    def change_hosts(self, index: int, how: str, hours: float) -> None:
        """A host is killed, ends, is followed while it goes on, or gets company; or all are off for hours."""
        alive = self.stage.alive()
        host = alive[index % len(alive)]

        async def change() -> None:
            await host.ready.wait()
            if how == "killed":
                await host.kill()
            elif how == "ended":
                disturb(host, FOR_EVER_S)
                with suppress(Died):  # a fault that was aimed at it may end it while it ends
                    await host.stop()
            elif how == "followed":
                await self.stage.start(host.replica).ready.wait()
            elif how == "all off":
                for other in alive:
                    await other.kill()
                await anyio.sleep(hours * 3600)
                await self.stage.start("a").ready.wait()
            else:
                await self.stage.current("b").ready.wait()

        self.do(change, off_s=hours * 3600)

    @rule(
        what=st.sampled_from(("restarts", "cuts", "cuts", "fills", "fills", "empties", "empties")),
        slots=st.integers(0, 2),
    )
    def change_provider(self, what: str, slots: int) -> None:
        """The provider restarts and forgets, cuts its streams, or has few places or many."""

        async def change() -> None:
            hermes = self.stage.hermes
            if what == "restarts":
                self.stage.remember_runs()
                hermes.restart()
            elif what == "cuts":
                hermes.cut_streams()
            else:
                hermes.slots = slots if what == "fills" else None

        self.do(change)

    @rule(seconds=st.sampled_from((0.01, 0.05, 0.3, 1, 2, 5, 15, 35, 65, 120)))
    def advance(self, seconds: float) -> None:
        self.do(anyio.sleep, seconds)

    # ---- promises ----------------------------------------------------------------------------------------------------

    @invariant()
    def promises_hold(self) -> None:
        if self.guest is None or self.failed:
            return
        self.do(self.audit.catch_up)
        self.audit.check_changed()
        self._no_broken_promise()

    def _no_broken_promise(self) -> None:
        self.failed = bool(self.audit.broken)
        assert not self.audit.broken, "\n".join(self.audit.broken)

    def teardown(self) -> None:
        if self.guest is None:
            return
        try:
            if not self.failed:
                self.do(self._calm)
                self.do(self.audit.catch_up)
                self.audit.check_changed()
                self.audit.check_final()
                self._no_broken_promise()
        finally:
            self.do(self._end)
            self.guest.close()

    async def _calm(self) -> None:
        """Nothing goes wrong any more: what can become known does."""
        hermes = self.stage.hermes
        hermes.faults.clear()
        hermes.slots = None
        for host in self.stage.alive():
            trace: Any = host.process.trace
            trace.kind = ""
        await anyio.sleep(130)  # whoever is frozen goes on, whoever is superseded notices
        if all(host.lease.superseded for host in self.stage.alive()):
            await self.stage.start("a").ready.wait()
        await anyio.sleep(330)

    async def _end(self) -> None:
        for host in self.stage.hosts:
            host.process.thaw()
            if not host.process.dead:
                await host.kill()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What hosts log about their misfortunes is of no interest here, and there is much of it."""
    caplog.set_level(logging.CRITICAL)


def explore(machine: type[Machine], **more: Any) -> None:
    """Let the machine look as long as the profile says."""
    nightly = settings.get_current_profile_name() == "nightly"
    run_state_machine_as_test(machine, settings=settings(settings.get_profile("nightly" if nightly else "ci"), **more))


@pytest.mark.slow
@pytest.mark.timeout(36_000)
@pytest.mark.proves("A002", "A112", "A131", "A133", "A136", "A138", "A140", "A142")
def test_whatever_happens_in_whatever_order_the_promises_hold() -> None:
    explore(Machine)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("vary", "promise"),
    [
        (variants.resend_on_read_error, "S1 one send"),
        (variants.doubt_at_the_provider_is_failure, "S3 unknown stays unknown"),
        (variants.doubt_at_the_store_is_failure, "P1 unknown is rare and true"),
        (variants.late_receipt_is_dropped, "S5 late evidence is kept"),
    ],
    ids=("resend", "send_in_doubt", "append_in_doubt", "late_receipt"),
)
def test_a_planted_bug_is_found_and_its_promise_is_named(vary: Callable[[Any], None], promise: str) -> None:
    bent = type("Bent", (Machine,), {"vary": staticmethod(vary)})
    with pytest.raises(AssertionError, match=promise):
        explore(bent, phases=[Phase.generate], report_multiple_bugs=False)
