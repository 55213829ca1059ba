"""How work enters: a verified caller's request becomes a stored Action, or a typed refusal and no work at all.

Order of checks: capability and rights, mode and limits, key, input, tenant policy, then the key's holder, then whether
the host takes new work, then one append of reservation and Action together. The first version of a reservation wins;
who loses the race is answered with the winner's Action.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from adapters.driver import Driver
from adapters.notices import Notices
from adapters.sessions import Sessions
from adapters.submission import Admitted, Cancelled, Draft, Submission, asked, asked_session, key_of
from domain import action as actions
from domain import approval as approvals
from domain import binding, idempotency
from domain.action import Action, State
from domain.approval import TenantPolicy
from domain.contracts import CONTRACTS, parse_capability
from domain.errors import CallerError, HostError, NotNow
from domain.events import ActionAccepted, Event, KeyReserved, RequestRefused
from domain.history import (
    Change,
    Command,
    Recorded,
    action_history,
    key_history,
    refusal_history,
    run_history,
    run_token,
)
from domain.ports import AppendUnknown, Clock, Conflict, Fenced, Lease, NotStored, Provider, Store, TooLate, Vault
from domain.requests import RunInput, StartBody
from domain.values import ID_PATTERN, Actor, Mode, Operation, Plain, PrivateScope, after

MAX_WAIT_S = 330.0
APPEND_TRIES = 20


class EndpointPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What intake needs to know of an admitted endpoint beside its target."""

    run_deadline_ms: int = 900_000
    approvals_manual: bool = False


class Gates:
    """Whether the host takes new work. Probes and the lifecycle set these; intake and readiness read them."""

    def __init__(self) -> None:
        self.draining = False
        self.storage_ready = True
        self.connector_ready = True


class Intake:
    """Admission, decisions and cancellation of Actions."""

    def __init__(
        self,
        store: Store,
        vault: Vault,
        clock: Clock,
        lease: Lease,
        endpoints: Mapping[str, Provider],
        endpoint_policies: Mapping[str, EndpointPolicy],
        policy_of: Callable[[str], TenantPolicy],
        driver: Driver,
        notices: Notices,
        gates: Gates,
    ) -> None:
        self._store, self._vault, self._clock, self._lease = store, vault, clock, lease
        self._endpoints, self._endpoint_policies, self._policy_of = endpoints, endpoint_policies, policy_of
        self._driver, self._notices, self._gates = driver, notices, gates
        self._sessions = Sessions(store, vault)

    # ---- submitting --------------------------------------------------------------------------------------------------

    async def submit(self, actor: Actor, submission: Submission) -> Admitted:
        """Admit a request once. A repeat of a known key answers the original, also when no new work is taken."""
        endpoint_id, operation = parse_capability(submission.capability_id)
        provider = self._endpoints.get(endpoint_id)
        if provider is None:
            raise CallerError("capability.unsupported")
        if not actor.may("action:write"):
            raise CallerError("auth.not_authorized", details={"scope": "action:write"})
        target = provider.target
        if target.tenant_binding and target.tenant_binding != actor.tenant:
            raise CallerError("connector.hermes_agent.tenant_mismatch")
        contract = CONTRACTS[operation]
        key = idempotency.check_key(key_of(submission), required=contract.key_required)
        draft = Draft(actor, submission, contract, endpoint_id, key, self._clock.new_id("act_"))
        draft.fingerprint = self._vault.digest(
            idempotency.fingerprint_text(submission.capability_id, asked(submission, operation))
        )
        if key:
            scope = idempotency.scope_text(actor.tenant, submission.capability_id, key)
            draft.key_history = key_history(actor.tenant, self._vault.digest(scope)[:40])
        elif submission.id is not None:
            existing = await self._same_action(draft)
            if existing is not None:
                return existing
        return await self._admit(draft)

    async def _admit(self, draft: Draft) -> Admitted:
        """Append first: a key that is taken shows as a conflict, and only then is its holder read.

        What would refuse a new request (policy, capacity, drain) never refuses a repeat: then the holder is read first.
        """
        reserved, look = 0, False
        for _ in range(APPEND_TRIES):
            events, scope, refusal = await self._accept_or_refuse(draft)
            if draft.key_history and (look or refusal is not None):
                found = await self._holder(draft)
                if isinstance(found, Admitted):
                    self._driver.take(draft.actor.tenant, found.action.request.action_id)
                    return found
                reserved = found
            if refusal is not None:
                raise refusal
            history = action_history(draft.actor.tenant, draft.action_id)
            changes = [Change(history=history, expected=0, events=events, scope=scope), *draft.changes]
            if draft.key_history:
                changes.append(Change(history=draft.key_history, expected=reserved, events=(self._reservation(draft),)))
            try:
                stored = await self._append(Command(changes=tuple(changes), fence=self._lease.fence, cause="submit"))
            except Conflict:
                look = True
                existing = await self._taken_id(draft)
                if existing is not None:
                    return existing
                continue
            action = actions.replay(item for item in stored if item.history == history)
            self._driver.take(draft.actor.tenant, draft.action_id, action)
            return Admitted(action=action, history=history, replay=False)
        raise NotNow("storage.unavailable", retry_after_ms=1_000)

    async def _append(self, command: Command) -> tuple[Recorded, ...]:
        """Append, with what can go wrong as the refusal that callers get; Conflict and TooLate are the caller's."""
        try:
            return await self._store.append(command)
        except NotStored as error:
            raise NotNow("storage.unavailable", retry_after_ms=1_000) from error
        except Fenced as error:
            raise NotNow("lease.fenced", retry_after_ms=1_000) from error
        except AppendUnknown as error:
            raise NotNow("storage.unknown", retry_after_ms=1_000) from error

    def _reservation(self, draft: Draft) -> KeyReserved:
        return idempotency.reserve(
            action_id=draft.action_id,
            capability_id=draft.submission.capability_id,
            principal=draft.actor.id,
            fingerprint=draft.fingerprint,
            at=self._clock.now(),
        )

    async def _accept_or_refuse(self, draft: Draft) -> tuple[tuple[Event, ...], PrivateScope, HostError | None]:
        try:
            self._check_gates(draft)
            events, scope = await self._accept(draft)
        except HostError as refusal:
            return (), PrivateScope(tenant=draft.actor.tenant, principal=draft.actor.id), refusal
        return events, scope, None

    async def _taken_id(self, draft: Draft) -> Admitted | None:
        """After a conflict: the Action that has the caller's own id, or a refusal if it is another request's."""
        if draft.submission.id is None:
            return None
        if not draft.key_history:
            return await self._same_action(draft)
        holder = idempotency.holder(await self._store.load(draft.key_history))
        taken = await self._store.load(action_history(draft.actor.tenant, draft.submission.id))
        if taken and (holder is None or holder.action_id != draft.submission.id):
            raise CallerError("action.id_conflict")
        return None

    async def _holder(self, draft: Draft) -> Admitted | int:
        """The original that a key names, or the version at which the key is free to be reserved."""
        found = await self._store.load(draft.key_history)
        reserved = idempotency.holder(found)
        if reserved is None:
            return 0
        history = action_history(draft.actor.tenant, reserved.action_id)
        action = actions.replay(await self._store.load(history))
        if idempotency.expired(reserved, action, at=self._clock.now()):
            return found[-1].version
        idempotency.check_repeat(reserved, draft.fingerprint, draft.actor)
        await self._confirm()
        return Admitted(action=action, history=history, replay=True)

    async def _confirm(self) -> None:
        """An answer from reads alone waits until what was read is durable."""
        try:
            await self._store.confirm()
        except AppendUnknown as error:
            raise NotNow("storage.unknown", retry_after_ms=1_000) from error

    async def _same_action(self, draft: Draft) -> Admitted | None:
        """The Action that has the caller's own id already, if it was the same request by the same principal."""
        history = action_history(draft.actor.tenant, draft.submission.id or "")
        found = await self._store.load(history)
        if not found:
            return None
        action = actions.replay(found)
        if action.request.fingerprint != draft.fingerprint or action.request.principal != draft.actor.id:
            raise CallerError("action.id_conflict")
        return Admitted(action=action, history=history, replay=True)

    def _check_gates(self, draft: Draft) -> None:
        gates = self._gates
        if gates.draining or not self._lease.valid() or not gates.connector_ready or not gates.storage_ready:
            reason = "draining" if gates.draining else "not_ready"
            raise NotNow("connector_host.not_ready", retry_after_ms=1_000, details={"reason": reason})
        if draft.submission.mode is Mode.SYNC and self._driver.full:
            raise NotNow("connector_host.capacity", retry_after_ms=100)

    async def _accept(self, draft: Draft) -> tuple[tuple[Event, ...], PrivateScope]:
        """The events of acceptance: the Action, and the approval request where the contract wants one."""
        submission, contract, actor = draft.submission, draft.contract, draft.actor
        at = self._clock.now()
        content = draft.content
        facts = await (
            self._start_facts(draft, content) if isinstance(content, StartBody) else self._run_facts(draft, content)
        )
        limit = min(submission.timeout_ms or contract.timeout_ms, contract.timeout_ms)
        run_limit = submission.timeout_ms or self._endpoint_policies[draft.endpoint_id].run_deadline_ms
        policy = self._policy_of(actor.tenant)
        given = json.dumps(submission.input, ensure_ascii=False, separators=(",", ":")).encode()
        accepted = ActionAccepted(
            at=at,
            action_id=draft.action_id,
            tenant=actor.tenant,
            principal=actor.id,
            principal_kind=actor.kind,
            capability_id=submission.capability_id,
            endpoint_id=draft.endpoint_id,
            operation=contract.operation,
            mode=submission.mode,
            input=Plain(content=given),
            fingerprint=draft.fingerprint,
            deadline=after(at, limit),
            timeout_ms=limit,
            owner=self._lease.fence,
            key=draft.key,
            key_history=draft.key_history,
            run_deadline=after(at, run_limit) if contract.operation is Operation.RUN_START else None,
            trace_id=submission.trace_id,
            correlation_id=submission.correlation_id,
            aip_session=submission.session_id,
            retry_of=submission.retry_of,
            **facts,
        )
        events: tuple[Event, ...] = (accepted,)
        if contract.approval:
            approvals.check_policy(policy, contract.operation, accepted.choice, accepted.resolve_all)
            events += approvals.request(
                policy,
                contract.operation,
                approval_id="appr_" + draft.action_id,
                decision_id=self._clock.new_id("dec_"),
                reason=submission.reason or f"{contract.operation.value} of run {accepted.run_id}",
                input_digest=self._vault.digest(given),
                at=at,
            )
        return events, PrivateScope(tenant=actor.tenant, principal=actor.id)

    async def _start_facts(self, draft: Draft, start: StartBody) -> dict[str, Any]:
        return {
            "request_digest": self._vault.digest(start.content),
            "requested_session": asked_session(draft.submission.input),
            "sent_session": start.requested_session or "",
            "history_kind": start.history,
            "session_key": Plain(content=start.session_key.encode()) if start.session_key else None,
            "dropped": start.dropped,
            "notices": await self._notices_of(draft),
        }

    async def _notices_of(self, draft: Draft) -> tuple[str, ...]:
        """What the caller should know; takes the conversation that the start names, if it names one."""
        manual = self._endpoint_policies[draft.endpoint_id].approvals_manual
        notices = () if manual else ("endpoint_approvals_not_asserted_manual",)
        session, tenant = asked_session(draft.submission.input), draft.actor.tenant
        if not session:
            return notices
        change, shared = await self._sessions.take(
            tenant,
            draft.endpoint_id,
            session,
            draft.action_id,
            exclusive=self._policy_of(tenant).one_run_per_session,
            at=self._clock.now(),
        )
        draft.changes = (change,)
        return (*notices, "session_has_other_active_run") if shared else notices

    async def _run_facts(self, draft: Draft, given: RunInput) -> dict[str, Any]:
        operation, actor = draft.contract.operation, draft.actor
        run = binding.replay(
            await self._store.load(run_history(actor.tenant, draft.endpoint_id, run_token(given.run_id)))
        )
        if run.bound is None or (run.bound.principal != actor.id and not actor.may_any("action:write")):
            raise CallerError("action.not_found")
        return {
            "run_id": given.run_id,
            "choice": given.choice,
            "resolve_all": given.resolve_all,
            "reviewed": given.reviewed,
            "max_events": given.max_events if operation is Operation.RUN_EVENTS else 0,
            "session_key": Plain(content=given.session_key.encode()) if given.session_key else None,
        }

    # ---- following ---------------------------------------------------------------------------------------------------

    async def settled(self, tenant: str, action_id: str, timeout_s: float) -> Action:
        """The Action as soon as it can be answered: settled, unknown or awaiting approval; else as it is at the end."""
        history = action_history(tenant, action_id)
        give_up = self._clock.monotonic() + min(timeout_s, MAX_WAIT_S)
        with self._notices.watch(history) as bell:
            while True:
                bell.clear()
                action = actions.replay(await self._store.load(history))
                left = give_up - self._clock.monotonic()
                if action.state in (State.SETTLED, State.UNKNOWN, State.AWAITING) or left <= 0:
                    await self._confirm()
                    return action
                await bell.wait(min(2.0, left))

    async def find(self, actor: Actor, action_id: str, scope: str = "action:read") -> Action:
        """An Action that this caller may see; another tenant's or principal's looks like an unknown id."""
        if not actor.may(scope):
            raise CallerError("auth.not_authorized", details={"scope": scope})
        if not ID_PATTERN.match(action_id):
            raise CallerError("action.not_found")
        found = await self._store.load(action_history(actor.tenant, action_id))
        if not found:
            raise CallerError("action.not_found")
        action = actions.replay(found)
        if action.request.principal != actor.id and not actor.may_any(scope):
            raise CallerError("action.not_found")
        await self._confirm()
        return action

    # ---- deciding and cancelling -------------------------------------------------------------------------------------

    async def decide(self, actor: Actor, action_id: str, *, granted: bool, reason: str) -> Action:
        """A person's decision about a waiting Action; it is acted on once, by the host that owns the Action."""
        if not ID_PATTERN.match(action_id):
            raise CallerError("action.not_found")

        def make(action: Action) -> tuple[Event, ...]:
            if action.accepted is None:
                raise CallerError("action.not_found")
            return actions.decide_approval(
                action,
                self._policy_of(actor.tenant),
                actor,
                granted=granted,
                reason=reason,
                decision_id=self._clock.new_id("dec_"),
                at=self._clock.now(),
            )

        return await self._change(actor, action_id, make, decides=True)

    async def cancel(self, actor: Actor, action_id: str, reason: str) -> Cancelled:
        """Cancel an Action; a stop is asked for, once and under the policy, only if its input holds a run id."""
        await self.find(actor, action_id, "action:write")
        action = await self._change(
            actor, action_id, lambda found: actions.wish_cancel(found, actor, reason, at=self._clock.now())
        )
        request = action.request
        stops = request.operation in (Operation.RUN_STATUS, Operation.RUN_EVENTS) or (
            request.operation is Operation.RUN_APPROVAL and action.attempts
        )
        if stops and request.run_id:
            stop = await self.submit(
                actor,
                Submission(
                    capability_id=f"cap:hermes_agent:{request.endpoint_id}:{Operation.RUN_STOP.value}",
                    input={"run_id": request.run_id},
                    mode=Mode.SYNC,
                    idempotency_key=f"cancel:{action_id}",
                    reason=reason or f"cancel of {action_id}",
                ),
            )
            return Cancelled(action=action, what="stop_requested", stop_action_id=stop.action.request.action_id)
        if action.settled is not None:
            without_effect = action.settled.status == "cancelled"
            return Cancelled(action=action, what="cancelled_without_effect" if without_effect else "nothing_to_do")
        return Cancelled(action=action, what="wish_stored")

    async def _change(
        self, actor: Actor, action_id: str, make: Callable[[Action], tuple[Event, ...]], *, decides: bool = False
    ) -> Action:
        """Append what ``make`` says of the Action as it stands; a decision, not after its approval has run out."""
        history = action_history(actor.tenant, action_id)
        for _ in range(APPEND_TRIES):
            action = actions.replay(await self._store.load(history))
            events = make(action)
            if not events:
                return action
            change = Change(history=history, expected=action.version, events=events)
            approval = action.approval
            not_after = approval.usable_until if decides and approval and action.state is State.AWAITING else None
            try:
                stored = await self._append(
                    Command(changes=(change,), fence=self._lease.fence, not_after=not_after, cause=f"by {actor.id}")
                )
            except Conflict:
                continue
            except TooLate as error:
                raise CallerError("policy.approval_expired") from error
            for recorded in stored:
                action = actions.evolve(action, recorded.event, recorded.version)
            self._notices.tell(*stored)
            self._driver.take(actor.tenant, action_id)
            return action
        raise NotNow("storage.unavailable", retry_after_ms=1_000)

    async def refused(self, actor: Actor, route: str, code: str, subject: str) -> None:
        """Keep a refused mutation in the audit: who, where, which code; never what was sent."""
        event = RequestRefused(at=self._clock.now(), by=actor.id, route=route, code=code, subject=subject[:128])
        history = refusal_history(actor.tenant, self._clock.new_id("ref_"))
        await self._append(Command(changes=(Change(history=history, expected=0, events=(event,)),), cause="refusal"))
