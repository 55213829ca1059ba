"""One call per valid history: what the store would hold after a story, as the events themselves.

Every builder returns a tuple of events; ``action``, ``run`` and ``stream`` fold one. Times are seconds after ``AT``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from domain import action as actions
from domain import approval as approvals
from domain import attempt as attempts
from domain import binding
from domain import stream as streams
from domain.action import Action
from domain.approval import TenantPolicy
from domain.binding import Run
from domain.contracts import CONTRACTS, capability_id
from domain.events import (
    ActionAccepted,
    ChoiceAnswered,
    ChoiceClaimed,
    Event,
    RunBound,
    RunEnded,
    StatusSeen,
    StatusUnread,
    StopAnswered,
    StopClaimed,
    SubscriptionIntended,
    Target,
)
from domain.history import Recorded
from domain.provider import Exchange, Failure, Features, RawFrame, judge
from domain.stream import Received, RunStream
from domain.values import Actor, Fence, Mode, Operation, Plain, after, sha256

AT = datetime.fromisoformat("2026-03-01T12:00:00+00:00")
OWNER = Fence("replica-a", 1)
OTHER = Fence("replica-b", 4)
TARGET = Target(endpoint_id="main", origin="http://127.0.0.1:8642", credential_revision="7")
REPLAYING = msgspec.structs.replace(
    TARGET, features=Features(version="0.22.0", replay=True, durable_keys=True, request_ids=True)
)
RUN = "run_0001"
PREFIX = "connector.hermes_agent."
POLICY = TenantPolicy(id="acme")
REQUESTER = Actor(id="user:ada", tenant="acme", scopes=("action:write", "approval:write"), roles=("approver",))
APPROVER = Actor(id="user:bo", kind="person", tenant="acme", scopes=("approval:write",), roles=("approver",))
ASK = "a1"

History = tuple[Event, ...]


def moment(seconds: float = 0) -> datetime:
    """``AT`` and so many seconds."""
    return AT + timedelta(seconds=seconds)


def recorded(events: Iterable[Event], history: str = "acme/act/act_1", first: int = 1) -> tuple[Recorded, ...]:
    """Events in their envelopes."""
    return tuple(
        Recorded(history=history, version=version, position=version * 10, event_id=f"ev_{version}", event=event)
        for version, event in enumerate(events, first)
    )


def action(events: Iterable[Event]) -> Action:
    """The Action of a history."""
    return actions.replay(recorded(events))


def run(events: Iterable[Event]) -> Run:
    """The run of a history."""
    return binding.replay(recorded(events, "acme/run/main/run_0001"))


def stream(events: Iterable[Event]) -> RunStream:
    """The stream of a history."""
    return streams.replay(recorded(events, "acme/str/main/run_0001"))


# ---- Actions ---------------------------------------------------------------------------------------------------------


def accepted(operation: Operation = Operation.RUN_START, **members: Any) -> History:
    """A request was admitted at ``AT``."""
    contract = CONTRACTS[operation]
    given: dict[str, Any] = {
        "at": AT,
        "action_id": "act_1",
        "tenant": "acme",
        "principal": REQUESTER.id,
        "principal_kind": "person",
        "capability_id": capability_id("main", operation),
        "endpoint_id": "main",
        "operation": operation,
        "mode": Mode.SYNC,
        "input": Plain(content=b'{"input":"hello"}'),
        "fingerprint": "f" * 64,
        "deadline": after(AT, contract.timeout_ms),
        "timeout_ms": contract.timeout_ms,
        "owner": OWNER,
        "request_digest": "d" * 64,
        "key": "key-1" if contract.key_required else "",
        "run_id": "" if operation is Operation.RUN_START else RUN,
        "choice": "once" if operation is Operation.RUN_APPROVAL else "",
        "reviewed": (ASK,) if operation is Operation.RUN_APPROVAL else (),
        "max_events": 4_096 if operation is Operation.RUN_EVENTS else 0,
    }
    return (ActionAccepted(**(given | members)),)


def awaiting(operation: Operation = Operation.RUN_STOP, policy: TenantPolicy = POLICY, **members: Any) -> History:
    """A governed mutation waits for a person."""
    asked = approvals.request(
        policy,
        operation,
        approval_id="apr_1",
        decision_id="dec_0",
        reason="stops a run",
        input_digest="d" * 64,
        at=AT,
    )
    return (*accepted(operation, **members), *asked)


def granted(operation: Operation = Operation.RUN_STOP, at: float = 10, **members: Any) -> History:
    """A person let the mutation go, once."""
    asked = awaiting(operation, **members)
    decided = actions.decide_approval(
        action(asked), POLICY, APPROVER, granted=True, reason="reviewed", decision_id="dec_1", at=moment(at)
    )
    return (*asked, *decided)


def denied(operation: Operation = Operation.RUN_STOP, at: float = 10, **members: Any) -> History:
    """A person refused the mutation; the Action is settled."""
    asked = awaiting(operation, **members)
    decided = actions.decide_approval(
        action(asked), POLICY, APPROVER, granted=False, reason="not now", decision_id="dec_1", at=moment(at)
    )
    return (*asked, *decided)


def ready(operation: Operation = Operation.RUN_START, **members: Any) -> History:
    """Everything that has to be decided before a mutation is decided."""
    return granted(operation, **members) if CONTRACTS[operation].approval else accepted(operation, **members)


def claimed(operation: Operation = Operation.RUN_START, at: float = 20, **members: Any) -> History:
    """The decision to send is stored."""
    return claim_again(ready(operation, **members), at=at)


def claim_again(history: History, at: float) -> History:
    """One more claim on a history that permits it."""
    known = action(history)
    claim = actions.claim(
        known,
        OWNER,
        TARGET,
        attempt_id=f"att_{len(known.attempts) + 1}",
        lease_valid=True,
        policy_hash=POLICY.hash,
        at=moment(at),
    )
    return (*history, claim)


def result(history: History, exchange: Exchange, at: float = 21) -> History:
    """What came back for the latest claim, judged and stored."""
    known = action(history)
    attempt = known.attempt
    assert attempt is not None
    judgement = judge(attempt.claim.operation, exchange, attempt.claim.run_id)
    return (*history, attempts.record(attempt, judgement, exchange, sha256(exchange.body), at=moment(at)))


def receipt_of(operation: Operation) -> Exchange:
    """The answer by which Hermes accepts this mutation."""
    match operation:
        case Operation.RUN_START:
            return answer(202, {"run_id": RUN, "status": "started"})
        case Operation.RUN_APPROVAL:
            return answer(
                200, {"object": "hermes.run.approval_response", "run_id": RUN, "choice": "once", "resolved": 1}
            )
        case _:
            return answer(200, {"run_id": RUN, "status": "stopping"})


def received(operation: Operation = Operation.RUN_START, at: float = 21, **members: Any) -> History:
    """The provider's receipt is stored."""
    return result(claimed(operation, **members), receipt_of(operation), at=at)


def in_doubt(operation: Operation = Operation.RUN_START, at: float = 21, **members: Any) -> History:
    """Sent, and the answer was lost."""
    return result(claimed(operation, **members), broken(Failure.READ_ERROR), at=at)


def refused(
    operation: Operation = Operation.RUN_START,
    status: int = 429,
    code: str = "rate_limit_exceeded",
    at: float = 21,
    retry_after: str = "1",
    **members: Any,
) -> History:
    """Hermes refused in its own words."""
    answered = answer(status, error_body(code), retry_after=retry_after)
    return result(claimed(operation, **members), answered, at=at)


def not_sent(operation: Operation = Operation.RUN_START, at: float = 21, **members: Any) -> History:
    """No byte left."""
    return result(claimed(operation, **members), broken(Failure.CONNECT_REFUSED, sent=False), at=at)


def settled(operation: Operation = Operation.RUN_START, at: float = 22, **members: Any) -> History:
    """Accepted by the provider and settled."""
    history = received(operation, **members)
    return (*history, actions.settle_received(action(history), at=moment(at)))


def wished(history: History, at: float = 15) -> History:
    """Somebody cancels."""
    return (*history, *actions.wish_cancel(action(history), REQUESTER, "changed my mind", at=moment(at)))


# ---- exchanges -------------------------------------------------------------------------------------------------------


def error_body(code: str = "", message: str = "no") -> dict[str, Any]:
    """Hermes's error envelope."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code or None}}


def answer(status: int, body: Any = None, **members: Any) -> Exchange:
    """A complete answer; ``body`` is JSON, or the exact bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Exchange(sent=True, status=status, content_type="application/json", body=content, **members)


def broken(failure: Failure, *, sent: bool = True, status: int | None = None) -> Exchange:
    """An exchange that did not come to its end."""
    return Exchange(sent=sent, failure=failure, status=status)


def status_answer(state: str = "running", run_id: str = RUN, **members: Any) -> Exchange:
    """A status object of a run."""
    body = {"object": "hermes.run", "run_id": run_id, "status": state, "updated_at": 1_772_366_400.5}
    if state == "completed":
        body |= {"output": "done", "usage": {"total_tokens": 3}}
    return answer(200, body | members)


# ---- runs ------------------------------------------------------------------------------------------------------------


def bound(target: Target = TARGET, deadline: float | None = None, **members: Any) -> History:
    """A run was created by our start."""
    given: dict[str, Any] = {
        "at": AT,
        "tenant": "acme",
        "endpoint_id": "main",
        "run_id": RUN,
        "action_id": "act_0",
        "attempt_id": "att_0",
        "principal": REQUESTER.id,
        "target": target,
        "owner": OWNER,
        "started_at": AT,
        "deadline": None if deadline is None else moment(deadline),
    }
    return (RunBound(**(given | members)),)


def seen(history: History, state: str, at: float = 5) -> History:
    """A status object was read."""
    return (*history, StatusSeen(at=moment(at), state=state, answer_digest="d", answer=Plain(content=b"{}")))


def missing(history: History, at: float = 5) -> History:
    """The process does not know the run."""
    return (
        *history,
        StatusUnread(at=moment(at), code=PREFIX + "run_not_found", cause="http_404", missing=True, http_status=404),
    )


def ended(history: History, state: str = "completed", source: str = "status", at: float = 6) -> History:
    """Terminal evidence is stored."""
    before = seen(history, state, at=at) if source == "status" else history
    return (
        *before,
        RunEnded(at=moment(at), state=state, source=source, evidence="run:2", result=Plain(content=b"{}")),
    )


def stopped(history: History, verdict: str = "accepted", at: float = 4) -> History:
    """A stop was claimed and answered; without a verdict it is only claimed."""
    claim = StopClaimed(at=moment(at), action_id="act_1", attempt_id="att_1")
    if not verdict:
        return (*history, claim)
    return (*history, claim, StopAnswered(at=moment(at), action_id="act_1", attempt_id="att_1", verdict=verdict))


def decided(history: History, generations: tuple[int, ...] = (1,), verdict: str = "accepted", at: float = 4) -> History:
    """A choice was claimed for these requests and answered; without a verdict it is only claimed."""
    claim = ChoiceClaimed(at=moment(at), action_id="act_1", attempt_id="att_1", choice="once", generations=generations)
    if not verdict:
        return (*history, claim)
    return (*history, claim, ChoiceAnswered(at=moment(at), action_id="act_1", attempt_id="att_1", verdict=verdict))


# ---- streams ---------------------------------------------------------------------------------------------------------


def subscribed(at: float = 1, owner: Fence = OWNER) -> History:
    """The intent to read the stream is stored."""
    return (SubscriptionIntended(at=moment(at), owner=owner, number=1),)


def frame(event: str, at: float = 2, digest: str = "", **body: Any) -> Received:
    """One frame as it arrived; ``seq`` among its members is the provider's own number."""
    data = json.dumps({"event": event, "run_id": RUN, **body})
    raw = RawFrame(raw=f"data: {data}\n\n".encode(), data=data)
    return Received(at=moment(at), frame=raw, digest=digest or sha256(raw.raw)[:16])


def asking(
    digest: str = ASK, at: float = 2, choices: Sequence[str] = ("once", "session", "always", "deny"), **more: Any
) -> Received:
    """One ``approval.request`` frame."""
    return frame("approval.request", at, digest, command="rm -r build", choices=list(choices), nonce=digest, **more)


def stored(history: History, *batch: Received) -> History:
    """A batch of frames is stored, if it says anything new."""
    kept = streams.store_frames(stream(history), batch, "b" * 64) if batch else None
    return history if kept is None else (*history, kept)


def closed(history: History, reason: str = "cut", at: float = 9) -> History:
    """The subscription is over."""
    return (*history, *streams.close(stream(history), reason, at=moment(at)))
