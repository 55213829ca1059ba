"""The half of the provider suite that controls runs: approvals, stops and the gate."""

from __future__ import annotations

import json

import pytest

from tests.contract.wire import UNKNOWN_RUN, Provider, Wire, deletion, error_of


class ControlContract:
    """The suite; the class that runs it also inherits the fixture ``wire`` of ``ProviderContract``."""

    @pytest.mark.proves("A081", "A093", "A102", "A103")
    async def test_approval_once_runs_the_command_and_only_one_decision_counts(
        self, wire: Wire, provider: Provider
    ) -> None:
        command = deletion(provider, "once")
        run_id = await wire.start(f"TOOL {command}", "TEXT done")
        async with wire.reading(run_id) as reader:
            await reader.sees("approval.request")
            request = reader.only("approval.request").data
            assert (request["command"], request["pattern_keys"]) == (command, [request["pattern_key"]])
            assert request["choices"] == ["once", "session", "always", "deny"]
            assert request["allow_permanent"] is True
            assert "request_id" not in request
            assert (await wire.status(run_id))["status"] == "waiting_for_approval"
            assert not provider.carried_out(command)
            answer = await wire.decide(run_id, " Approve ")
            expected = {"object": "hermes.run.approval_response", "run_id": run_id, "choice": "once", "resolved": 1}
            assert (answer.status_code, answer.json()) == (200, expected)
            await reader.ends()
        assert reader.names[:4] == ["tool.started", "approval.request", "approval.responded", "tool.completed"]
        assert reader.only("tool.completed").data["error"] is False
        assert reader.names[-2] == "run.completed"
        assert provider.carried_out(command)
        assert error_of(await wire.decide(run_id, "once")) == (409, "approval_not_active")

    async def test_a_denied_command_does_not_run_and_the_run_completes(self, wire: Wire, provider: Provider) -> None:
        command = deletion(provider, "denied")
        run_id = await wire.start(f"TOOL {command}", "TEXT done")
        async with wire.reading(run_id) as reader:
            await reader.sees("approval.request")
            assert (await wire.decide(run_id, "deny")).json()["resolved"] == 1
            await reader.ends()
        assert reader.only("tool.completed").data["error"] is True
        assert reader.names[-2] == "run.completed"
        assert not provider.carried_out(command)
        blocked = json.loads(next(row["content"] for row in await wire.rows(run_id) if row["role"] == "tool"))
        assert (blocked["exit_code"], blocked["status"]) == (-1, "blocked")

    @pytest.mark.proves("A052")
    async def test_choice_session_covers_later_commands_of_this_run_alone(self, wire: Wire, provider: Provider) -> None:
        first, second, third = (deletion(provider, f"session-{n}") for n in range(3))
        run_id = await wire.start(f"SEQ {first} ;; {second}", "TEXT done", session_id="contract-session")
        async with wire.reading(run_id) as reader:
            await reader.sees("approval.request")
            await wire.decide(run_id, "session")
            await reader.ends()
        assert reader.names.count("approval.request") == 1
        assert reader.names.count("tool.completed") == 2
        assert provider.carried_out(first)
        assert provider.carried_out(second)
        other = await wire.start(f"TOOL {third}", "TEXT done", session_id="contract-session")
        await wire.reaches(other, "waiting_for_approval")
        await wire.decide(other, "deny")
        await wire.reaches(other, "completed")
        assert not provider.carried_out(third)

    @pytest.mark.proves("A104")
    async def test_an_undecided_command_times_out_closed_and_in_silence(self, wire: Wire, provider: Provider) -> None:
        command = deletion(provider, "undecided")
        run_id = await wire.start(f"SEQ {command} ;; sleep 2", "TEXT done")
        async with wire.reading(run_id) as reader:
            await reader.sees("tool.started", 2)
            assert (await wire.status(run_id))["status"] == "waiting_for_approval"
            assert error_of(await wire.decide(run_id, "once")) == (409, "approval_not_pending")
            await reader.ends()
        assert reader.names[:3] == ["tool.started", "approval.request", "tool.completed"]
        waited = next(frame.data for frame in reader.frames if frame.event == "tool.completed")
        assert waited["error"] is True
        assert waited["duration"] >= provider.differences.approval_timeout - 0.1
        assert "approval.responded" not in reader.names
        assert reader.names[-2] == "run.completed"
        assert not provider.carried_out(command)

    @pytest.mark.proves("A151", "A153")
    async def test_refused_decisions_leave_the_command_pending(self, wire: Wire, provider: Provider) -> None:
        run_id = await wire.start(f"TOOL {deletion(provider, 'errors')}", "TEXT done")
        await wire.reaches(run_id, "waiting_for_approval")
        path = f"/v1/runs/{run_id}/approval"
        for body in ({}, {"choice": "yes"}, {"choice": None}, {"choice": ["once"]}):
            assert error_of(await wire.http.post(path, json=body)) == (400, "invalid_approval_choice")
        for content in (b"", b"{"):
            assert error_of(await wire.http.post(path, content=content)) == (400, None)
        for content in (b"[]", b'"once"'):
            assert (await wire.http.post(path, content=content)).status_code == 500
        assert error_of(await wire.decide(UNKNOWN_RUN, "once")) == (404, "run_not_found")
        assert (await wire.decide(run_id, "deny", request_id="not-a-known-request")).status_code == 200
        await wire.reaches(run_id, "completed")

    @pytest.mark.proves("A135", "A137")
    async def test_a_repeated_decision_decides_the_next_command(self, wire: Wire, provider: Provider) -> None:
        first, second = deletion(provider, "next-1"), deletion(provider, "next-2")
        run_id = await wire.start(f"SEQ {first} ;; {second}", "TEXT done")
        async with wire.reading(run_id) as reader:
            await reader.sees("approval.request")
            assert (await wire.decide(run_id, "once")).status_code == 200
            await reader.sees("approval.request", 2)
            assert (await wire.decide(run_id, "once")).status_code == 200
            await reader.ends()
        assert provider.carried_out(first)
        assert provider.carried_out(second)

    @pytest.mark.proves("A050", "A101", "A164")
    async def test_runs_of_one_session_have_isolated_approvals(self, wire: Wire, provider: Provider) -> None:
        mine, other = deletion(provider, "mine"), deletion(provider, "other")
        runs = [
            await wire.start(f"TOOL {command}", "TEXT done", session_id="contract-shared") for command in (mine, other)
        ]
        for run_id in runs:
            await wire.reaches(run_id, "waiting_for_approval")
        assert (await wire.decide(runs[0], "once", resolve_all=True)).json()["resolved"] == 1
        await wire.reaches(runs[0], "completed")
        assert (await wire.status(runs[1]))["status"] == "waiting_for_approval"
        assert provider.carried_out(mine)
        assert not provider.carried_out(other)
        await wire.decide(runs[1], "deny")
        await wire.reaches(runs[1], "completed")

    @pytest.mark.proves("A111", "A115", "A118")
    async def test_stop_while_the_model_thinks_cancels_and_ends_control(self, wire: Wire) -> None:
        run_id = await wire.start("SLEEP 20", "TEXT never")
        async with wire.reading(run_id) as reader:
            for _ in range(2):
                answer = await wire.stop(run_id)
                assert (answer.status_code, answer.json()) == (200, {"run_id": run_id, "status": "stopping"})
            await reader.ends()
        assert reader.names == ["run.cancelled", ": stream closed"]
        status = await wire.reaches(run_id, "cancelled")
        assert "output" not in status
        assert "error" not in status
        assert error_of(await wire.stop(run_id)) == (404, "run_not_found")
        assert [row["role"] for row in await wire.rows(run_id)] == ["user"]

    @pytest.mark.proves("A071", "A113")
    async def test_stop_while_a_tool_runs_keeps_what_it_already_did(self, wire: Wire, provider: Provider) -> None:
        half, rest = (f"touch {provider.folder / name}" for name in ("half", "rest"))
        run_id = await wire.start(f"TOOL {half} && sleep 6 && {rest}", "TEXT never")
        async with wire.reading(run_id) as reader:
            await reader.sees("tool.started")
            await wire.has(half)
            await wire.stop(run_id)
            await reader.ends()
        assert reader.names == ["tool.started", "tool.completed", "run.cancelled", ": stream closed"]
        assert reader.only("tool.completed").data["error"] is True
        assert provider.carried_out(half)
        assert not provider.carried_out(rest)

    async def test_stop_while_an_approval_waits_runs_nothing(self, wire: Wire, provider: Provider) -> None:
        command = deletion(provider, "stopped")
        run_id = await wire.start(f"TOOL {command}", "TEXT never")
        async with wire.reading(run_id) as reader:
            await reader.sees("approval.request")
            await wire.stop(run_id)
            await reader.ends()
        expected = ["tool.started", "approval.request", "tool.completed", "run.cancelled", ": stream closed"]
        assert reader.names == expected
        assert not provider.carried_out(command)
        assert error_of(await wire.decide(run_id, "once")) == (409, "approval_not_active")

    async def test_a_decision_after_a_stop_still_runs_the_command(self, wire: Wire, provider: Provider) -> None:
        # A waiting command looks for a stop once a second, so a decision can come too late; then nothing ran.
        for attempt in range(4):
            command = deletion(provider, f"late-{attempt}")
            run_id = await wire.start(f"TOOL {command}", "TEXT never")
            async with wire.reading(run_id) as reader:
                await reader.sees("approval.request")
                assert (await wire.stop(run_id)).status_code == 200
                answer = await wire.decide(run_id, "once")
                await reader.ends()
            assert reader.names[-3:] == ["tool.completed", "run.cancelled", ": stream closed"]
            assert (await wire.status(run_id))["status"] == "cancelled"
            assert provider.carried_out(command) is (answer.status_code == 200)
            if answer.status_code == 200:
                return
        raise AssertionError("no decision was taken after a stop")

    @pytest.mark.proves("A143", "A144", "A145", "A146")
    async def test_a_full_gate_refuses_before_the_body_is_looked_at(self, wire: Wire, provider: Provider) -> None:
        limit = provider.differences.max_concurrent_runs
        runs = [await wire.start("SLEEP 20") for _ in range(limit)]
        for content in (b'{"input":"TEXT c"}', b"[]"):
            answer = await wire.http.post("/v1/runs", content=content)
            assert error_of(answer) == (429, "rate_limit_exceeded")
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        assert error_of(await wire.http.post("/v1/responses", json={"input": "TEXT c"}))[0] == 429
        await wire.stop(runs[0])
        await wire.reaches(runs[0], "cancelled")
        await wire.reaches(await wire.start("TEXT unread"), "completed")
        await wire.reaches(await wire.start("TEXT again"), "completed")
        for run_id in runs[1:]:
            await wire.stop(run_id)
            await wire.reaches(run_id, "cancelled")
