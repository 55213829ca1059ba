"""The tour: one story on real processes, told while it is played, every expectation checked.

A start, a choice and a stop that two people agree on; a receipt that gets lost; a Hermes that is killed while a run
works; a host that is killed between claim and receipt. At its end the provider's own count of requests is compared
with what the host claimed: nothing was sent twice.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters.client import CallFailed
from adapters.conversation import until
from adapters.tour_stage import START_S, Stage

LONG = "SLEEP 60"
UNKNOWN_CODE = "connector.hermes_agent.outcome_unknown"


def play(folder: Path | None, tell: Callable[[str], None]) -> dict[str, Any]:
    """Play in ``folder`` (a temporary one without), telling each step; the report says whether all came as expected."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty")
        return _Tour(folder, tell).play()
    with tempfile.TemporaryDirectory(prefix="hermes-reconciler-tour-", ignore_cleanup_errors=True) as made:
        Path(made).chmod(0o711)
        return _Tour(Path(made), tell).play()


class _Tour:
    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._stage, self._tell = Stage(folder), tell
        self._checks: list[dict[str, Any]] = []
        self._scene = ""
        self._claims = {"start": 0, "approval": 0, "stop": 0}

    def play(self) -> dict[str, Any]:
        stage = self._stage
        began = stage.clock.monotonic()
        with stage:
            self._open("Start the processes")
            self._tell(f"  practice Hermes is process {stage.start_hermes()}")
            self._tell(f"  the host is process {stage.start_host()}, with an embedded PostgreSQL; {stage.public}")
            first = self._start()
            self._approve()
            self._stop()
            self._lost_receipt()
            lost = self._hermes_killed()
            doubtful = self._host_killed()
            ledger = self._count()
            views = {
                "first_run": stage.talk().run(first),
                "lost_run": stage.talk().run(lost),
                "explained": stage.talk().explained(doubtful),
                "recovery": stage.admin.get("/views/recovery").body,
            }
        seconds = round(stage.clock.monotonic() - began, 1)
        failed = [check for check in self._checks if not check["seen"]]
        self._tell(f"\n{len(self._checks) - len(failed)} of {len(self._checks)} expectations seen in {seconds} s.")
        return {"passed": not failed, "seconds": seconds, "checks": self._checks, "ledger": ledger, "views": views}

    def _open(self, title: str) -> None:
        self._scene = title
        self._tell(f"\n{title}")

    def _expect(self, what: str, seen: bool) -> None:
        self._checks.append({"scene": self._scene, "expected": what, "seen": seen})
        self._tell(f"  {'seen  ' if seen else 'MISSED'}  {what}")

    # ---- scenes ------------------------------------------------------------------------------------------------------

    def _started(self, prompt: str, key: str) -> str:
        """Start a run; its handle."""
        self._claims["start"] += 1
        result = self._stage.talk().submit("run_start", {"body": {"input": prompt}}, key)
        return str(result.get("output", {}).get("run_id", ""))

    def _start(self) -> str:
        self._open("1. Start a run and read its end")
        run_id = self._started("TEXT good morning", "tour-start")
        self._expect("the start settles with the provider's receipt", run_id.startswith("run_"))
        view = self._stage.talk().run_in(run_id, "completed", "failed", "unknown")
        self._expect("the run completes on terminal evidence", view["state"] == "completed" and view["end"]["known"])
        again = self._stage.talk().submit("run_start", {"body": {"input": "TEXT good morning"}}, "tour-start")
        output = again.get("output", {})
        same = output.get("run_id") == run_id and output.get("idempotent_replay") is True
        self._expect("the same key answers the same run, and nothing is sent", same)
        return run_id

    def _approve(self) -> None:
        self._open("2. A command that must be approved, by somebody else than who asks")
        stage = self._stage
        run_id = self._started("ASK rm -rf /srv/tour-example", "tour-ask")
        asks = stage.talk().asked(run_id)["pending_approvals"]
        self._expect("the run waits with one request to be reviewed", len(asks) == 1)
        given = {"run_id": run_id, "choice": "once", "reviewed": asks[0]["digest"]}
        pending = stage.talk().submit("run_approval", given, "tour-choice")
        self._expect("the choice waits for a decision; nothing is sent", pending["status"] == "pending_approval")
        self._expect("no choice has reached the provider", stage.ledger()["requests"].get("approval", 0) == 0)
        approval_id = pending["output"]["approval_id"]
        code = stage.talk().own_decision(approval_id)
        self._expect(f"the requester may not decide its own request: {code}", code.startswith("policy."))
        self._claims["approval"] += 1
        result = stage.talk().decide(approval_id)
        self._expect("approved by a second principal, the choice is sent once", result["status"] == "completed")
        ended = stage.talk().run_in(run_id, "completed", "failed", "unknown")
        self._expect("the run goes on and completes", ended["state"] == "completed")

    def _stop(self) -> None:
        self._open("3. Stop a run and follow it to its end")
        stage = self._stage
        run_id = self._started(LONG, "tour-long")
        stage.talk().run_in(run_id, "running")
        pending = stage.talk().submit("run_stop", {"run_id": run_id}, "tour-stop")
        self._claims["stop"] += 1
        result = stage.talk().decide(pending["output"]["approval_id"])
        self._expect("the stop is taken: a receipt, not an end", result["status"] == "completed")
        view = stage.talk().run_in(run_id, "cancelled", "completed", "failed", "unknown")
        self._expect("later evidence proves the run cancelled", view["state"] == "cancelled" and view["end"]["known"])

    def _lost_receipt(self) -> None:
        self._open("4. The provider takes a start and its receipt is lost")
        stage = self._stage
        stage.fault(kind="drop", route="start", carried_out=True)
        self._claims["start"] += 1
        given = {"body": {"input": "TEXT lost receipt"}}
        first = stage.talk().submit("run_start", given, "tour-lost")
        code = (first.get("error") or {}).get("code")
        self._expect(
            "the outcome is told as unknown, not as failed",
            first["status"] == "requires_human" and code == UNKNOWN_CODE,
        )
        before = stage.ledger()["starts_received"]
        again = stage.talk().submit("run_start", given, "tour-lost")
        self._expect("the same key answers the same unknown Action", again["action_id"] == first["action_id"])
        self._expect("and the provider received no second start", stage.ledger()["starts_received"] == before)

    def _hermes_killed(self) -> str:
        self._open("5. Hermes is killed while a run works")
        stage = self._stage
        run_id = self._started(LONG, "tour-killed")
        stage.talk().run_in(run_id, "running")
        stage.kill_hermes()
        self._tell("  SIGKILL to Hermes; it starts again and knows none of its runs")
        stage.start_hermes()
        view = stage.talk().run_in(run_id, "unknown", "completed", "failed", "cancelled")
        lost = view["state"] == "unknown" and view["unknown_reason"] == "evidence_lost"
        self._expect("the run is told as unknown: its evidence is lost", lost)
        self._expect("no end is claimed for it", not view["end"]["known"])
        return run_id

    def _host_killed(self) -> str:
        self._open("6. The host is killed between claim and receipt")
        stage = self._stage
        before = stage.ledger()["starts_received"]
        stage.fault(kind="hang", route="start", carried_out=True, seconds=30.0)
        given, seen = {"body": {"input": "TEXT while the host dies"}}, list[CallFailed]()
        self._claims["start"] += 1

        def ask() -> None:
            try:
                stage.talk().submit("run_start", given, "tour-host")
            except CallFailed as error:
                seen.append(error)

        caller = threading.Thread(target=ask)
        caller.start()
        until(lambda: stage.ledger()["starts_received"] > before or None, "the start to reach the provider", START_S)
        stage.kill_host()
        caller.join()
        self._tell("  SIGKILL to the host while it waits for the receipt; its database dies with it")
        told = bool(seen) and seen[0].code == "client.answer_lost" and seen[0].unknown
        self._expect("the caller's client says: unknown, repeat with the same key", told)
        self._tell(f"  the host is started again, process {stage.start_host()}")
        again = stage.talk().submit("run_start", given, "tour-host")
        self._expect("the repeated key finds the claim: outcome unknown", again["status"] == "requires_human")
        after = stage.ledger()["starts_received"]
        self._expect("and no second start was sent", after == before + 1)
        explained = stage.talk().explained(again["action_id"])
        for fact in explained["facts_known"]:
            self._tell(f"    known    {fact['fact']}")
        for fact in explained["facts_unknown"]:
            self._tell(f"    unknown  {fact['fact']}")
        for never in explained["must_not"]:
            self._tell(f"    never    {never}")
        self._expect(
            "what is not known is told", bool(explained["facts_unknown"]) and explained["effect"] == "possible"
        )
        return str(again["action_id"])

    def _count(self) -> dict[str, Any]:
        self._open("7. What the provider counted")
        ledger = self._stage.ledger()
        requests = {name: ledger["requests"].get(name, 0) for name in self._claims}
        for name, claimed in self._claims.items():
            self._expect(f"{name}: {claimed} claimed, {requests[name]} received", requests[name] == claimed)
        self._expect(
            "one command was approved and carried out once", ledger["choices_applied"] == ledger["tool_effects"] == 1
        )
        return {"requests": requests, "claimed": dict(self._claims), "runs_created": ledger["runs_created"]}
