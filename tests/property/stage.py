"""A world whose every request, event and answer is witnessed, played step by step from outside of its event loop.

The guest loop lends trio to a synchronous test: nothing runs, and no virtual time passes, between two steps.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import msgspec
import trio
from anyio.abc import TaskGroup
from outcome import Outcome, Value, acapture
from trio.testing import MockClock

from adapters.views import decode_row
from domain import action as actions
from domain import binding, stream
from domain.action import Action, State
from domain.approval import TenantPolicy
from domain.attempt import AttemptState
from domain.binding import Run
from domain.events import (
    ActionAccepted,
    ActionSettled,
    AttemptAccepted,
    AttemptClaimed,
    AttemptClosed,
    AttemptUnknown,
    EvidenceFound,
    FramesStored,
    RunEnded,
    SequenceTaken,
)
from domain.history import Recorded
from domain.provider import TERMINAL_EVENTS, Exchange, Outgoing
from domain.stream import RunStream
from domain.values import MUTATIONS, Fence
from projections import Projection, folded
from projections.actions import ACTIONS
from projections.runs import RUNS
from tests.property.reference import Asked, Reference, Sending, reading
from tests.world.hermes import SimRun, _route
from tests.world.host import ENDPOINT, Host, World
from tests.world.process import BEGAN, Fault, SimLink

T = TypeVar("T")
Vary = Callable[[Host], None]
OPERATIONS = {"start": "run_start", "approval": "run_approval", "stop": "run_stop"}


class Guest:
    """An event loop on virtual time that runs only while a step is performed."""

    def __init__(self, inside: Callable[[TaskGroup], Any]) -> None:
        self._callbacks: deque[Callable[[], object]] = deque()
        self._orders: deque[tuple[Callable[[], Awaitable[Any]], list[Outcome[Any]]] | None] = deque()
        self._over: list[Outcome[None]] = []
        trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
        trio._core._run._r.seed(0)
        trio.lowlevel.start_guest_run(
            self._main,
            inside,
            run_sync_soon_threadsafe=self._callbacks.append,
            done_callback=self._over.append,
            host_uses_signal_set_wakeup_fd=True,
            clock=MockClock(autojump_threshold=0),
        )

    async def _main(self, inside: Callable[[TaskGroup], Any]) -> None:
        async with anyio.create_task_group() as tasks:
            inside(tasks)
            while True:
                while not self._orders:
                    await trio.lowlevel.checkpoint()
                order = self._orders.popleft()
                if order is None:
                    break
                order[1].append(await acapture(order[0]))
            tasks.cancel_scope.cancel()

    def do(self, step: Callable[[], Awaitable[T]]) -> T:
        """Perform one step; everything else in the world goes on while it takes virtual time."""
        answer: list[Outcome[Any]] = []
        self._orders.append((step, answer))
        while not answer and not self._over:
            self._callbacks.popleft()()
        if self._over:
            self._over[0].unwrap()
        found: T = answer[0].unwrap()
        return found

    def close(self) -> None:
        """End it."""
        self._orders.append(None)
        while not self._over:
            self._callbacks.popleft()()
        if not isinstance(self._over[0], Value):
            self._over[0].unwrap()


class Aim:
    """The trace of one process: it lets a fault happen at the ``number``-th call of a port from now on."""

    def __init__(self, host: Host) -> None:
        self._host, self._passed = host, 0
        self.kind, self.point, self.left, self.seconds = "", "", 0, 0.0

    def append(self, point: str) -> None:
        """One more call."""
        self._passed += 1
        if self.kind and point.startswith(self.point):
            self.left -= 1
            if self.left <= 0:
                self._host.process.fault = Fault(self.kind, self._passed, self.seconds)
                if self.kind in ("pause", "cancel", "kill_before", "kill_after"):
                    disturb(self._host, self.seconds)
                self.kind = ""

    def __len__(self) -> int:
        return self._passed


def disturb(host: Host, seconds: float) -> None:
    """Note that this process may lose its claims until a lease time after it goes on."""
    until = anyio.current_time() + seconds + 60
    host.disturbed_until = max(getattr(host, "disturbed_until", 0.0), until)  # type: ignore[attr-defined]


class WitnessLink(SimLink):
    """The way of one process to the provider, with somebody who looks at every request and answer."""

    def __init__(self, host: Host, stage: Stage) -> None:
        super().__init__(host.process, stage.hermes, stage.target)
        self._host, self._stage = host, stage

    async def send(self, out: Outgoing) -> Exchange:
        """One mutation, seen before it leaves and when its end arrives."""
        audit = self._stage.audit
        await audit.catch_up()
        sending = audit.about_to_send(self._host, out)
        exchange = await super().send(out)
        if sending is not None:
            operation, run_id = _route(out)
            sending.reading = reading(
                OPERATIONS[operation], run_id, exchange.sent, exchange.status, exchange.complete, exchange.body
            )
        return exchange


class Stage(World):
    """A world with witnesses; ``vary`` bends each new host."""

    def __init__(self, tasks: TaskGroup, vary: Vary | None, *, replay: bool, direct: tuple[str, ...]) -> None:
        super().__init__(tasks, replay=replay, policy=TenantPolicy(id="acme", direct=direct))
        self._vary, self.tasks = vary, tasks
        self.audit = Audit(self)
        self.sims: dict[str, SimRun] = {}

    def start(self, replica: str = "a", fault: Fault | None = None) -> Host:
        """A new process, with its witnesses in place before it runs."""
        host = super().start(replica, fault)
        host.process.counting, host.process.trace = True, Aim(host)  # type: ignore[assignment]
        links: dict[str, Any] = host.intake._endpoints  # type: ignore[assignment]
        links[ENDPOINT] = WitnessLink(host, self)
        if self._vary is not None:
            self._vary(host)
        return host

    def alive(self) -> list[Host]:
        """The processes that run."""
        return [host for host in self.hosts if not host.process.dead]

    def remember_runs(self) -> dict[str, SimRun]:
        """Every run that ever was at the provider, also those that it forgot."""
        self.sims |= self.hermes.runs
        return self.sims


class Audit:
    """Folds the log event by event and holds each one against the promises; ``broken`` names what did not hold."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._lock, self._position = stage, anyio.Lock(), 0
        self.reference = Reference()
        self.broken: list[str] = []
        self.actions: dict[str, Action] = {}
        self.runs: dict[str, Run] = {}
        self.streams: dict[str, RunStream] = {}
        self.log: dict[str, list[Recorded]] = {}
        self.senders: dict[str, tuple[Host, Sending, str]] = {}
        self.lost: set[str] = set()
        self.commands: dict[tuple[str, str], set[str]] = {}
        self.hosts: dict[Fence, Host] = {}
        self.changed: set[str] = set()
        self._rows: dict[str, dict[str, bytes]] = {ACTIONS.name: {}, RUNS.name: {}}

    def expect(self, met: bool, promise: str, what: object = "") -> None:
        """Keep a promise that did not hold."""
        if not met:
            self.broken.append(f"{promise}: {what}")

    async def catch_up(self) -> None:
        """See what was stored since the last look."""
        async with self._lock:
            batch = []
            for event in await self._stage.log.read_log(self._position, 1_000_000):
                self._position = event.position
                if not isinstance(event, Recorded):
                    self.expect(False, "readable", event)
                    continue
                self._see(event)
                batch.append(event)
                if isinstance(event.event, FramesStored):
                    await self._see_asks(event.history, event.event)
            self._project(ACTIONS, batch)
            self._project(RUNS, batch)

    def _see(self, recorded: Recorded) -> None:
        event, history = recorded.event, recorded.history
        kind = history.split("/")[1]
        found = self.log.setdefault(history, [])
        found.append(recorded)
        self.expect(recorded.version == len(found), "histories are whole", history)
        if kind == "act":
            before = self.actions.get(history, Action())
            after = self.actions[history] = actions.evolve(before, event, recorded.version)
            self.changed.add(history)
            self._see_action(before, after, recorded)
        elif kind == "run":
            self.runs[history] = binding.evolve(self.runs.get(history, Run()), event, recorded.version)
            if isinstance(event, RunEnded):
                run = self._stage.remember_runs().get(self.runs[history].tie.run_id)
                self.expect(run is not None and run.state == event.state, "S6 ends need proof", event)
        elif kind == "str":
            known = self.streams.get(history, RunStream())
            now = self.streams[history] = stream.evolve(known, event, recorded.version)
            self.expect(len(now.gaps) >= len(known.gaps), "S14 no gap vanishes", history)
        elif isinstance(event, SequenceTaken):
            host = next(host for host in self._stage.hosts if host.lease._instance == event.instance)
            self.hosts[Fence(host.replica, recorded.version)] = host

    async def _see_asks(self, history: str, event: FramesStored) -> None:
        """Which command each reviewable request is about, from the stored frame itself."""
        run_id = self.runs[history.replace("/str/", "/run/")].tie.run_id
        texts = json.loads(await self._stage.vault.open(event.frames)) if event.asks else []
        for ask in event.asks:
            body = json.loads(texts[ask.seq - event.first][1].partition("data: ")[2])
            self.commands.setdefault((run_id, body["command"]), set()).add(ask.digest)

    def _see_action(self, before: Action, after: Action, recorded: Recorded) -> None:
        event, name = recorded.event, recorded.history
        if before.state is State.SETTLED:
            kept = (after.state, after.settled, after.effect) == (before.state, before.settled, before.effect)
            self.expect(kept and not isinstance(event, ActionSettled), "S13 settled is final", name)
        if isinstance(event, ActionAccepted):
            return
        match event:
            case AttemptClaimed():
                doubtful = any(attempt.state is not AttemptState.CLOSED for attempt in before.attempts)
                self.expect(not doubtful, "S3 unknown stays unknown", f"{name} claims again")
            case AttemptUnknown():
                self._see_unknown(after, event)
        if before.state is State.UNKNOWN and after.state is not State.UNKNOWN:
            self._see_refined(after, event)

    def _see_unknown(self, action: Action, event: AttemptUnknown) -> None:
        """P1: an outcome is unknown only after an ambiguous send, or after its sender was lost."""
        claim = next(item.claim for item in action.attempts if item.claim.attempt_id == event.attempt_id)
        host = self.hosts[claim.owner]
        superseded = any(
            fence.replica == claim.owner.replica and fence.sequence > claim.owner.sequence and other is not host
            for fence, other in self.hosts.items()
        )
        lost = (
            superseded
            or host.process.dead
            or getattr(host, "disturbed_until", 0.0) > (event.at - BEGAN).total_seconds()
        )
        witnessed = self.senders.get(event.attempt_id)
        ambiguous = witnessed is not None and witnessed[1].reading == "doubt"
        self.expect(ambiguous or lost, "P1 unknown is rare and true", f"{event.cause} of {claim.operation}")
        if not ambiguous:
            self.lost.add(event.attempt_id)

    def _see_refined(self, action: Action, event: Any) -> None:
        """S3: only an answer that really came, or an effect that really is there, moves an unknown outcome."""
        if isinstance(event, AttemptAccepted | AttemptClosed):
            witnessed = self.senders.get(event.attempt_id)
            wanted = ("receipt",) if isinstance(event, AttemptAccepted) else ("refused", "not_sent")
            self.expect(
                (witnessed is not None and witnessed[1].reading in wanted)
                or getattr(event, "cause", "") == "lease_ran_out",
                "S3 unknown stays unknown",
                event,
            )
        elif isinstance(event, EvidenceFound):
            self.expect(self._applied(action), "S3 evidence is true", f"{event.source} for {action.request.operation}")
        else:
            self.expect(False, "S3 unknown stays unknown", event)

    def _applied(self, action: Action) -> bool:
        """Whether the provider's own ledger holds an effect of this Action."""
        began = (action.request.at - BEGAN).total_seconds()
        return any(
            entry.applied
            and OPERATIONS[entry.operation] == action.request.operation.value
            and entry.key == action.request.key
            and entry.at >= began
            for entry in self._stage.hermes.ledger
        )

    # ---- requests ----------------------------------------------------------------------------------------------------

    def about_to_send(self, host: Host, out: Outgoing) -> Sending | None:
        """S1 and S2: a stored claim of this very process stands behind the request, and nothing was sent for it."""
        operation = OPERATIONS[_route(out)[0]]
        key = dict(out.headers).get("Idempotency-Key", "")
        claimed = [
            action
            for action in self.actions.values()
            if action.state is State.CLAIMED
            and (action.request.operation.value, action.request.key) == (operation, key)
        ]
        attempt = claimed[-1].attempt if claimed else None
        if attempt is None:
            late = [item for item in self.actions.values() if item.request.key == key and item.state is State.UNKNOWN]
            self.expect(bool(late), "S2 claim first", f"{operation} {key}")
            attempt = late[-1].attempt if late else None
        if attempt is None:
            return None
        self.expect(self.hosts[attempt.claim.owner] is host, "S1 one send", "another process sends")
        self.expect(attempt.claim.attempt_id not in self.senders, "S1 one send", f"{operation} {key} is sent again")
        action = claimed[-1] if claimed else late[-1]
        unproven = [item for item in self._sendings(action) if item.reading not in ("refused", "not_sent")]
        self.expect(not unproven, "S1 one send", f"{operation} {key} may have acted before")
        sending = Sending(attempt.claim.attempt_id)
        self.senders.setdefault(attempt.claim.attempt_id, (host, sending, operation))
        return sending

    def _sendings(self, action: Action) -> list[Sending]:
        names = [attempt.claim.attempt_id for attempt in action.attempts]
        return [self.senders[name][1] for name in names if name in self.senders]

    def learn(self, action: Action) -> Asked | None:
        """Tell the reference what really became of an Action: requests, their ends, effects, decisions, wishes."""
        asked = self.reference.asked.get(action.request.action_id)
        if asked is None:
            return None
        asked.sendings = self._sendings(action)
        for sending in asked.sendings:
            sending.lost_sender = sending.attempt_id in self.lost
        claims = {attempt.claim.attempt_id for attempt in action.attempts}
        asked.lost_claim = bool((claims & self.lost) - set(self.senders))
        asked.applied = action.request.operation in MUTATIONS and self._applied(action)
        asked.over = action.state is State.SETTLED
        decided = action.approval.decided if action.approval else None
        if decided is not None and not decided.by_policy:
            asked.decision = "granted" if decided.granted else "denied"
        asked.cancel = "wished" if action.cancel else ""
        return asked

    # ---- views -------------------------------------------------------------------------------------------------------

    def _project(self, projection: Projection[Any], batch: list[Recorded]) -> None:
        """Rows as the stored views keep them: read, folded over a batch, written."""
        rows: dict[str, Any] = {}
        docs = self._rows[projection.name]
        for recorded in batch:
            key = projection.key(recorded)
            if recorded.event.topic in projection.topics and key is not None:
                known = rows.get(key) or (decode_row(projection, docs[key]) if key in docs else None)
                rows[key] = projection.fold(known, recorded)
        docs.update({key: msgspec.json.encode(row) for key, row in rows.items()})

    def compare_views(self) -> None:
        """Every stored row equals a fresh fold of the whole log."""
        log = sorted((event for found in self.log.values() for event in found), key=lambda event: event.position)
        views: tuple[Projection[Any], ...] = (ACTIONS, RUNS)
        for projection in views:
            of_row: dict[str, list[Recorded]] = {}
            for event in log:
                key = projection.key(event)
                if key is not None and event.event.topic in projection.topics:
                    of_row.setdefault(key, []).append(event)
            docs = self._rows[projection.name]
            self.expect(set(docs) == set(of_row), "views equal a fresh fold", projection.name)
            for key, events in of_row.items():
                same = decode_row(projection, docs[key]) == folded(projection, events)
                self.expect(same, "views equal a fresh fold", f"{projection.name} {key}")

    # ---- answers -----------------------------------------------------------------------------------------------------

    def check_told(self, told: Action) -> None:
        """S4: an answer is the fold of a prefix of what is stored."""
        request = told.request
        found = self.log.get(f"{request.tenant}/act/{request.action_id}", [])
        self.expect(actions.replay(found[: told.version]) == told, "S4 stored before told", request.action_id)

    def check_changed(self) -> None:
        """Each Action that changed in this step is told as the reference allows."""
        for history in sorted(self.changed):
            action = self.actions[history]
            asked = self.learn(action)
            if asked is not None:
                told = (actions.told_state(action), action.effect.value)
                self.expect(told in self.reference.allowed(asked), _promise(told), f"told {told} of {asked}")
        self.changed.clear()

    def check_final(self) -> None:
        """Once nothing moves any more: results are stored, receipts kept, gaps named, and the reference agrees."""
        for attempt_id, (host, sending, operation) in self.senders.items():
            action = next(
                item
                for item in self.actions.values()
                if any(attempt.claim.attempt_id == attempt_id for attempt in item.attempts)
            )
            events = [item.event for item in self.log[f"{action.request.tenant}/act/{action.request.action_id}"]]
            about = [event for event in events if getattr(event, "attempt_id", "") == attempt_id]
            self.expect(len(about) > 1, "L1 every claim has a result", f"{operation} {attempt_id}")
            if sending.reading == "receipt" and not host.process.dead:
                kept = any(isinstance(event, AttemptAccepted) for event in about)
                self.expect(kept, "S5 late evidence is kept", f"{operation} {attempt_id}")
        for history, action in self.actions.items():
            asked = self.learn(action)
            if asked is not None:
                told = (actions.told_state(action), action.effect.value)
                self.expect(told in self.reference.final(asked), _promise(told), f"{history} ends as {told} of {asked}")
        self._check_runs()
        self.compare_views()

    def _check_runs(self) -> None:
        released = {(run_id, name) for _, run_id, name in self._stage.hermes.effects if name.startswith("rm ")}
        for run_id, command in released:
            asking = self.commands.get((run_id, command), set())
            reviewed = any(
                set(action.request.reviewed) & asking and action.request.choice != "deny" and action.attempts
                for action in self.actions.values()
            )
            self.expect(reviewed, "S8 approvals are narrow", f"{command} ran unreviewed")
        for history, run in self.runs.items():
            sim = self._stage.remember_runs()[run.tie.run_id]
            seen = self.streams.get(history.replace("/run/", "/str/"), RunStream())
            self.expect(seen.last_seq <= len(sim.frames), "S14 a frame is stored once", history)
            ends = [number for number, body in enumerate(sim.frames, 1) if body["event"] in TERMINAL_EVENTS]
            given = ends[0] if ends else len(sim.frames)  # what an agent says after its run's end is part of no stream
            if seen.last_seq < given:
                named = any(gap.closed_by != "replay" for gap in seen.gaps)
                self.expect(named, "S14 gaps have names", f"{history}: {seen.last_seq} of {given}")
            if run.ended is None and run.tie.run_id in self._stage.hermes.runs:
                self.expect(sim.state not in _ENDS, "an end that can be read is found", history)


_ENDS = ("completed", "failed", "cancelled")


def _promise(told: tuple[str, str]) -> str:
    """Which promise a wrong word breaks."""
    if told[0] == "unknown":
        return "P1 unknown is rare and true"
    return "S3 unknown stays unknown" if told[1] == "none" else "S6 ends need proof"


__all__ = ["ENDPOINT", "Asked", "Audit", "Guest", "Stage", "disturb"]
