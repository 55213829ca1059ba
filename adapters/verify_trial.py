"""One check of the verification while it is made: what it saw, whom it speaks of, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from adapters.client import CallFailed
from adapters.clock import SystemClock
from adapters.conversation import Conversation
from adapters.credentials import Secret
from domain.errors import HostError
from domain.values import rfc3339

PASSED, FAILED, NOT_TRIED = "passed", "failed", "not_tried"


class Permits(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator permits beyond harmless reads."""

    start_runs: bool = False
    start_prompt: str = ""
    approval_prompt: str = ""
    restart_command: str = ""
    retention: bool = False
    wait_s: int = 120


class NotPermitted(Exception):
    """A check that was not made, and the flag that permits it."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One expectation and whether it was seen."""

    expected: str
    seen: bool


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one check ended. ``subjects`` are the runs and Actions in which the host keeps the evidence."""

    number: int
    title: str
    result: str
    began_at: str
    ended_at: str
    permit: str = ""
    problem: str = ""
    observations: tuple[Observed, ...] = ()
    subjects: dict[str, str] = {}
    other_capabilities: tuple[str, ...] = ()


class Trial:
    """What the checks of one endpoint share: the conversation, the permits, and what earlier checks left."""

    def __init__(
        self,
        talk: Conversation,
        permits: Permits,
        manifest: dict[str, Any],
        key: Secret | None,
    ) -> None:
        self.talk, self.permits, self.manifest, self.key = talk, permits, manifest, key
        self.clock = SystemClock()
        self.target: dict[str, Any] = {}
        self.finished_run = ""
        self.waiting_runs: tuple[str, ...] = ()
        self.other_capabilities: tuple[str, ...] = ()
        self._observations: list[Observed] = []
        self._subjects: dict[str, str] = {}

    @property
    def endpoint_id(self) -> str:
        """The endpoint under verification."""
        return self.talk.endpoint_id

    def see(self, expected: str, seen: bool) -> None:
        """One expectation of the check at hand."""
        self._observations.append(Observed(expected=expected, seen=bool(seen)))

    def keep(self, name: str, subject: str) -> str:
        """Name a run or an Action in the record."""
        self._subjects[name] = subject
        return subject

    def need(self, permitted: bool, flag: str) -> None:
        """Raise NotPermitted with the flag that is missing."""
        if not permitted:
            raise NotPermitted(flag)

    def started(self, name: str, prompt: str, session: str = "") -> str:
        """Start a run once; its handle. Learns the endpoint's identity from the claim."""
        body = {"input": prompt} | ({"session_id": session} if session else {})
        result = self.talk.submit("run_start", {"body": body}, self.clock.new_id("verify_"))
        action_id = self.keep(f"{name} start", result["action_id"])
        if result["status"] != "completed":
            error = result.get("error") or {}
            raise HostError(
                "connector_host.not_ready", f"The start was not taken: {error.get('code', result['status'])}."
            )
        self.target = self._claimed(action_id) or self.target
        return self.keep(f"{name} run", str(result["output"]["run_id"]))

    def _claimed(self, action_id: str) -> dict[str, Any]:
        page = self.talk.asker.get(f"/aip/v1/actions/{action_id}/events").body["action_events"]["events"]
        claims = [event["data"] for event in page if event["kind"] == "attempt.claimed"]
        return dict(claims[-1].get("target") or {}) if claims else {}

    def asking(self, name: str, session: str = "") -> tuple[str, dict[str, Any]]:
        """Start a run whose prompt makes the agent ask; its handle and view. HostError if it does not ask."""
        run_id = self.started(name, self.permits.approval_prompt, session)
        view = self.talk.asked(run_id)
        if not view["pending_approvals"]:
            raise HostError("connector_host.not_ready", f"The agent did not ask; the run is {view['state']}.")
        return run_id, view

    def choose(self, name: str, run_id: str, ask: dict[str, Any]) -> dict[str, Any]:
        """Submit the choice ``deny`` for a reviewed request; the pending result."""
        given = {"run_id": run_id, "choice": "deny", "reviewed": ask["digest"]}
        result = self.talk.submit("run_approval", given, self.clock.new_id("verify_"))
        self.keep(f"{name} choice", result["action_id"])
        return result

    def make(self, number: int, title: str, check: Callable[[Trial], None]) -> CheckResult:
        """Make one check and tell how it ended; a check that saw nothing has not passed."""
        self._observations, self._subjects = [], {}
        began, permit, problem = self.clock.now(), "", ""
        try:
            check(self)
        except NotPermitted as missing:
            permit = str(missing)
        except CallFailed as error:
            problem = f"{error.code}: {error}"
        except HostError as error:
            problem = f"{error.code}: {error.message}"
        good = bool(self._observations) and not problem and all(item.seen for item in self._observations)
        return CheckResult(
            number=number,
            title=title,
            result=NOT_TRIED if permit else PASSED if good else FAILED,
            began_at=rfc3339(began),
            ended_at=rfc3339(self.clock.now()),
            permit=permit,
            problem=problem,
            observations=tuple(self._observations),
            subjects=dict(self._subjects),
            other_capabilities=self.other_capabilities if number == 1 else (),
        )
