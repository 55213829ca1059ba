"""Every command against a running host: what it prints, its JSON, its exit code."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from adapters.client import Api, CallFailed
from adapters.conversation import Conversation, until
from adapters.credentials import bearer_key
from tests.host_process import HostProcess, Ran, run

pytestmark = pytest.mark.postgres

LOST = {"kind": "drop", "route": "start", "carried_out": True}


def submit(host: HostProcess, text: str, *more: str) -> Ran:
    return host.command("actions", "submit", "run_start", "--text", text, *more)


def talk(host: HostProcess) -> Conversation:
    admin, approver = (Api(host.public, bearer_key(host.state / f"{name}-token")) for name in ("admin", "approver"))
    return Conversation(asker=admin, approver=approver, endpoint_id="practice")


def practice(host: HostProcess) -> Api:
    manifest = talk(host).asker.get("/aip/v1/manifest").body
    origin = manifest["capabilities"][0]["bindings"][0]["base_url"]
    return Api(origin, bearer_key(host.state / "practice" / "key"))


def started(host: HostProcess, text: str) -> dict[str, Any]:
    ran = submit(host, text, "--json")
    assert ran.code == 0, ran.err
    result: dict[str, Any] = ran.json["action_result"]
    return result


def test_a_start_is_submitted_and_answered_with_its_receipt(host: HostProcess) -> None:
    ran = submit(host, "TEXT hello", "--key", "cli-1")
    assert ran.code == 0
    assert "completed" in ran.out
    assert "run_" in ran.out
    again = submit(host, "TEXT hello", "--key", "cli-1", "--json").json["action_result"]
    assert again["output"]["idempotent_replay"] is True
    assert again["action_id"] in ran.out


def test_another_request_under_the_same_key_is_refused_with_code_effect_and_whether_to_retry(host: HostProcess) -> None:
    submit(host, "TEXT one", "--key", "cli-2")
    ran = submit(host, "TEXT two", "--key", "cli-2")
    assert (ran.code, ran.out) == (1, "")
    assert "idempotency.input_hash_mismatch: " in ran.err
    assert "effect: none; do not repeat it unchanged" in ran.err
    error = submit(host, "TEXT two", "--key", "cli-2", "--json").json["error"]
    assert (error["code"], error["retryable"]) == ("idempotency.input_hash_mismatch", False)


def test_a_mutation_without_a_key_gets_one_and_tells_it(host: HostProcess) -> None:
    ran = submit(host, "TEXT keyless")
    key = next(line for line in ran.err.splitlines() if line.startswith("idempotency key: ")).split(": ")[1]
    assert ran.code == 0
    assert submit(host, "TEXT keyless", "--key", key, "--json").json["action_result"]["action_id"] in ran.out


@pytest.mark.proves("A156")
def test_an_unknown_outcome_ends_with_3_and_is_explained(host: HostProcess) -> None:
    practice(host).post("/practice/faults", {"add": [LOST]})
    ran = submit(host, "TEXT lost", "--key", "cli-lost", "--json")
    assert ran.code == 3
    result = ran.json["action_result"]
    assert (result["status"], result["settled"]) == ("requires_human", False)
    action_id = result["action_id"]
    assert host.command("actions", "result", action_id).code == 3
    told = host.command("recovery", "explain", action_id)
    assert told.code == 0
    for word in ("known ", "unknown ", "next ", "never "):
        assert f"  {word}" in told.out
    explained = host.command("actions", "show", action_id, "--json").json
    assert (explained["effect"], explained["state"]) == ("possible", "unknown")
    needs = host.command("recovery", "needs-person", "--json").json["needs_person"]
    assert [need["reason"] for need in needs if need["action_id"] == action_id] == ["outcome_unknown"]
    assert action_id in host.command("recovery", "show").out


def test_a_choice_is_reviewed_submitted_and_decided_by_another_principal(host: HostProcess) -> None:
    run_id = started(host, "ASK rm -rf /srv/cli-example")["output"]["run_id"]
    ask = talk(host).asked(run_id)["pending_approvals"][0]
    assert ask["digest"] in host.command("runs", "show", run_id).out
    words = ("actions", "submit", "run_approval", "--run-id", run_id, "--choice", "deny", "--reviewed", ask["digest"])
    pending = host.command(*words, "--reason", "not this one")
    assert pending.code == 0
    approval_id = next(word for word in pending.out.split() if word.startswith("appr_"))
    assert approval_id in host.command("approvals", "list", "--status", "pending").out
    assert host.command("approvals", "show", approval_id, "--json").json["approval_record_view"]["status"] == "pending"
    own = host.command(
        "approvals", "decide", approval_id, "approved", "--token-file", str(host.state / "admin-token"), "--json"
    )
    assert (own.code, own.json["error"]["code"].split(".")[0]) == (1, "policy")
    decided = host.command("approvals", "decide", approval_id, "approved", "--reason", "read it")
    assert decided.code == 0
    assert any(line.split() == ["decided", "by", "approver"] for line in decided.out.splitlines())
    assert talk(host).result(approval_id.removeprefix("appr_"))["status"] == "completed"
    assert talk(host).run_in(run_id, "completed")["end"]["known"]


def test_runs_actions_and_audit_are_listed_as_tables_and_as_json(host: HostProcess) -> None:
    run_id = started(host, "TEXT listed")["output"]["run_id"]
    talk(host).run_in(run_id, "completed")
    runs = host.command("runs", "list")
    assert runs.out.splitlines()[0].split() == ["RUN", "ENDPOINT", "STATE", "ASKS", "GAPS", "CHANGED"]
    assert any(line.split()[:3] == [run_id, "practice", "completed"] for line in runs.out.splitlines())
    assert run_id in {run["run_id"] for run in host.command("runs", "list", "--json").json["runs"]}
    assert host.command("actions", "list", "--limit", "2", "--json").json["action_list"]["total_size"] >= 1
    assert "More: --cursor" in host.command("actions", "list", "--limit", "1").out
    page = host.command("audit", "events", "--run-id", run_id, "--json").json["audit_query_result"]
    assert {"run.bound", "run.ended"} <= {event["action"] for event in page["events"]}
    assert "run.bound" in host.command("audit", "events", "--run-id", run_id).out


def test_events_are_followed_to_their_end(host: HostProcess) -> None:
    result = started(host, "TEXT followed to the end")
    run_id, action_id = result["output"]["run_id"], result["action_id"]
    ran = host.command("actions", "events", action_id, "--follow", "--json")
    kinds = [json.loads(line)["event"] for line in ran.out.splitlines()]
    assert (ran.code, kinds[0], kinds[-1]) == (0, "aip.action.ack", "aip.stream.terminal")
    ran = host.command("runs", "events", run_id, "--follow")
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "Nothing can follow.")
    assert "run.completed" in host.command("runs", "events", run_id).out
    assert "attempt.claimed" in host.command("actions", "events", action_id).out


def test_a_waiting_action_is_cancelled_without_effect_and_a_settled_one_refuses(host: HostProcess) -> None:
    result = started(host, "SLEEP 20")
    run_id = result["output"]["run_id"]
    stop = host.command("actions", "submit", "run_stop", "--run-id", run_id, "--json").json["action_result"]
    cancelled = host.command("actions", "cancel", stop["action_id"], "--reason", "changed my mind")
    assert cancelled.code == 0
    assert "cancelled without effect" in cancelled.out
    refused = host.command("actions", "cancel", result["action_id"])
    assert (refused.code, "action.already_settled" in refused.err, run_id in refused.err) == (1, True, True)


def test_unknown_ids_missing_hosts_and_wrong_usage_have_their_exit_codes(host: HostProcess) -> None:
    assert host.command("runs", "show", "run_nothing").code == 1
    assert host.command("actions", "show", "act_nothing", "--json").json["error"]["code"] == "action.not_found"
    nobody = run("runs", "list", "--url", "http://127.0.0.1:9", "--config", str(host.config), "--json")
    assert (nobody.code, nobody.json["error"]["code"], nobody.json["error"]["effect"]) == (
        1,
        "client.unreachable",
        "none",
    )
    wrong = host.command("approvals", "decide", "appr_x", "perhaps")
    assert (wrong.code, wrong.out) == (2, "")
    assert run("nonsense").code == 2
    assert host.command("actions", "submit", "run_start", "--input", "[1]").code == 2
    lost = run("runs", "list", "--url", host.public, "--token-file", "/nowhere/token")
    assert (lost.code, "settings.secret_file" in lost.err) == (1, True)


def test_a_token_is_made_into_a_file_and_printed_nowhere(tmp_path: Path) -> None:
    principals, token = tmp_path / "principals.toml", tmp_path / "reader-token"
    words = ["token", "new", "reader", "--token-file", str(token), "--principals", str(principals)]
    words += ["--scope", "action:read", "--role", "viewer"]
    ran = run(*words, "--json")
    assert ran.code == 0
    secret = token.read_text().strip()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert secret not in ran.out + ran.err + principals.read_text()
    assert ran.json["entry"]["scopes"] == ["action:read"]
    assert run(*words).code == 2, "an existing token file is kept"
    assert token.read_text().strip() == secret
    again = run("token", "import", "other", "--token-file", str(token), "--principals", str(principals))
    assert (again.code, "same token" in again.err) == (1, True)
    assert run("token", "new", "x", "--token-file", str(tmp_path / "x"), "--scope", "action:fly").code == 1
    assert not (tmp_path / "x").exists()
    assert principals.read_text().count("[[principals]]") == 1
    checked = run("settings", "check", environ={"HERMES_RECONCILER_PRINCIPALS__FILE": str(principals)}, cwd=tmp_path)
    assert (checked.code, "ok  principals: 1 tokens" in checked.out) == (0, True)


@pytest.mark.slow
def test_a_running_host_admits_a_new_token_after_a_hangup(tmp_path: Path) -> None:
    def new(name: str) -> Path:
        file = tmp_path / f"{name}-key"
        words = ["token", "new", name, "--token-file", str(file), "--principals", str(tmp_path / "principals.toml")]
        assert run(*words, "--scope", "*").code == 0
        return file

    first = new("first")
    host = HostProcess(tmp_path, more='[principals]\nfile = "principals.toml"\n')
    with host:
        assert host.told[-1]["token_files"] is None
        assert Api(host.public, bearer_key(first)).get("/views/runs").body["runs"] == []
        late = Api(host.public, bearer_key(new("late")))
        with pytest.raises(CallFailed) as refused:
            late.get("/views/runs")
        assert refused.value.code == "auth.unverified_actor"
        host.send(signal.SIGHUP)

        def admitted() -> bool | None:
            try:
                return late.get("/views/runs").status == 200
            except CallFailed:
                return None

        assert until(admitted, "the new token to be admitted", 20)
        for file in (first, tmp_path / "late-key"):
            assert file.read_text().strip() not in host.log
