"""The one place that sends: commit the claim, send once, store what came back.

From claim to stored result the work is shielded from cancellation and bounded by the request's own deadline. What came
back is kept in hand until it is stored, however long the store is away; a process that dies before leaves a claim
without a result, which is *outcome unknown* for whoever looks next.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime

import anyio
import msgspec

from adapters.notices import Notices
from adapters.observer import ISSUER
from domain import action as actions
from domain import attempt as attempts
from domain import binding, requests
from domain.action import Action
from domain.approval import TenantPolicy
from domain.binding import Run
from domain.errors import PREFIX, HostError, IntegrityFault
from domain.events import (
    AttemptAccepted,
    AttemptClaimed,
    AttemptClosed,
    AttemptUnknown,
    ChoiceAnswered,
    ChoiceClaimed,
    Event,
    HandleTaken,
    RunBound,
    StopClaimed,
)
from domain.history import Change, Command, Recorded, handle_history, run_history, run_token
from domain.ports import (
    AppendUnknown,
    Clock,
    Conflict,
    Fenced,
    Lease,
    NeverStored,
    NotStored,
    Provider,
    Store,
    TooLate,
    Vault,
)
from domain.provider import Exchange, Judgement, Outgoing, Verdict, judge
from domain.reconciler import Facts, Record, answers_run, next_step
from domain.requests import Trusted
from domain.values import Operation, PrivateScope

log = logging.getLogger(__name__)

STORE_PAUSE_S = 0.25
LAST_STORE_S = 10.0
LONGEST_PAUSE_S = 5.0


class Sender:
    """Claims and sends mutations of Actions. ``bound`` is told of each run that a start created."""

    def __init__(
        self,
        store: Store,
        vault: Vault,
        clock: Clock,
        lease: Lease,
        endpoints: Mapping[str, Provider],
        notices: Notices,
        bound: Callable[[str, str, str], None],
        policy_of: Callable[[str], TenantPolicy],
    ) -> None:
        self._store, self._vault, self._clock, self._lease = store, vault, clock, lease
        self._endpoints, self._notices, self._bound = endpoints, notices, bound
        self._policy_of = policy_of
        self._until = float("inf")
        self.in_flight: set[str] = set()
        self.unsent: set[str] = set()

    def end(self) -> None:
        """The host ends: what is not stored soon stays a claim without a result, for whoever takes it up."""
        self._until = self._clock.monotonic() + LAST_STORE_S

    async def _pause(self, seconds: float) -> None:
        """Wait for the store to come back. Raises NotStored once the host does not wait any longer."""
        if self._clock.monotonic() >= self._until:
            raise NotStored("The host ended before the store came back.")
        await self._clock.sleep(seconds)

    async def claim_and_send(self, history: str, facts: Facts) -> Action:
        """Commit a claim, send once and store the result; the Action afterwards.

        Raises HostError, before any claim, for a request that cannot be formed or must not be sent; Conflict or
        NotStored if the claim was not committed.
        """
        action = facts.action
        provider = self._endpoints[action.request.endpoint_id]
        out = await self._outgoing(facts)
        claim = actions.claim(
            action,
            self._lease.fence,
            provider.target,
            attempt_id=self._clock.new_id("att_"),
            lease_valid=self._lease.valid(),
            policy_hash=self._policy_of(action.request.tenant).hash,
            at=self._clock.now(),
        )
        self.in_flight.add(claim.attempt_id)
        try:
            with anyio.CancelScope(shield=True):
                claimed = await self._commit_claim(history, facts, claim)
                exchange = await provider.send(out) if self._lease.valid() else None
                kept = await self._keep(history, claimed, claim, exchange)
        finally:
            self.in_flight.discard(claim.attempt_id)
        return kept

    async def _commit_claim(self, history: str, facts: Facts, claim: AttemptClaimed) -> Action:
        action = facts.action
        changes = [Change(history=history, expected=action.version, events=(claim,))]
        if facts.run is not None:
            changes.append(
                Change(history=_run_history(action), expected=facts.run.version, events=(_mark(facts, claim),))
            )
        not_after = action.approval.usable_until if action.approval else None
        try:
            stored = await self._store.append(
                Command(changes=tuple(changes), fence=self._lease.fence, not_after=not_after, cause="claim")
            )
        except AppendUnknown as error:
            self.unsent.add(claim.attempt_id)
            raise NotStored("Whether the claim is stored is not known; nothing was sent.") from error
        except TooLate as error:
            raise Conflict("The approval ran out.") from error
        self._notices.tell(*stored)
        log.info("attempt.claimed", extra={"action": history, "attempt": claim.attempt_id})
        return actions.evolve(action, stored[0].event, stored[0].version)

    # ---- what is sent ------------------------------------------------------------------------------------------------

    async def _outgoing(self, facts: Facts) -> Outgoing:
        request = facts.action.request
        session_key = (await self._vault.open(request.session_key)).decode() if request.session_key else None
        trusted = self.trusted(facts.action)
        match request.operation:
            case Operation.RUN_START:
                given = json.loads(await self._vault.open(request.input))
                start = requests.check_start_input(given, default_session_id=request.sent_session)
                if self._vault.digest(start.content) != request.request_digest:
                    raise HostError("action.input_schema_invalid", "The accepted input forms another request now.")
                return requests.start_request(
                    start.content, session_key=session_key, trusted=trusted, session_header=start.session_header
                )
            case Operation.RUN_STOP:
                return requests.stop_request(request.run_id, trusted, session_key=session_key)
            case Operation.RUN_APPROVAL:
                return requests.approval_request(
                    request.run_id,
                    request.choice,
                    request.resolve_all,
                    _request_id(facts),
                    trusted,
                    session_key=session_key,
                )
            case _:
                raise HostError(PREFIX + "configuration_or_input")

    def trusted(self, action: Action) -> Trusted:
        """The facts of the trusted headers (AIP 11.5): verified when the Action was accepted, never from its input."""
        request = action.request
        return Trusted(
            principal=request.principal,
            tenant=request.tenant,
            issuer=ISSUER,
            trace_id=request.trace_id,
            correlation_id=request.correlation_id,
            session_id=request.aip_session,
            idempotency_key=request.key,
            deadline_unix_ms=int(action.deadline.timestamp() * 1000),
        )

    # ---- what came back ----------------------------------------------------------------------------------------------

    async def _keep(self, history: str, action: Action, claim: AttemptClaimed, exchange: Exchange | None) -> Action:
        """Store what came back for a claim, however long that takes; settle in the same commit where we may."""
        judgement = (
            judge(claim.operation, exchange, claim.run_id)
            if exchange is not None
            else Judgement(verdict=Verdict.NOT_SENT, code=PREFIX + "not_sent", cause="lease_ran_out")
        )
        exchange = exchange or Exchange(sent=False)
        digest, at = self._vault.digest(exchange.body), self._clock.now()
        fenced, pause = False, STORE_PAUSE_S
        while True:
            try:
                attempt = next(item for item in action.attempts if item.claim.attempt_id == claim.attempt_id)
                event = attempts.record(attempt, judgement, exchange, digest, at=at)
                command = await self._command(history, action, event, fenced=fenced)
                stored = await self._store.append(command)
            except Conflict:
                pass
            except Fenced:
                fenced = True
                continue
            except IntegrityFault:
                raise
            except NeverStored:
                if not exchange.body:
                    raise
                exchange = msgspec.structs.replace(exchange, body=b"")  # the verdict stands, its text is only digested
                continue
            except (NotStored, AppendUnknown, HostError):
                await self._pause(pause)
                pause = min(LONGEST_PAUSE_S, pause * 2)
            else:
                return self._told(history, action, judgement, stored)
            found = await self._reload(history)
            action = actions.replay(found)
            if any(_is_result(recorded.event, claim, judgement, at) for recorded in found):
                return self._told(history, action, judgement, ())  # an append in doubt was stored after all
            if await self._handle_is_anothers(action, judgement):
                judgement = msgspec.structs.replace(
                    judgement, verdict=Verdict.AMBIGUOUS, code=PREFIX + "invalid_response", cause="run_id_reused"
                )

    async def _reload(self, history: str) -> tuple[Recorded, ...]:
        pause = STORE_PAUSE_S
        while True:
            try:
                return await self._store.load(history)
            except IntegrityFault:
                raise
            except HostError:
                await self._pause(pause)
                pause = min(LONGEST_PAUSE_S, pause * 2)

    async def _command(self, history: str, action: Action, event: Event, *, fenced: bool) -> Command:
        """The result, what it means for the run, and the settlement if this host may still decide."""
        own = actions.evolve(action, event, action.version + 1)
        events = [event]
        if not fenced:
            step = next_step(Facts(action=own, owner=self._lease.fence), at=event.at)
            if isinstance(step, Record):
                events += step.events
        scope = PrivateScope(tenant=action.request.tenant, principal=action.request.principal)
        changes = [Change(history=history, expected=action.version, events=tuple(events), scope=scope)]
        if action.request.operation is Operation.RUN_START:
            if isinstance(event, AttemptAccepted):
                changes += self._binding(action, event)
        else:
            changes += await self._answer(action, own, event)
        return Command(changes=tuple(changes), fence=None if fenced else self._lease.fence, cause="result")

    def _binding(self, action: Action, receipt: AttemptAccepted) -> list[Change]:
        """The run that a receipt proves: bound once, under a handle that no other Action at this endpoint has."""
        request, token = action.request, run_token(receipt.run_id)
        claim = next(item.claim for item in action.attempts if item.claim.attempt_id == receipt.attempt_id)
        bound = RunBound(
            at=receipt.at,
            tenant=request.tenant,
            endpoint_id=request.endpoint_id,
            run_id=receipt.run_id,
            action_id=request.action_id,
            attempt_id=receipt.attempt_id,
            principal=request.principal,
            target=claim.target,
            owner=claim.owner,
            started_at=claim.at,
            requested_session=request.requested_session,
            sent_session=request.sent_session,
            deadline=request.run_deadline,
        )
        taken = HandleTaken(at=receipt.at, tenant=request.tenant, action_id=request.action_id)
        return [
            Change(history=run_history(request.tenant, request.endpoint_id, token), expected=0, events=(bound,)),
            Change(history=handle_history(request.endpoint_id, token), expected=0, events=(taken,)),
        ]

    async def _answer(self, action: Action, own: Action, event: Event) -> list[Change]:
        """What a choice's or stop's result means for its run, with an integrity mark if the counts disagree."""
        history = _run_history(action)
        run = binding.replay(await self._store.load(history))
        answers = answers_run(own, at=event.at)
        events: list[Event] = [*answers]
        for answer in answers:
            claimed = _claimed(run, own)
            if isinstance(answer, ChoiceAnswered) and claimed is not None:
                events += binding.check_resolved(answer, claimed, at=event.at)
        return [Change(history=history, expected=run.version, events=tuple(events))]

    async def _handle_is_anothers(self, action: Action, judgement: Judgement) -> bool:
        """True if another Action was given this handle before: one run cannot be two Actions' result."""
        request = action.request
        if judgement.verdict is not Verdict.ACCEPTED or request.operation is not Operation.RUN_START:
            return False
        taken = await self._reload(handle_history(request.endpoint_id, run_token(judgement.run_id)))
        holders = [item.event for item in taken if isinstance(item.event, HandleTaken)]
        return any((holder.tenant, holder.action_id) != (request.tenant, request.action_id) for holder in holders)

    def _told(self, history: str, action: Action, judgement: Judgement, stored: tuple[Recorded, ...]) -> Action:
        for recorded in stored:
            if recorded.history == history:
                action = actions.evolve(action, recorded.event, recorded.version)
        log.info("attempt.recorded", extra={"action": history, "verdict": judgement.verdict.value})
        if judgement.verdict is Verdict.ACCEPTED and action.request.operation is Operation.RUN_START:
            self._bound(action.request.tenant, action.request.endpoint_id, judgement.run_id)
        self._notices.tell(*stored)
        return action


def _run_history(action: Action) -> str:
    request = action.request
    return run_history(request.tenant, request.endpoint_id, run_token(request.run_id))


def _mark(facts: Facts, claim: AttemptClaimed) -> Event:
    """The claim in the run's own history, which keeps two answers, or an answer after a stop, from racing."""
    request = facts.action.request
    if claim.operation is Operation.RUN_STOP:
        return StopClaimed(at=claim.at, action_id=request.action_id, attempt_id=claim.attempt_id)
    pending = {item.ask.digest: item.ask.generation for item in facts.stream.pending} if facts.stream else {}
    return ChoiceClaimed(
        at=claim.at,
        action_id=request.action_id,
        attempt_id=claim.attempt_id,
        choice=request.choice,
        generations=tuple(pending[digest] for digest in request.reviewed),
        resolve_all=request.resolve_all,
    )


def _request_id(facts: Facts) -> str | None:
    """The provider's own id of the reviewed request, where it answers by exact request and gave one."""
    if facts.run is None or facts.stream is None:
        return None
    request = facts.action.request
    return binding.exact_request(facts.run, facts.stream, request.reviewed, resolve_all=request.resolve_all)


def _claimed(run: Run, action: Action) -> ChoiceClaimed | None:
    attempt = action.attempt
    return next(
        (item.claim for item in run.choices if attempt and item.claim.attempt_id == attempt.claim.attempt_id), None
    )


def _is_result(event: Event, claim: AttemptClaimed, judgement: Judgement, at: datetime) -> bool:
    """True if this event is what came back for this claim, seen by its sender at this time."""
    kinds: dict[Verdict, type[Event]] = {Verdict.ACCEPTED: AttemptAccepted, Verdict.AMBIGUOUS: AttemptUnknown}
    return (
        isinstance(event, AttemptAccepted | AttemptClosed | AttemptUnknown)
        and isinstance(event, kinds.get(judgement.verdict, AttemptClosed))
        and (event.attempt_id, event.at) == (claim.attempt_id, at)
        and getattr(event, "cause", judgement.cause) == judgement.cause
    )
