"""Callers, crashes, lost answers, takeovers and time in any order, against the reference model and the promises."""

from __future__ import annotations

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
from tests.world.host import ADA, BO
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
KINDS = ("kill_before", "kill_after", "lost", "lost", "away", "cancel", "pause", "pause")
REPLICAS = st.sampled_from(("a", "a", "b"))
KEYS = st.sampled_from(("k1", "k2", "k3", "k4", "k5"))
INDEX = st.integers(0, 5)
LONGEST_STEP_S = 100_000.0


class Machine(RuleBasedStateMachine):
    """One example: a world, and what its callers and its misfortunes do to it."""

    vary: Callable[[Any], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.guest: Guest | None = None
        self.failed = False

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

    def do(self, step: Callable[..., Awaitable[T]], *args: Any) -> T:
        assert self.guest is not None

        async def bounded() -> T:
            with anyio.fail_after(LONGEST_STEP_S):
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

    @rule(
        actor=st.sampled_from(CALLERS),
        key=KEYS,
        prompt=st.sampled_from(sorted(SCRIPTS)),
        replica=REPLICAS,
        queued=st.booleans(),
    )
    def start(self, actor: Actor, key: str, prompt: str, replica: str, queued: bool) -> None:
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
        number=st.integers(1, 6),
        seconds=st.sampled_from((3, 45, 90)),
    )
    @precondition(lambda self: self.stage.alive())
    def aim(self, index: int, kind: str, point: str, number: int, seconds: float) -> None:
        """A process fails at a port call to come."""
        alive = self.stage.alive()
        trace: Any = alive[index % len(alive)].process.trace
        trace.kind, trace.point, trace.left, trace.seconds = kind, point, number, seconds

    @rule(index=INDEX)
    @precondition(lambda self: self.stage.alive())
    def kill(self, index: int) -> None:
        alive = self.stage.alive()
        self.do(alive[index % len(alive)].kill)

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

    @rule(replica=st.sampled_from(("a", "b", "b")), beside=st.booleans())
    def bring_up(self, replica: str, beside: bool) -> None:
        """Another process of a replica; its older one, if there is one, is killed, or goes on and is fenced."""

        async def up() -> None:
            older = [host for host in self.stage.alive() if host.replica == replica]
            for host in older:
                if not beside:
                    await host.kill()
                else:
                    disturb(host, 1e9)
            await self.stage.start(replica).ready.wait()

        self.do(up)

    @rule(index=INDEX)
    @precondition(lambda self: self.stage.alive())
    def end_cleanly(self, index: int) -> None:
        alive = self.stage.alive()
        host = alive[index % len(alive)]

        async def end() -> None:
            await host.ready.wait()
            disturb(host, 1e9)
            with suppress(Died):  # a fault that was aimed at it may end it while it ends
                await host.stop()

        self.do(end)

    @rule()
    def restart_provider(self) -> None:
        async def restart() -> None:
            self.stage.remember_runs()
            self.stage.hermes.restart()

        self.do(restart)

    @rule()
    def cut_streams(self) -> None:
        async def cut() -> None:
            self.stage.hermes.cut_streams()

        self.do(cut)

    @rule(slots=st.sampled_from((None, None, 0, 1, 2)))
    def limit_provider(self, slots: int | None) -> None:
        self.stage.hermes.slots = slots

    @rule(seconds=st.sampled_from((0.01, 0.05, 0.3, 1, 2, 5, 15, 35, 65, 120)))
    def advance(self, seconds: float) -> None:
        self.do(anyio.sleep, seconds)

    @rule(hours=st.sampled_from((0.3, 1, 3, 26)))
    def power_cut(self, hours: float) -> None:
        """Every host is off for hours."""

        async def off() -> None:
            for host in self.stage.alive():
                await host.kill()
            await anyio.sleep(hours * 3600)
            await self.stage.start("a").ready.wait()

        self.do(off)

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
        if not self.stage.alive():
            self.stage.start("a")
        await anyio.sleep(460)
        if not self.stage.alive():
            await self.stage.start("a").ready.wait()
            await anyio.sleep(120)

    async def _end(self) -> None:
        for host in self.stage.hosts:
            host.process.thaw()
            if not host.process.dead:
                await host.kill()


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
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found_and_its_promise_is_named(vary: Callable[[Any], None], promise: str) -> None:
    bent = type("Bent", (Machine,), {"vary": staticmethod(vary)})
    with pytest.raises(AssertionError, match=promise):
        explore(bent, phases=[Phase.generate], report_multiple_bugs=False)
