"""Journals written by hand: events in commit order, each with its place, private content sealed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from adapters.store import Unreadable
from domain.approval import TenantPolicy
from domain.approval import request as request_approval
from domain.errors import IntegrityFault
from domain.events import (
    ActionAccepted,
    ActionSettled,
    ApprovalDecided,
    Ask,
    AttemptAccepted,
    AttemptClaimed,
    AttemptClosed,
    AttemptUnknown,
    Event,
    FramesStored,
    RunBound,
    RunEnded,
    StatusSeen,
    SubscriptionIntended,
    Target,
)
from domain.history import Recorded, action_history, run_history, run_token, stream_history
from domain.provider import Features
from domain.values import Effect, Fence, Mode, Operation, Sealed

AT = datetime(2026, 11, 30, 12, tzinfo=UTC)
OWNER = Fence("host-1", 1)
TARGET = Target(endpoint_id="alpha", origin="http://127.0.0.1:9", features=Features(version="0.19"))
POLICY = TenantPolicy(id="acme")


def at(seconds: float) -> datetime:
    """A time so many seconds after the start of the test's world."""
    return AT + timedelta(seconds=seconds)


def box(history: str, version: int) -> Sealed:
    """Sealed content; the box says where it stands, so that a test finds it again."""
    return Sealed(key="key-1", history=history, version=version, size=20, box=f"box:{history}:{version}")


class Log:
    """A journal as a list. Positions have gaps, as they do in PostgreSQL; `read_log` and `load` are the store's."""

    def __init__(self, tenant: str = "acme") -> None:
        self.tenant = tenant
        self.events: list[Recorded | Unreadable] = []
        self.versions: dict[str, int] = {}
        self.clock = 0.0

    def add(self, history: str, event: Event) -> Recorded:
        """Append one event."""
        version = self.versions.get(history, 0) + 1
        self.versions[history] = version
        position = (self.events[-1].position if self.events else 0) + (3 if version % 4 == 0 else 1)
        recorded = Recorded(
            history=history, version=version, position=position, event_id=f"evt_{position}", event=event, fence=OWNER
        )
        self.events.append(recorded)
        return recorded

    def spoil(self, history: str, topic: str = "action.from_the_future") -> Unreadable:
        """Append an event that this release cannot read."""
        version = self.versions.get(history, 0) + 1
        self.versions[history] = version
        position = (self.events[-1].position if self.events else 0) + 1
        unreadable = Unreadable(
            history=history, version=version, position=position, topic=topic, reason="history.newer_version"
        )
        self.events.append(unreadable)
        return unreadable

    def recorded(self) -> list[Recorded]:
        """Everything that can be read."""
        return [event for event in self.events if isinstance(event, Recorded)]

    async def read_log(self, after: int, limit: int) -> list[Recorded | Unreadable]:
        """As the store's."""
        return [event for event in self.events if event.position > after][:limit]

    async def load(self, history: str) -> tuple[Recorded, ...]:
        """As the store's."""
        found = [event for event in self.events if event.history == history]
        if any(isinstance(event, Unreadable) for event in found):
            raise IntegrityFault("history.newer_version")
        return tuple(event for event in found if isinstance(event, Recorded))

    # ---- what happens to Actions and runs ----

    def tick(self) -> datetime:
        """The next second."""
        self.clock += 1
        return at(self.clock)

    def act(self, action_id: str, event: Event) -> Recorded:
        """Append to an Action's history."""
        return self.add(action_history(self.tenant, action_id), event)

    def run(self, run_id: str, event: Event) -> Recorded:
        """Append to a run's history."""
        return self.add(run_history(self.tenant, "alpha", run_token(run_id)), event)

    def frames(self, run_id: str, event: Event) -> Recorded:
        """Append to a run's stream."""
        return self.add(stream_history(self.tenant, "alpha", run_token(run_id)), event)

    def accept(self, action_id: str, operation: Operation = Operation.RUN_START, **more: Any) -> Recorded:
        """An accepted request."""
        history = action_history(self.tenant, action_id)
        now = self.tick()
        members: dict[str, Any] = {
            "at": now,
            "action_id": action_id,
            "tenant": self.tenant,
            "principal": "alice",
            "principal_kind": "human",
            "capability_id": f"cap:hermes_agent:alpha:{operation.value}",
            "endpoint_id": "alpha",
            "operation": operation,
            "mode": Mode.SYNC,
            "input": box(history, self.versions.get(history, 0) + 1),
            "fingerprint": "f" * 64,
            "deadline": now + timedelta(seconds=60),
            "timeout_ms": 60_000,
            "owner": OWNER,
        }
        return self.add(history, ActionAccepted(**{**members, **more}))

    def ask_person(self, action_id: str, operation: Operation) -> None:
        """The policy wants a person."""
        events = request_approval(
            POLICY,
            operation,
            approval_id=f"apr_{action_id}",
            decision_id=f"dec_{action_id}",
            reason="a person decides",
            input_digest="d" * 64,
            at=self.tick(),
        )
        for event in events:
            self.act(action_id, event)

    def decide(self, action_id: str, granted: bool = True) -> Recorded:
        """A person decided."""
        return self.act(
            action_id,
            ApprovalDecided(
                at=self.tick(),
                approval_id=f"apr_{action_id}",
                decision_id=f"dec_{action_id}",
                granted=granted,
                by="bob",
                by_kind="human",
                reason="looked at it",
                policy_hash=POLICY.hash,
            ),
        )

    def claim(self, action_id: str, operation: Operation = Operation.RUN_START, number: int = 1) -> Recorded:
        """The right to send was taken."""
        attempt = f"att_{action_id}_{number}"
        return self.act(
            action_id,
            AttemptClaimed(
                at=self.tick(), attempt_id=attempt, number=number, operation=operation, target=TARGET, owner=OWNER
            ),
        )

    def receive(self, action_id: str, run_id: str = "", number: int = 1) -> Recorded:
        """The receipt came."""
        history = action_history(self.tenant, action_id)
        return self.act(
            action_id,
            AttemptAccepted(
                at=self.tick(),
                attempt_id=f"att_{action_id}_{number}",
                http_status=202,
                answer_digest="a" * 64,
                answer=box(history, self.versions[history] + 1),
                run_id=run_id,
            ),
        )

    def lose(self, action_id: str, number: int = 1) -> Recorded:
        """No provable answer."""
        return self.act(
            action_id,
            AttemptUnknown(
                at=self.tick(),
                attempt_id=f"att_{action_id}_{number}",
                code="connector.hermes_agent.transport",
                cause="read_error",
            ),
        )

    def refuse(self, action_id: str, number: int = 1) -> Recorded:
        """The provider refused."""
        return self.act(
            action_id,
            AttemptClosed(
                at=self.tick(),
                attempt_id=f"att_{action_id}_{number}",
                sent=True,
                code="connector.hermes_agent.remote_rejected",
                cause="http_400",
                http_status=400,
            ),
        )

    def settle(self, action_id: str, status: str = "completed", code: str = "", **more: Any) -> Recorded:
        """The final answer."""
        history = action_history(self.tenant, action_id)
        output = box(history, self.versions[history] + 1) if status == "completed" else None
        effect = Effect.CONFIRMED if status == "completed" else Effect.NONE
        members: dict[str, Any] = {"status": status, "effect": effect, "code": code, "output": output}
        return self.act(action_id, ActionSettled(at=self.tick(), **{**members, **more}))

    def bind(self, action_id: str, run_id: str, **more: Any) -> Recorded:
        """A run got its handle."""
        members: dict[str, Any] = {
            "at": self.tick(),
            "tenant": self.tenant,
            "endpoint_id": "alpha",
            "run_id": run_id,
            "action_id": action_id,
            "attempt_id": f"att_{action_id}_1",
            "principal": "alice",
            "target": TARGET,
            "owner": OWNER,
            "started_at": at(self.clock),
            "deadline": at(self.clock + 600),
        }
        return self.run(run_id, RunBound(**{**members, **more}))

    def start(self, action_id: str, run_id: str, **more: Any) -> None:
        """A whole start: accepted, claimed, receipt, bound, settled."""
        self.accept(action_id, **more)
        self.claim(action_id)
        self.receive(action_id, run_id)
        self.bind(action_id, run_id)
        self.settle(action_id, details={"run_id": run_id})

    def see(self, run_id: str, state: str = "running", **more: Any) -> Recorded:
        """A status was read."""
        history = run_history(self.tenant, "alpha", run_token(run_id))
        answer = box(history, self.versions[history] + 1)
        return self.run(run_id, StatusSeen(at=self.tick(), state=state, answer_digest="a" * 64, answer=answer, **more))

    def end(self, run_id: str, state: str = "completed", marks: tuple[str, ...] = ()) -> Recorded:
        """The run ended."""
        history = run_history(self.tenant, "alpha", run_token(run_id))
        return self.run(
            run_id,
            RunEnded(
                at=self.tick(),
                state=state,
                source="status",
                evidence=f"run:{self.versions[history]}",
                result=box(history, self.versions[history] + 1),
                has_output=True,
                marks=marks,
            ),
        )

    def listen(self, run_id: str) -> Recorded:
        """The stream was about to be opened."""
        return self.frames(run_id, SubscriptionIntended(at=self.tick(), owner=OWNER, number=1))

    def hear(
        self, run_id: str, first: int, kinds: tuple[tuple[str, int], ...], asks: int = 0, answered: int = 0
    ) -> Recorded:
        """Frames were stored; `asks` of them are approval requests, `answered` of them answers to the oldest ones."""
        history = stream_history(self.tenant, "alpha", run_token(run_id))
        count = sum(number for _, number in kinds)
        return self.frames(
            run_id,
            FramesStored(
                at=self.tick(),
                first=first,
                count=count,
                kinds=kinds,
                digest="b" * 64,
                size=100,
                frames=box(history, self.versions.get(history, 0) + 1),
                asks=tuple(
                    Ask(generation=first + n, seq=first + n, digest=f"{first + n:064x}", choices=("once", "deny"))
                    for n in range(asks)
                ),
                settles=((first + count, f"responded:once:{answered}"),) if answered else (),
            ),
        )


def busy(log: Log, count: int) -> None:
    """Actions in every state, and runs with asks, ends and doubts."""
    for number in range(count):
        name = f"act_{number}"
        match number % 6:
            case 0:
                log.start(name, f"run_{number}", sent_session=f"s{number % 2}")
                log.listen(f"run_{number}")
                log.hear(f"run_{number}", 1, (("approval.request", 1), ("tool.started", 2)), asks=1)
            case 1:
                log.accept(name)
                log.claim(name)
                log.lose(name)
            case 2:
                log.accept(name, Operation.RUN_STOP, run_id=f"run_{number - 2}", principal="bob")
                log.ask_person(name, Operation.RUN_STOP)
            case 3:
                log.accept(name)
                log.claim(name)
                log.refuse(name)
                log.settle(name, "failed", "connector.hermes_agent.remote_rejected")
            case 4:
                log.accept(name, Operation.RUN_STATUS, run_id=f"run_{number - 4}")
                log.see(f"run_{number - 4}", "running", session_id="other")
            case 5:
                log.end(f"run_{number - 5}", "completed", ("no_usage",) if number % 12 == 5 else ())
                log.accept(name)
