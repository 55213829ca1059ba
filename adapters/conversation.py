"""Two principals who work with one endpoint through a running host: what the tour and the verification do alike.

Every wait looks for a condition and gives up after a time with HostError ``connector_host.not_ready``, which says what
never came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from adapters.client import Api, CallFailed, segment
from adapters.clock import SystemClock
from domain.errors import HostError

LOOK_S = 0.05
NOT_NOW_S = 0.5
NOT_NOW = ("connector_host.not_ready", "connector_host.capacity")
ENDED = ("completed", "failed", "cancelled", "interrupted", "unknown")
_Seen = TypeVar("_Seen")
_PAUSE = threading.Event()


def until(look: Callable[[], _Seen | None], what: str, seconds: float, *, pause_s: float = LOOK_S) -> _Seen:
    """Look again and again until there is something."""
    clock = SystemClock()
    give_up = clock.monotonic() + seconds
    while (seen := look()) is None:
        if clock.monotonic() > give_up:
            raise HostError("connector_host.not_ready", f"Waited {seconds:.0f} s in vain for {what}.")
        _PAUSE.wait(pause_s)
    return seen


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """``asker`` submits, ``approver`` decides; ``wait_s`` bounds each wait."""

    asker: Api
    approver: Api
    endpoint_id: str
    wait_s: float = 60.0

    def submit(self, operation: str, given: dict[str, Any], key: str = "") -> dict[str, Any]:
        """Submit one Action and wait for its ``action_result``; again while the host takes no work for the moment."""
        body = {"capability_id": f"cap:hermes_agent:{self.endpoint_id}:{operation}", "input": given}

        def attempt() -> dict[str, Any] | None:
            try:
                return self.asker.post("/aip/v1/actions", body, key=key).body
            except CallFailed as error:
                if error.code not in NOT_NOW:
                    raise
                return None

        told = until(attempt, f"the host to take a {operation}", self.wait_s, pause_s=NOT_NOW_S)
        if "action_result" in told:
            return dict(told["action_result"])
        return self.result(told["ack"]["action_id"])

    def decide(self, approval_id: str, decision: str = "approved") -> dict[str, Any]:
        """Decide as the approver; the Action's result after that."""
        body = {"decision": decision, "reason": "decided by a second principal"}
        self.approver.post(f"/aip/v1/approvals/{segment(approval_id)}/decision", body)
        return self.result(approval_id.removeprefix("appr_"))

    def own_decision(self, approval_id: str) -> str:
        """Try to decide as the one who asks; the code of the refusal, empty if there was none."""
        try:
            body = {"decision": "approved", "reason": "decided by its requester"}
            self.asker.post(f"/aip/v1/approvals/{segment(approval_id)}/decision", body)
        except CallFailed as error:
            return error.code
        return ""

    def result(self, action_id: str) -> dict[str, Any]:
        """The result of an Action once it waits for no decision and is there."""

        def look() -> dict[str, Any] | None:
            try:
                told = self.asker.get(f"/aip/v1/actions/{segment(action_id)}/result").body["action_result"]
            except CallFailed as error:
                if error.code != "action.result_not_ready":
                    raise
                return None
            return None if told["status"] == "pending_approval" else dict(told)

        return until(look, f"a result of {action_id}", self.wait_s)

    def explained(self, action_id: str) -> dict[str, Any]:
        """The explained Action."""
        return self.asker.get(f"/views/actions/{segment(action_id)}").body

    def run(self, run_id: str) -> dict[str, Any]:
        """The view of a run; empty while the view has not reached it."""
        try:
            return self.asker.get(f"/views/runs/{segment(run_id)}", endpoint_id=self.endpoint_id).body
        except CallFailed as error:
            if error.status != 404:
                raise
            return {}

    def run_where(self, run_id: str, what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The view of a run once a condition holds for it; ``what`` names the condition."""

        def look() -> dict[str, Any] | None:
            view = self.run(run_id)
            return view if view and holds(view) else None

        return until(look, f"{run_id} to {what}", self.wait_s)

    def run_in(self, run_id: str, *states: str) -> dict[str, Any]:
        """The view of a run once it is in one of these states."""
        return self.run_where(run_id, f"be {' or '.join(states)}", lambda view: view["state"] in states)

    def asked(self, run_id: str) -> dict[str, Any]:
        """The view of a run once the provider waits for a choice, or the run is over."""
        return self.run_where(run_id, "ask", lambda view: bool(view["pending_approvals"]) or view["state"] in ENDED)

    def run_feed(self, run_id: str) -> Iterator[dict[str, Any]]:
        """Every stored event of a run, page by page."""
        cursor, terminal = "", False
        while not terminal:
            query = {"endpoint_id": self.endpoint_id, "after": cursor, "limit": 1000}
            page = self.asker.get(f"/views/runs/{segment(run_id)}/events", **query).body
            yield from page["events"]
            cursor, terminal = page["cursor"], page["terminal"] or not page["events"]
