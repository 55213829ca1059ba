"""Driving Actions: load, decide, perform, record. Knows only ports.

Each Action that this host owns has one task, which asks ``next_step`` and does what it says: wait, append, read, or
hand a claim to the sender. First try, retry and recovery after a crash take this same path.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import anyio
import msgspec
from anyio.abc import TaskGroup

from adapters.notices import Bell, Notices
from adapters.observer import Observer
from adapters.sender import Sender
from domain import action as actions
from domain import requests
from domain.action import Action
from domain.errors import HostError, IntegrityFault
from domain.events import ActionSettled, AttemptClosed, AttemptUnknown, Event, EvidenceFound, OwnerChanged
from domain.history import Change, Command, action_history, run_history, run_token, stream_history
from domain.ports import AppendUnknown, Clock, Conflict, Fenced, Lease, NeverStored, NotStored, Provider, Store
from domain.provider import read_status
from domain.reconciler import Claim, Facts, Finished, Hold, ReadStatus, Record, WaitUntil, answers_run, next_step
from domain.values import Effect, Operation, Plain, PrivateScope, rfc3339

log = logging.getLogger(__name__)

STORE_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
LOOK_AGAIN_S = 30.0
NO_LEASE_PAUSE_S = 1.0

# Refusals of a claim that only say that the facts moved on; what follows from that is the next step's to say.
NEXT_STEP_SAYS = frozenset(
    {"action.expired", "action.already_settled", "policy.approval_expired", "policy.human_approval_required"}
)


class DriverLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many provider calls of Actions this host performs at once, and each endpoint's approval time-out."""

    max_in_flight: int = 32
    approval_timeout_ms: Mapping[str, int] = {}


class Driver:
    """Performs the steps of every Action that this host owns."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        lease: Lease,
        endpoints: Mapping[str, Provider],
        notices: Notices,
        observer: Observer,
        sender: Sender,
        limits: DriverLimits | None = None,
    ) -> None:
        self._store, self._clock, self._lease = store, clock, lease
        self._endpoints, self._notices = endpoints, notices
        self._observer, self._sender = observer, sender
        self._limits = limits or DriverLimits()
        self._slots = anyio.Semaphore(self._limits.max_in_flight)
        self._driven: set[str] = set()
        self._tasks: TaskGroup | None = None

    @property
    def in_flight(self) -> int:
        """How many Actions this process executes at the provider now."""
        return self._limits.max_in_flight - self._slots.value

    @property
    def full(self) -> bool:
        """True if every place is taken."""
        return self._slots.value == 0

    def attach(self, tasks: TaskGroup) -> None:
        """Use this task group for all Actions."""
        self._tasks = tasks

    def take(self, tenant: str, action_id: str, known: Action | None = None) -> None:
        """Drive an Action from now on, unless this process does so already. ``known`` saves the first load."""
        history = action_history(tenant, action_id)
        if self._tasks is None or history in self._driven:
            return
        self._driven.add(history)
        self._tasks.start_soon(self._drive, history, known)

    async def adopt(self, tenant: str, action_id: str) -> bool:
        """Become this Action's owner if nobody else did; True if it is ours now."""
        history = action_history(tenant, action_id)
        mine = self._lease.fence
        first: object = None
        while True:
            action = actions.replay(await self._store.load(history))
            first = action.owner if first is None else first
            if action.owner in (None, mine) or action.owner != first or action.settled is not None:
                return action.owner == mine
            event = OwnerChanged(at=self._clock.now(), owner=mine, previous=action.owner)
            change = Change(history=history, expected=action.version, events=(event,))
            try:
                await self._store.append(Command(changes=(change,), fence=mine, cause="adoption"))
            except (Conflict, AppendUnknown):
                await self._clock.sleep(STORE_PAUSE_S)

    # ---- the turns of one Action -------------------------------------------------------------------------------------

    async def _drive(self, history: str, known: Action | None) -> None:
        try:
            action = known or await self._load(history)
            with self._notices.watch(*_histories(history, action)) as bell:
                turned: Action | None = action
                while turned is not None:
                    turned = await self._turn_or_pause(history, turned, bell)
        except IntegrityFault as fault:
            log.error("action.stopped", extra={"code": fault.code, "action": history})
        except Fenced:
            log.warning("action.fenced", extra={"action": history})
        except Exception:  # this Action alone stands still until the next round of takeover takes it up again
            log.exception("action.failed", extra={"action": history})
        finally:
            self._driven.discard(history)

    async def _load(self, history: str) -> Action:
        pause = STORE_PAUSE_S
        while True:
            try:
                return actions.replay(await self._store.load(history))
            except IntegrityFault:
                raise
            except HostError:
                await self._clock.sleep(pause)
                pause = min(LONGEST_PAUSE_S, pause * 2)

    async def _facts(self, action: Action) -> Facts:
        request = action.request
        run = seen = None
        if request.run_id:
            follows = request.operation is Operation.RUN_EVENTS
            run, seen = await self._observer.view(
                request.tenant, request.endpoint_id, request.run_id, fresh=not follows
            )
        return Facts(
            action=action,
            owner=self._lease.fence,
            in_flight=frozenset(self._sender.in_flight),
            unsent=frozenset(self._sender.unsent),
            admitted=request.endpoint_id in self._endpoints,
            run=run if run and run.bound else None,
            stream=seen,
            approval_timeout_ms=self._limits.approval_timeout_ms.get(request.endpoint_id, 60_000),
        )

    async def _turn_or_pause(self, history: str, action: Action, bell: Bell) -> Action | None:
        """One turn; while the store is away or somebody else was faster, a pause and the Action as it is then."""
        try:
            return await self._turn(history, action, bell)
        except (IntegrityFault, NeverStored):
            raise
        except (HostError, Conflict, NotStored, AppendUnknown):
            await self._clock.sleep(STORE_PAUSE_S)
            return await self._load(history)

    async def _turn(self, history: str, action: Action, bell: Bell) -> Action | None:
        """One turn: the Action after it, or ``None`` when nothing is left to be done here."""
        facts = await self._facts(action)
        now = self._clock.now()
        step = next_step(facts, at=now)
        match step:
            case Finished():
                return None
            case Record():
                return await self._store_events(history, facts, step.events)
            case Claim():
                return await self._send(history, facts)
            case ReadStatus():
                return await self._read_status(history, facts)
            case WaitUntil():
                return await self._wait(history, bell, (step.at - now).total_seconds())
            case Hold(why="outcome_unknown") if action.request.run_id:
                return await self._wait(history, bell, LOOK_AGAIN_S)
            case Hold():
                return None

    async def _wait(self, history: str, bell: Bell, seconds: float) -> Action:
        """Wait for a time or for news, then look: a ring since the last look is not lost, and no ring is needed."""
        await bell.wait(min(LOOK_AGAIN_S, seconds))
        bell.clear()
        return await self._load(history)

    async def _store_events(self, history: str, facts: Facts, events: tuple[Event, ...]) -> Action:
        """Append decided events, with what they mean for the run; the Action as it stands afterwards."""
        action = facts.action
        changes = [Change(history=history, expected=action.version, events=events, scope=_scope(action))]
        if facts.run is not None and any(isinstance(event, _RESULTS) for event in events):
            after = action
            for offset, event in enumerate(events, 1):
                after = actions.evolve(after, event, action.version + offset)
            answer = answers_run(after, at=self._clock.now())
            run = _histories(history, action)[1]
            changes.append(Change(history=run, expected=facts.run.version, events=answer))
        stored = await self._store.append(Command(changes=tuple(changes), fence=self._lease.fence, cause="next_step"))
        self._notices.tell(*stored)
        for recorded in stored:
            if recorded.history == history:
                action = actions.evolve(action, recorded.event, recorded.version)
            if isinstance(recorded.event, AttemptClosed):
                self._sender.unsent.discard(recorded.event.attempt_id)
        return action

    async def _send(self, history: str, facts: Facts) -> Action:
        if not self._lease.valid():
            await self._clock.sleep(NO_LEASE_PAUSE_S)
            return await self._load(history)
        async with self._slots:
            try:
                return await self._sender.claim_and_send(history, facts)
            except HostError as error:
                if isinstance(error, IntegrityFault) or error.retryable or error.code in NEXT_STEP_SAYS:
                    raise
                settled = actions.settle_without_effect(
                    "failed", error.code, at=self._clock.now(), message=error.message
                )
                return await self._store_events(history, facts, (settled,))

    async def _read_status(self, history: str, facts: Facts) -> Action:
        """The one read of a ``run_status`` Action: stored if it says something new, then the Action's answer."""
        request = facts.action.request
        provider = self._endpoints.get(request.endpoint_id)
        if provider is None or facts.run is None:
            code = "action.not_found" if facts.run is None else "capability.unsupported"
            settled = actions.settle_without_effect("failed", code, at=self._clock.now())
            return await self._store_events(history, facts, (settled,))
        async with self._slots:
            trusted = self._sender.trusted(facts.action)
            exchange = await provider.read(requests.status_request(request.run_id, trusted))
        await self._observer.record_status(request.tenant, request.endpoint_id, request.run_id, exchange)
        reading, now = read_status(exchange, request.run_id), self._clock.now()
        if reading.problem:
            seen = facts.run.seen
            settled = actions.settle_without_effect(
                "failed",
                reading.problem,
                at=now,
                details={
                    "remote_status": reading.http_status,
                    "cause": reading.cause,
                    "run_id": request.run_id,
                    "last_observation": f"{seen.state} at {rfc3339(seen.at)}" if seen else None,
                },
            )
        else:
            settled = ActionSettled(
                at=now,
                status="completed",
                effect=Effect.NONE,
                output=Plain(content=exchange.body),
                details={"run_id": request.run_id, "status": reading.state, "read_at": rfc3339(now)},
            )
        return await self._store_events(history, facts, (settled,))


_RESULTS = (AttemptClosed, AttemptUnknown, EvidenceFound)


def _scope(action: Action) -> PrivateScope:
    return PrivateScope(tenant=action.request.tenant, principal=action.request.principal)


def _histories(history: str, action: Action) -> tuple[str, ...]:
    """The Action's own history, and those of the run that it is about."""
    request = action.request
    if not request.run_id:
        return (history,)
    token = run_token(request.run_id)
    return (
        history,
        run_history(request.tenant, request.endpoint_id, token),
        stream_history(request.tenant, request.endpoint_id, token),
    )
