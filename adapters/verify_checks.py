"""The eight checks of the runs page, "Verify an integration", each through the host's public interface.

A check that needs a run, a guarded command, a restart or an hour says so by the flag that permits it. The stream of
check 7 is cut by a second reader at the endpoint, which takes the place of the host's: the endpoint has one queue for
one reader. Where an endpoint replays its events to any number of readers, its restart cuts the stream instead.
"""

from __future__ import annotations

import http.client
import shlex
import subprocess
from typing import Any
from urllib.parse import urlsplit

from adapters.client import segment
from adapters.conversation import ENDED, until
from adapters.verify_trial import Trial
from domain.errors import HostError

RESTART_S = 300
RETENTION_S, KEYED_RETENTION_S = 4_500, 88_200
RETENTION_LOOK_S = 2.0
NOT_FOUND = "connector.hermes_agent.run_not_found"

MUTATION = {"side_effects": ["read", "write", "external_network"], "key": "required", "retry": "unsafe"}
READ = {"side_effects": ["read", "external_network"], "key": "optional", "retry": "safe"}
EXPECTED: dict[str, dict[str, Any]] = {
    "run_start": MUTATION
    | {"risk": "medium", "approval": False, "modes": (True, True, False, False)}
    | {"sensitivity": "confidential", "pii": True, "timeout_ms": 60_000},
    "run_status": READ
    | {"risk": "low", "approval": False, "modes": (True, False, False, False)}
    | {"sensitivity": "internal", "pii": False, "timeout_ms": 60_000},
    "run_events": READ
    | {"risk": "low", "approval": False, "modes": (True, True, True, True)}
    | {"sensitivity": "confidential", "pii": False, "timeout_ms": 300_000},
    "run_approval": MUTATION
    | {"risk": "medium", "approval": True, "modes": (True, False, False, False)}
    | {"sensitivity": "restricted", "pii": True, "timeout_ms": 60_000},
    "run_stop": MUTATION
    | {"risk": "medium", "approval": True, "modes": (True, False, False, False)}
    | {"sensitivity": "restricted", "pii": True, "timeout_ms": 60_000},
}
"""The operations and the shared contract as the runs page publishes them; modes are sync, async, streaming, cancel."""


def discovery(trial: Trial) -> None:
    """1: exactly the five run capabilities, each with its contract."""
    prefix = f"cap:hermes_agent:{trial.endpoint_id}:"
    found = {c["id"]: c for c in trial.manifest["capabilities"] if c["id"].startswith(prefix)}
    run_ids = {name for name in found if name.startswith(f"{prefix}run_")}
    trial.other_capabilities = tuple(sorted(found.keys() - run_ids))
    trial.see("exactly the five run capabilities", run_ids == {prefix + operation for operation in EXPECTED})
    listed = trial.talk.asker.get("/aip/v1/capabilities").body["capabilities"]
    same = {c["id"]: c for c in listed if c["id"] in run_ids} == {name: found[name] for name in run_ids}
    trial.see("the list of capabilities says the same as the manifest", same)
    for operation, expected in EXPECTED.items():
        published = found.get(prefix + operation)
        wrong = _differences(published, expected) if published else ["missing"]
        trial.see(f"contract of {operation}" + (f" (differs: {', '.join(wrong)})" if wrong else ""), not wrong)


def _differences(published: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    contract = published["contract"]
    idempotency, execution, data = contract["idempotency"], contract["execution"], contract["data"]
    modes = tuple(execution[f"supports_{mode}"] for mode in ("sync", "async", "streaming", "cancel"))
    values = {
        "kind": (published["kind"], "workflow"),
        "stability": (published["stability"], "stable"),
        "risk": (published["risk"], expected["risk"]),
        "approval": (published["requires_human_approval"], expected["approval"]),
        "side_effects": (contract["side_effects"], expected["side_effects"]),
        "key": (idempotency["requirement"], expected["key"]),
        "key_ttl": (idempotency.get("ttl_ms"), 86_400_000 if expected["key"] == "required" else None),
        "collision": (idempotency["collision_behavior"], "return_original_result"),
        "key_scope": (idempotency["key_scope"], "capability"),
        "retry": (execution["retry_safety"], expected["retry"]),
        "modes": (modes, expected["modes"]),
        "sensitivity": (data["sensitivity"], expected["sensitivity"]),
        "pii": (data["contains_pii"], expected["pii"]),
        "redaction": (data["redaction_required"], True),
        "timeout": (contract["sla"]["timeout_ms"], expected["timeout_ms"]),
        "queue_delay": (contract["sla"]["max_queue_delay_ms"], 10_000),
        "availability": (contract["sla"]["availability_target"], "99.9%"),
        "compensation": (contract["compensation"]["mode"], "rollback_not_supported"),
    }
    approval = contract.get("approval")
    wanted = ["reason", "input_snapshot", "policy_decision"]
    if expected["approval"]:
        values["approval_ttl"] = ((approval or {}).get("ttl_ms"), 900_000)
        values["approval_evidence"] = ((approval or {}).get("evidence_requirements"), wanted)
    else:
        values["approval_contract"] = (approval, None)
    return [name for name, (is_, should_be) in values.items() if is_ != should_be]


def start(trial: Trial) -> None:
    """2: one start gives one new run, whose status becomes visible."""
    trial.need(trial.permits.start_runs, "--start-runs")
    run_id = trial.started("first", trial.permits.start_prompt)
    view = trial.talk.run_where(run_id, "be seen", lambda view: bool(view["states"]))
    runs = trial.talk.asker.get("/views/runs", run_id=run_id).body
    trial.see("the receipt names one run, and one Action started it", len(view["actions"]["run_start"]) == 1)
    trial.see("no other run has this handle", runs["total_size"] == 1)
    status = trial.talk.submit("run_status", {"run_id": run_id})
    trial.keep("first status", status["action_id"])
    trial.see("its status is visible", status["status"] == "completed" and bool(status["output"].get("status")))
    ended = trial.talk.run_in(run_id, *ENDED)
    trial.see("the run ends on terminal evidence", ended["end"]["known"])
    trial.finished_run = run_id


def stream(trial: Trial) -> None:
    """3: the one reader sees ordered frames and the end."""
    trial.need(trial.permits.start_runs, "--start-runs")
    run_id = trial.keep("first run", _finished(trial))
    view = trial.talk.run_where(
        run_id, "be read to its end", lambda view: not view["events"]["open"] and view["events"]["closed"] is not None
    )
    events = view["events"]
    numbers = [entry["sequence"] for entry in trial.talk.run_feed(run_id) if entry["kind"] == "provider.event"]
    trial.see("one reader", events["subscriptions"] == 1)
    trial.see("frames in order, none missing", bool(numbers) and numbers == list(range(1, events["stored"] + 1)))
    trial.see("a terminal event, and no gap", bool(events["terminal"]) and not events["gaps"])
    read = trial.talk.submit("run_events", {"run_id": run_id})
    trial.keep("first events", read["action_id"])
    output = read.get("output", {})
    whole = read["status"] == "completed" and output.get("terminal") and len(output["events"]) == events["stored"]
    trial.see("run_events answers all of them and the end", bool(whole))


def isolation(trial: Trial) -> None:
    """4: two runs of one session wait with requests of their own."""
    trial.need(bool(trial.permits.approval_prompt), "--approval-prompt")
    session = trial.clock.new_id("verify_")
    first, one = trial.asking("left", session)
    second, other = trial.asking("right", session)
    trial.waiting_runs = (first, second)
    sessions = {view["session"]["effective"] or view["session"]["sent"] for view in (one, other)}
    trial.see("both work under one session", sessions == {session})
    trial.see("the two runs differ", first != second)
    for name, run_id in (("left", first), ("right", second)):
        view = trial.talk.run(run_id)
        trial.see(f"{name}: one request of its own waits", len(view["pending_approvals"]) == 1)
        trial.see(f"{name}: no choice was sent", not view["choices"])


def approval(trial: Trial) -> None:
    """5: nothing is sent without a decision of a second principal, and then only to the run it names."""
    trial.need(bool(trial.permits.approval_prompt), "--approval-prompt")
    left, right = _waiting(trial)
    ask = trial.talk.run(left)["pending_approvals"][0]
    pending = trial.choose("left", left, ask)
    trial.see("the choice waits for a decision", pending["status"] == "pending_approval")
    approval_id = str(pending["output"]["approval_id"])
    code = trial.talk.own_decision(approval_id)
    trial.see(f"its requester may not decide it: {code or 'was not refused'}", code.startswith(("policy.", "auth.")))
    view = trial.talk.run(left)
    trial.see("without a decision nothing was sent", not view["choices"] and len(view["pending_approvals"]) == 1)
    settled = trial.talk.decide(approval_id)
    trial.see("with it, the choice is taken", settled["status"] == "completed")
    evidence = trial.talk.asker.get(f"/aip/v1/approvals/{segment(approval_id)}").body["approval_record_view"]
    kinds = {item["kind"] for item in evidence["request"]["evidence"]}
    named = evidence["decision"]["approver"]["id"] != evidence["request"]["requester"]["id"]
    trial.see("the decision names another principal and the input that was reviewed", named and len(kinds) >= 2)
    after = trial.talk.run_where(left, "go on", lambda view: not view["pending_approvals"])
    trial.see("one choice was sent to the run that was named", len(after["choices"]) == 1)
    other = trial.talk.run(right)
    trial.see("the other run still waits, untouched", len(other["pending_approvals"]) == 1 and not other["choices"])


def _finished(trial: Trial) -> str:
    if not trial.finished_run:
        raise HostError("connector_host.not_ready", "Check 2 left no finished run.")
    return trial.finished_run


def _waiting(trial: Trial) -> tuple[str, str]:
    if len(trial.waiting_runs) != 2:
        raise HostError("connector_host.not_ready", "Check 4 left no two waiting runs.")
    return trial.waiting_runs[0], trial.waiting_runs[1]


def stop(trial: Trial) -> None:
    """6: a stop's receipt is not taken for an end; the run is followed to one."""
    trial.need(bool(trial.permits.approval_prompt), "--approval-prompt")
    run_id = trial.keep("right run", _waiting(trial)[1])
    pending = trial.talk.submit("run_stop", {"run_id": run_id}, trial.clock.new_id("verify_"))
    trial.keep("stop", pending["action_id"])
    settled = trial.talk.decide(str(pending["output"]["approval_id"]))
    trial.see("the stop is taken, as a receipt", settled["status"] == "completed")
    view = trial.talk.run_in(run_id, *ENDED)
    trial.see(f"followed to terminal evidence: {view['state']}", view["end"]["known"])
    trial.see("one stop was sent", len(view["stops"]) == 1)


def reconciliation(trial: Trial) -> None:
    """7: a stream that was cut is told as a gap, and the end is read from status."""
    trial.need(bool(trial.permits.approval_prompt), "--approval-prompt")
    replays = bool((trial.target.get("features") or {}).get("replay"))
    trial.need(not replays or bool(trial.permits.restart_command), "--restart-command")
    trial.need(replays or trial.key is not None, "--config (naming the endpoint's key file)")
    run_id, view = trial.asking("cut")
    if replays:
        _restart(trial)
    else:
        _take_over_stream(trial, run_id)
        pending = trial.choose("cut", run_id, view["pending_approvals"][0])
        trial.talk.decide(str(pending["output"]["approval_id"]))
    view = trial.talk.run_where(
        run_id, "end with its stream closed", lambda view: view["state"] in ENDED and not view["events"]["open"]
    )
    events, end = view["events"], view["end"]
    trial.see("the missing events are told as a gap", len(events["gaps"]) >= 1)
    trial.see(f"the end is known by status: {view['state']}", end["known"] and end["source"] == "status")
    trial.see("no terminal event is claimed", not events["terminal"])
    closed = all(gap["closed_by"] == "terminal_status" for gap in events["gaps"])
    trial.see("the gap ends at the status, not at a replay", closed)


def _take_over_stream(trial: Trial, run_id: str) -> None:
    """Read beside the host and leave: what the endpoint would send to the host's reader is lost from then on."""
    prefix = f"cap:hermes_agent:{trial.endpoint_id}:run_events"
    binding = next(c["bindings"][0] for c in trial.manifest["capabilities"] if c["id"] == prefix)
    parts = urlsplit(binding["base_url"])
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=30)
    token = trial.key.reveal() if trial.key else ""
    try:
        connection.request("GET", f"/v1/runs/{segment(run_id)}/events", headers={"Authorization": f"Bearer {token}"})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise HostError("connector_host.not_ready", "The endpoint cannot be reached from here.") from error
    finally:
        connection.close()
    trial.see("a second reader is let in at the endpoint", status == 200)


def loss(trial: Trial) -> None:
    """8: a run that retention or a restart took is told as evidence lost, never as nothing happened."""
    permits = trial.permits
    flags = [("--start-runs", permits.start_runs), ("--approval-prompt", bool(permits.approval_prompt))]
    flags += [("--retention", permits.retention), ("--restart-command", bool(permits.restart_command))]
    missing = [flag for flag, given in flags if not given]
    trial.need(not missing, " ".join(missing))
    _await_expiry(trial)
    run_id, view = trial.asking("restarted")
    action_id = view["actions"]["run_start"][0]
    _restart(trial)
    view = trial.talk.run_in(run_id, *ENDED)
    if view["state"] == "interrupted":
        trial.see("the restart is told as an interruption by the endpoint itself", view["end"]["known"])
    else:
        trial.see("the run is unknown: its evidence is lost", view.get("unknown_reason") == "evidence_lost")
        trial.see("no end is claimed", not view["end"]["known"])
        causes = {cause["cause"] for cause in view["end"]["missing_can_mean"]}
        trial.see("a restart is among the causes that are told", "process_restart" in causes)
        needs = trial.talk.asker.get("/views/needs-person", limit=1000).body["needs_person"]
        waits = any(need.get("run_id") == run_id and need["reason"] == "run_evidence_lost" for need in needs)
        trial.see("a person is asked to look", waits)
    explained = trial.talk.explained(action_id)
    trial.see("what it may have done is told as unknown", bool(explained["facts_unknown"]))
    trial.see("its effect is not told as none", explained["effect"] != "none")


def _await_expiry(trial: Trial) -> None:
    """Read a finished run's status until the endpoint has dropped it; what is stored of its end stays.

    That takes an hour, and a day where the endpoint keeps a durable record of runs that were started with a key.
    """
    run_id = trial.keep("expired run", _finished(trial))
    before = trial.talk.run(run_id)

    def look() -> dict[str, Any] | None:
        result = trial.talk.submit("run_status", {"run_id": run_id})
        return result if result["status"] != "completed" else None

    keyed = (trial.target.get("features") or {}).get("durable_keys")
    patience = KEYED_RETENTION_S if keyed else RETENTION_S
    gone = until(look, "the endpoint to drop a finished run", patience, pause_s=RETENTION_LOOK_S)
    trial.keep("expired status", gone["action_id"])
    error = gone.get("error") or {}
    trial.see("a status that was dropped is told as not found", error.get("code") == NOT_FOUND)
    trial.see("with the last observation beside it", bool((error.get("details") or {}).get("last_observation")))
    after = trial.talk.run(run_id)
    trial.see("what was proven stays proven", after["state"] == before["state"] and after["end"]["known"])


def _restart(trial: Trial) -> None:
    try:
        done = subprocess.run(
            shlex.split(trial.permits.restart_command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=RESTART_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError("connector_host.not_ready", f"The restart command failed: {type(error).__name__}.") from error
    trial.see("the restart command succeeded", done.returncode == 0)


CHECKS = (
    ("discovery shows exactly the five run capabilities and their contracts", discovery),
    ("a start gives a unique run whose status becomes visible", start),
    ("the one reader sees ordered frames and an end", stream),
    ("two runs of one session have approval queues of their own", isolation),
    ("a choice needs approval evidence and reaches only its run", approval),
    ("a stop is followed to an explained outcome", stop),
    ("a cut stream is reconciled by status and claims no replay", reconciliation),
    ("restart and retention are told as loss of evidence", loss),
)
