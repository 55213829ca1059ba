"""What the practice provider has beyond the measured one: faults, its own counts, a state file, and flavour 0.22."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from adapters.practice_hermes import Fault, PracticeHermes, PracticeOptions
from tests.contract.wire import Differences, Wire, error_of

pytestmark = pytest.mark.anyio
FAST = PracticeOptions(approval_stop_delay=0.2, stop_delay=0.05, subscribe_wait=0.1)


class Practice(PracticeHermes):
    differences = Differences(approval_timeout=60, keepalive=30, max_concurrent_runs=10, tool_outlives_kill=False)
    folder = Path("/practice")

    def prepare(self, path: Path) -> None:
        """Nothing exists here but the ledger."""

    def carried_out(self, command: str) -> bool:
        return any(effect.command == command for effect in self.ledger().effects)


@pytest.fixture
def hermes() -> Iterator[Practice]:
    with Practice(options=FAST) as practice:
        yield practice


@pytest.fixture
def newer() -> Iterator[Practice]:
    with Practice(options=FAST, flavour="0.22") as practice:
        yield practice


@pytest.fixture
async def wire(hermes: Practice) -> AsyncIterator[Wire]:
    wire = Wire(hermes)
    async with wire.http:
        yield wire


@pytest.fixture
async def newer_wire(newer: Practice) -> AsyncIterator[Wire]:
    wire = Wire(newer)
    async with wire.http:
        yield wire


async def test_a_dropped_start_has_created_its_run_and_the_ledger_says_so(hermes: Practice, wire: Wire) -> None:
    hermes.fault(Fault(kind="drop", route="start"))
    with pytest.raises(httpx.RemoteProtocolError):
        await wire.http.post("/v1/runs", json={"input": "TEXT unseen"})
    ledger = hermes.ledger()
    assert (ledger.starts_received, ledger.runs_created) == (1, 1)
    await wire.reaches(ledger.created[0], "completed")


async def test_a_start_dropped_before_it_is_carried_out_creates_nothing(hermes: Practice, wire: Wire) -> None:
    hermes.fault(Fault(kind="drop", route="start", carried_out=False))
    with pytest.raises(httpx.RemoteProtocolError):
        await wire.http.post("/v1/runs", json={"input": "TEXT never"})
    assert (hermes.ledger().starts_received, hermes.ledger().runs_created) == (1, 0)


async def test_a_hanging_decision_is_applied_once(hermes: Practice, wire: Wire) -> None:
    run_id = await wire.start("ASK deploy", "TEXT done")
    await wire.reaches(run_id, "waiting_for_approval")
    hermes.fault(Fault(kind="hang", route="approval", seconds=0.2))
    with pytest.raises(httpx.RemoteProtocolError):
        await wire.decide(run_id, "once")
    await wire.reaches(run_id, "completed")
    assert [(one.choice, one.command) for one in hermes.ledger().choices] == [("once", "deploy")]
    assert hermes.carried_out("deploy")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="answer", route="stop", status=502, body="<html>bad gateway</html>"),
        Fault(kind="answer", route="stop", status=504, content_type="text/plain"),
        Fault(kind="answer", route="stop", status=200, body="<html>welcome</html>"),
        Fault(kind="answer", route="stop", status=307, headers={"Location": "http://127.0.0.1:9/"}),
    ],
    ids=lambda fault: str(fault.status),
)
async def test_a_replaced_answer_is_sent_as_given_once(hermes: Practice, wire: Wire, fault: Fault) -> None:
    run_id = await wire.start("SLEEP 20")
    hermes.fault(fault)
    answer = await wire.stop(run_id)
    assert (answer.status_code, answer.text) == (fault.status, fault.body)
    await wire.reaches(run_id, "cancelled")
    assert error_of(await wire.stop(run_id)) == (404, "run_not_found")


async def test_a_cut_stream_breaks_off_after_its_frames(hermes: Practice, wire: Wire) -> None:
    hermes.fault(Fault(kind="cut", route="events", frames=2))
    run_id = await wire.start("WORDS 5 0.02")
    async with wire.reading(run_id) as reader:
        await reader.ends()
    assert reader.names == ["message.delta", "message.delta", ": connection lost"]
    await wire.reaches(run_id, "completed")


async def test_forgotten_runs_break_their_streams_and_keep_their_sessions(hermes: Practice, wire: Wire) -> None:
    run_id = await wire.start("SLEEP 20", session_id="kept")
    async with wire.reading(run_id) as reader:
        hermes.fault(forget_runs=True)
        await reader.ends()
    assert reader.names == [": connection lost"]
    assert error_of(await wire.get(f"/v1/runs/{run_id}")) == (404, "run_not_found")
    assert [row["role"] for row in await wire.rows("kept")] == ["user"]


async def test_draining_refuses_starts_and_status_answers_can_be_replaced(hermes: Practice, wire: Wire) -> None:
    run_id = await wire.start("SLEEP 20")
    hermes.fault(draining=True, statuses=[{"status": "queued"}, {"status": "resting"}])
    answer = await wire.http.post("/v1/runs", json={"input": "x"})
    assert error_of(answer) == (503, "gateway_draining")
    assert answer.headers["retry-after"] == "1"
    assert (await wire.get("/health/detailed")).json()["gateway_state"] == "draining"
    assert [(await wire.status(run_id))["status"] for _ in range(3)] == ["queued", "resting", "running"]
    hermes.fault(clear=True)
    await wire.start("TEXT again")


async def test_silence_withholds_keepalives_and_a_flood_waits_for_its_reader() -> None:
    options = PracticeOptions(keepalive=0.05)
    with Practice(options=options) as hermes:
        wire = Wire(hermes)
        async with wire.http:
            run_id = await wire.start("SILENCE 0.4", "TEXT done")
            async with wire.reading(run_id) as reader:
                await reader.ends()
            assert ": keepalive" not in [frame.event for frame in reader.frames]
            run_id = await wire.start("DELTAS 3000 100")
            async with wire.reading(run_id) as reader:
                await reader.ends()
            assert reader.names.count("message.delta") == 3000
            assert reader.names[-2:] == ["run.completed", ": stream closed"]


async def test_hostile_frames_and_offered_choices_come_as_scripted(hermes: Practice, wire: Wire) -> None:
    run_id = await wire.start('FRAME {"event": "new.kind", "x": 1}', "ASK-ONCE wipe", "ASK-SESSION push", "TEXT done")
    async with wire.reading(run_id) as reader:
        await reader.sees("approval.request")
        await wire.decide(run_id, "deny")
        await reader.sees("approval.request", 2)
        await wire.decide(run_id, "once")
        await reader.ends()
    assert reader.only("new.kind").data == {"event": "new.kind", "x": 1}
    offered = [frame.data for frame in reader.frames if frame.event == "approval.request"]
    assert [one["choices"] for one in offered] == [["once", "deny"], ["once", "session", "deny"]]
    assert [one.get("smart_denied") for one in offered] == [True, None]
    raw = await wire.start(r"BYTES data: {broken\n\n", "TEXT done")
    await wire.reaches(raw, "completed")
    assert (await wire.get(f"/v1/runs/{raw}/events")).content.startswith(b"data: {broken\n\n")


@pytest.mark.proves("A100")
async def test_two_pending_commands_are_decided_in_order_or_all_at_once(hermes: Practice, wire: Wire) -> None:
    for everything in (False, True):
        run_id = await wire.start("ASK-BOTH first ;; second", "TEXT done")
        async with wire.reading(run_id) as reader:
            await reader.sees("approval.request", 2)
            if not everything:
                assert (await wire.decide(run_id, "once")).json()["resolved"] == 1
                assert hermes.ledger().choices[-1].command == "first"
            answer = await wire.decide(run_id, "deny", resolve_all=True)
            assert answer.json()["resolved"] == (2 if everything else 1)
            await reader.ends()
    assert [effect.command for effect in hermes.ledger().effects] == ["first"]


async def test_choice_always_lasts_beyond_the_process(hermes: Practice, wire: Wire) -> None:
    run_id = await wire.start("ASK deploy one", "TEXT done")
    await wire.reaches(run_id, "waiting_for_approval")
    await wire.decide(run_id, "always")
    await wire.reaches(run_id, "completed")
    hermes.restart()
    await wire.reaches(await wire.start("ASK deploy two", "TEXT done"), "completed")
    assert hermes.carried_out("deploy two")


def test_a_killed_process_leaves_its_counts_in_the_state_file(tmp_path: Path) -> None:
    state, key, address = tmp_path / "state.jsonl", tmp_path / "key", tmp_path / "address"
    command = [sys.executable, "-m", "adapters.practice_hermes", "--state-file", str(state)]
    command += ["--key-file", str(key), "--address-file", str(address)]
    root = Path(__file__).parents[2]
    counts: list[dict[str, Any]] = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            base_url = process.stdout.readline().decode().strip()
            headers = {"Authorization": f"Bearer {key.read_text().strip()}"}
            assert address.read_text().strip() == base_url
            with httpx.Client(base_url=base_url, headers=headers, trust_env=False) as client:
                order = {"add": [{"kind": "drop", "route": "start"}]}
                assert client.post("/practice/faults", json=order).json() == {"faults": 1, "draining": False}
                with pytest.raises(httpx.RemoteProtocolError):
                    client.post("/v1/runs", json={"input": "SLEEP 60", "session_id": "kept"})
                counts.append(client.get("/practice/ledger").json())
                assert client.post("/practice/faults", json={"unknown": 1}).status_code == 400
            process.send_signal(number)
            assert process.wait(timeout=20) == (0 if number == signal.SIGTERM else -number)
    assert [one["starts_received"] for one in counts] == [1, 2]
    assert [one["runs_created"] for one in counts] == [1, 2]
    assert os.stat(key).st_mode & 0o077 == 0
    with PracticeHermes(state_file=state) as later:
        assert later.ledger().runs_created == 2


async def test_a_terminated_process_cancels_on_the_wire(hermes: Practice, wire: Wire) -> None:
    run_id = await wire.start("SLEEP 20")
    async with wire.reading(run_id) as reader:
        await anyio.to_thread.run_sync(hermes.terminate)
        await reader.ends()
    assert reader.names == ["run.cancelled", ": stream closed"]


async def test_a_key_finds_its_first_run_and_guards_its_body(newer: Practice, newer_wire: Wire) -> None:
    wire = newer_wire
    features = (await wire.get("/v1/capabilities")).json()["features"]
    assert features["runs_idempotency"]["durable"] is True
    key = {"Idempotency-Key": "key-1"}
    first = await wire.http.post("/v1/runs", json={"input": "TEXT a", "model": "m"}, headers=key)
    again = await wire.http.post("/v1/runs", json={"model": "m", "input": "TEXT a"}, headers=key)
    assert (first.json()["replayed"], again.json()["replayed"]) == (False, True)
    assert first.json()["run_id"] == again.json()["run_id"]
    assert again.headers["idempotency-replayed"] == "true"
    other = await wire.http.post("/v1/runs", json={"input": "TEXT b"}, headers=key)
    assert error_of(other) == (409, "idempotency_key_conflict")
    wrong = await wire.http.post("/v1/runs", json={"input": "TEXT b"}, headers={"Idempotency-Key": "with blank"})
    assert error_of(wrong) == (400, "invalid_idempotency_key")
    assert newer.ledger().runs_created == 1


async def test_a_keyed_run_is_interrupted_by_a_restart_and_never_runs_again(newer: Practice, newer_wire: Wire) -> None:
    wire = newer_wire
    wire.http.headers["Idempotency-Key"] = "key-2"
    run_id = await wire.start("ASK deploy", "TEXT never")
    await wire.reaches(run_id, "waiting_for_approval")
    await anyio.to_thread.run_sync(newer.restart)
    status = await wire.status(run_id)
    assert (status["status"], status["approval"]["command"]) == ("interrupted", "deploy")
    assert error_of(await wire.decide(run_id, "once")) == (409, "approval_not_active")
    assert (await wire.stop(run_id)).json()["status"] == "interrupted"
    assert error_of(await wire.get(f"/v1/runs/{run_id}/events")) == (404, "run_not_found")
    replay = await wire.http.post("/v1/runs", json={"input": "ASK deploy\nTEXT never"})
    assert replay.json() == {"run_id": run_id, "status": "interrupted", "replayed": True}
    assert not newer.carried_out("deploy")


async def test_numbered_events_are_replayed_after_a_given_one(newer_wire: Wire) -> None:
    wire = newer_wire
    run_id = await wire.start("TEXT a short answer")
    await wire.reaches(run_id, "completed")
    whole = (await wire.get(f"/v1/runs/{run_id}/events")).text
    assert whole.startswith(": open\n\nid: 0\ndata: ")
    rest = await wire.http.get(f"/v1/runs/{run_id}/events", headers={"Last-Event-ID": "2"})
    assert [line for line in rest.text.splitlines() if line.startswith("id: ")] == ["id: 3", "id: 4"]
    assert whole.endswith(rest.text.removeprefix(": open\n\n"))


async def test_a_decision_can_name_its_request(newer_wire: Wire) -> None:
    wire = newer_wire
    run_id = await wire.start("ASK-BOTH first ;; second", "TEXT done")
    status = await wire.reaches(run_id, "waiting_for_approval")
    assert error_of(await wire.decide(run_id, "once", request_id="another")) == (409, "approval_not_pending")
    assert error_of(await wire.decide(run_id, "once", request_id="")) == (400, "invalid_approval_request")
    named = await wire.decide(run_id, "once", request_id=status["approval"]["request_id"])
    assert named.json()["resolved"] == 1
    assert (await wire.decide(run_id, "deny", resolve_all=True)).json()["resolved"] == 1
    done = await wire.reaches(run_id, "completed")
    assert (done["completed"], done["partial"], done["interrupted"]) == (True, False, False)
