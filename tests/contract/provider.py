"""What every Hermes does as a client sees it: one suite for the practice provider and for the real agent.

This half holds starts, observation, discovery and process loss; ``provider_control`` holds approvals, stops and the
gate.  Prompts are scripts that both providers understand.  What may differ between them is data: ``Differences``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from tests.contract.wire import UNKNOWN_RUN, Provider, Wire, deletion, error_of, eventually, frames_of


class ProviderContract:
    """The suite; a subclass gives the fixture ``provider``, running and idle."""

    @pytest.fixture
    async def wire(self, provider: Provider) -> AsyncIterator[Wire]:
        wire = Wire(provider)
        async with wire.http:
            yield wire

    @pytest.mark.proves("A034", "A035", "A041", "A043", "A051", "A162")
    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            ({"input": "TEXT one"}, "one"),
            ({"input": [{"role": "user", "content": "TEXT two"}]}, "two"),
            ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "TEXT three"}]}, "three"),
            ({"input": [{"role": "user", "content": [{"type": "text", "text": "TEXT four"}]}]}, "four"),
            ({"input": "TEXT héllo 世界 😀"}, "héllo 世界 😀"),
            ({"input": "TEXT m", "model": "no-such-model"}, "m"),
            ({"input": "TEXT p", "previous_response_id": "resp_missing"}, "p"),
            ({"input": "TEXT x", "unknown_member": 1}, "x"),
            ({"input": "   "}, "ok:"),
        ],
        ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
    )
    async def test_accepted_start_bodies_give_a_run_that_completes(
        self, wire: Wire, body: dict[str, Any], expected: str
    ) -> None:
        answer = await wire.http.post("/v1/runs", json=body)
        assert (answer.status_code, answer.json()["status"]) == (202, "started")
        run_id = answer.json()["run_id"]
        assert run_id.startswith("run_")
        assert len(run_id) == 36
        status = await wire.reaches(run_id, "completed")
        assert (status["output"], status["session_id"]) == (expected, run_id)
        assert status["model"] == body.get("model", "hermes-agent")

    @pytest.mark.proves("A033", "A151")
    @pytest.mark.parametrize(
        ("content", "status"),
        [
            (b"{}", 400),
            (b'{"input":""}', 400),
            (b'{"input":null}', 400),
            (b'{"input":[]}', 400),
            (b'{"input":42}', 400),
            (b'{"input":{"role":"user"}}', 400),
            (b'{"input":[{"role":"user"}]}', 400),
            (b'{"input":["a"]}', 500),
            (b'{"input":"x","conversation_history":"y"}', 400),
            (b'{"input":"x","conversation_history":[{"role":"user"}]}', 400),
            (b"", 400),
            (b'{"input":', 400),
            (b"[1]", 500),
            (b'"text"', 500),
            (b"null", 500),
            (b'{"input":"\xff"}', 400),
        ],
    )
    async def test_refused_start_bodies_leave_no_run(self, wire: Wire, content: bytes, status: int) -> None:
        before = (await wire.get("/health/detailed")).json()["readiness"]["checks"]["background_queues"]
        answer = await wire.http.post("/v1/runs", content=content)
        assert answer.status_code == status
        if status == 400:
            assert error_of(answer) == (400, None)
        else:
            assert answer.headers["content-type"].startswith("text/plain")
        after = (await wire.get("/health/detailed")).json()["readiness"]["checks"]["background_queues"]
        assert after["active_api_runs"] == before["active_api_runs"] == 0

    @pytest.mark.proves("A059", "A060", "A061", "A062", "A063")
    async def test_status_of_a_completed_run_has_every_member(self, wire: Wire) -> None:
        run_id = await wire.start("TEXT short answer", session_id="contract-status")
        status = await wire.reaches(run_id, "completed")
        assert (status["object"], status["run_id"], status["last_event"]) == ("hermes.run", run_id, "run.completed")
        assert (status["session_id"], status["output"]) == ("contract-status", "short answer")
        assert isinstance(status["created_at"], float)
        assert status["created_at"] <= status["updated_at"]
        assert status["usage"] == {"input_tokens": 11, "output_tokens": 7, "total_tokens": 18}

    @pytest.mark.proves("A075", "A078", "A080", "A082", "A085", "A163")
    async def test_a_plain_run_streams_its_text_and_one_terminal_frame(self, wire: Wire) -> None:
        run_id = await wire.start("TEXT a short answer")
        async with wire.reading(run_id) as reader:
            await reader.ends()
        assert reader.headers["content-type"] == "text/event-stream"
        assert reader.names == [*["message.delta"] * 3, "reasoning.available", "run.completed", ": stream closed"]
        assert "".join(frame.data["delta"] for frame in reader.frames[:3]) == "a short answer"
        assert all(frame.data["run_id"] == run_id for frame in reader.frames[:-1])
        assert reader.only("run.completed").data["output"] == "a short answer"

    @pytest.mark.proves("A079")
    async def test_a_tool_call_is_started_and_completed_before_the_answer(self, wire: Wire, provider: Provider) -> None:
        command = f"touch {provider.folder / 'made'}"
        run_id = await wire.start("SAY let me look", f"TOOL {command}", "TEXT done")
        async with wire.reading(run_id) as reader:
            await reader.ends()
        assert reader.names == [
            *("message.delta", "reasoning.available", "tool.started", "tool.completed"),
            *("message.delta", "reasoning.available", "run.completed", ": stream closed"),
        ]
        assert reader.only("tool.started").data["tool"] == "terminal"
        completed = reader.only("tool.completed").data
        assert completed["error"] is False
        assert isinstance(completed["duration"], float)
        assert reader.frames[4].data["delta"] == "\n\ndone"
        assert provider.carried_out(command)
        roles = [(row["role"], row["finish_reason"]) for row in await wire.rows(run_id)]
        assert roles == [("user", None), ("assistant", "tool_calls"), ("tool", None), ("assistant", "stop")]

    async def test_a_failed_tool_still_ends_in_completed(self, wire: Wire) -> None:
        run_id = await wire.start("PTOOL true ;; false", "TEXT done")
        async with wire.reading(run_id) as reader:
            await reader.ends()
        assert [f.data["error"] for f in reader.frames if f.event == "tool.completed"] == [False, True]
        assert reader.names.index("tool.completed") < 2
        assert reader.names[-2] == "run.completed"

    @pytest.mark.proves("A064", "A070")
    async def test_a_refusal_of_the_model_fails_the_run(self, wire: Wire) -> None:
        run_id = await wire.start("FAIL 401")
        async with wire.reading(run_id) as reader:
            await reader.ends()
        assert reader.names == ["run.failed", ": stream closed"]
        status = await wire.status(run_id)
        assert (status["status"], status["error"]) == ("failed", "HTTP 401: scripted failure 401")
        assert "output" not in status
        assert "usage" not in status

    async def test_a_model_without_text_completes_with_a_warning(self, wire: Wire) -> None:
        status = await wire.reaches(await wire.start("EMPTY"), "completed")
        assert status["output"].startswith("\u26a0")
        assert [(row["content"], row["finish_reason"]) for row in await wire.rows(status["session_id"])][1:] == [
            ("(empty)", None)
        ]

    async def test_a_session_id_that_is_no_string_fails_the_run(self, wire: Wire) -> None:
        status = await wire.reaches(await wire.start("TEXT s", session_id=77), "failed")
        assert (status["error"], status["session_id"]) == ("str expected, not int", 77)

    @pytest.mark.proves("A058", "A153")
    async def test_an_unknown_run_is_not_found_on_every_route(self, wire: Wire) -> None:
        path = f"/v1/runs/{UNKNOWN_RUN}"
        assert error_of(await wire.get(path)) == (404, "run_not_found")
        assert error_of(await wire.stop(UNKNOWN_RUN)) == (404, "run_not_found")
        assert error_of(await wire.decide(UNKNOWN_RUN, "once")) == (404, "run_not_found")
        answer = await wire.get(path + "/events")
        assert error_of(answer) == (404, "run_not_found")
        assert answer.elapsed.total_seconds() >= 0.9

    @pytest.mark.proves("A086", "A119")
    async def test_the_first_late_reader_gets_everything_and_the_next_one_nothing(self, wire: Wire) -> None:
        run_id = await wire.start("TEXT a short answer")
        await wire.reaches(run_id, "completed")
        first = await wire.get(f"/v1/runs/{run_id}/events")
        assert [frame.event for frame in frames_of(first.content)][-3:] == [
            *("reasoning.available", "run.completed", ": stream closed")
        ]
        answer = await wire.http.get(f"/v1/runs/{run_id}/events", headers={"Last-Event-ID": "0"})
        assert error_of(answer) == (404, "run_not_found")
        assert (await wire.status(run_id))["status"] == "completed"

    @pytest.mark.proves("A087", "A088")
    async def test_two_readers_share_the_frames_of_one_run(self, wire: Wire) -> None:
        run_id = await wire.start("WORDS 12 0.05")
        async with wire.reading(run_id) as one:
            await one.sees("message.delta")
            async with wire.reading(run_id) as two:
                await wire.reaches(run_id, "completed")

                async def all_is_said() -> bool:
                    said = one.names + two.names
                    return said.count("run.completed") == said.count(": stream closed") == 1

                await eventually(all_is_said)
        deltas = [
            [f.data["delta"].strip() for f in reader.frames if f.event == "message.delta"] for reader in (one, two)
        ]
        assert deltas[0]
        assert deltas[1]
        assert sorted(deltas[0] + deltas[1]) == sorted(f"w{n}" for n in range(12))
        assert (one.names + two.names).count(": stream closed") == 1

    @pytest.mark.proves("A089", "A140")
    async def test_a_reader_that_left_cannot_return_and_the_run_goes_on(self, wire: Wire) -> None:
        run_id = await wire.start("WORDS 40 0.05")
        async with wire.reading(run_id) as reader:
            await reader.sees("message.delta", 3)

        async def gone() -> bool:
            async with wire.http.stream("GET", f"/v1/runs/{run_id}/events") as answer:
                return answer.status_code == 404

        await eventually(gone)
        assert (await wire.status(run_id))["status"] == "running"
        status = await wire.reaches(run_id, "completed")
        assert status["output"].split() == [f"w{n}" for n in range(40)]

    @pytest.mark.proves("A083", "A084")
    async def test_a_silent_stream_gets_keepalive_comments(self, wire: Wire, provider: Provider) -> None:
        run_id = await wire.start(f"SLEEP {provider.differences.keepalive * 1.3}", "TEXT done")
        async with wire.reading(run_id) as reader:
            await reader.ends()
        assert reader.frames[0].event == ": keepalive"
        assert reader.names[-2:] == ["run.completed", ": stream closed"]

    @pytest.mark.proves("A152")
    async def test_a_wrong_key_looks_the_same_on_every_route(self, wire: Wire) -> None:
        run_id = await wire.start("TEXT known")
        await wire.reaches(run_id, "completed")
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "nonsense"}, {"Authorization": ""}):
            for method, path in (
                ("POST", "/v1/runs"),
                ("GET", f"/v1/runs/{run_id}"),
                ("GET", f"/v1/runs/{UNKNOWN_RUN}/events"),
                ("POST", f"/v1/runs/{run_id}/stop"),
                ("GET", "/v1/capabilities"),
                ("GET", "/health/detailed"),
            ):
                answer = await wire.http.request(method, path, headers=headers)
                assert error_of(answer) == (401, "invalid_api_key")
        assert (await wire.http.get("/health", headers={"Authorization": ""})).json()["status"] == "ok"

    @pytest.mark.proves("A073")
    async def test_the_router_answers_in_plain_text(self, wire: Wire) -> None:
        for method, path, status in (
            ("GET", "/v1/runs", 405),
            ("HEAD", "/v1/models", 405),
            ("GET", "/v1/nothing-here", 404),
            ("POST", "/v1/runs/", 404),
        ):
            answer = await wire.http.request(method, path)
            assert answer.status_code == status
            assert answer.headers["content-type"].startswith("text/plain")
        foreign = await wire.http.get("/v1/models", headers={"Origin": "https://elsewhere.example"})
        assert (foreign.status_code, foreign.content) == (403, b"")

    @pytest.mark.proves("A147")
    async def test_a_body_above_ten_million_bytes_is_refused(self, wire: Wire) -> None:
        body = b'{"input":"' + b"x" * 10_000_100 + b'"}'
        assert error_of(await wire.http.post("/v1/runs", content=body)) == (413, "body_too_large")

        async def chunks() -> AsyncIterator[bytes]:
            for begin in range(0, len(body), 1 << 20):
                yield body[begin : begin + (1 << 20)]

        assert error_of(await wire.http.post("/v1/runs", content=chunks())) == (400, None)

    @pytest.mark.proves("A049")
    async def test_a_session_key_is_echoed_and_bounded(self, wire: Wire) -> None:
        answer = await wire.http.post(
            "/v1/runs", json={"input": "TEXT k"}, headers={"X-Hermes-Session-Key": "tenant:one"}
        )
        assert (answer.status_code, answer.headers["x-hermes-session-key"]) == (202, "tenant:one")
        await wire.reaches(answer.json()["run_id"], "completed")
        answer = await wire.http.post("/v1/runs", json={"input": "x"}, headers={"X-Hermes-Session-Key": "k" * 257})
        assert error_of(answer) == (400, None)

    @pytest.mark.proves("A132", "A134")
    async def test_the_idempotency_key_is_ignored(self, wire: Wire) -> None:
        wire.http.headers["Idempotency-Key"] = "contract-same-key"
        runs = {await wire.start("TEXT i") for _ in range(2)}
        assert len(runs) == 2
        for run_id in runs:
            await wire.reaches(run_id, "completed")

    @pytest.mark.proves("A040")
    async def test_a_stored_response_lends_its_session_to_a_run(self, wire: Wire) -> None:
        stored = await wire.http.post("/v1/responses", json={"input": "TEXT stored", "store": True})
        assert stored.status_code == 200
        response_id = stored.json()["id"]
        run_id = await wire.start("TEXT chained", previous_response_id=response_id)
        status = await wire.reaches(run_id, "completed")
        assert status["session_id"] == stored.headers["x-hermes-session-id"]
        assert (await wire.get(f"/v1/responses/{response_id}")).json() == stored.json()
        assert (await wire.http.delete(f"/v1/responses/{response_id}")).json()["deleted"] is True
        assert error_of(await wire.get(f"/v1/responses/{response_id}")) == (404, None)

    @pytest.mark.proves("A136", "A141")
    async def test_a_client_that_hangs_up_does_not_stop_the_run_and_its_session_shows_it(self, wire: Wire) -> None:
        host, port = wire.http.base_url.host, wire.http.base_url.port
        assert error_of(await wire.get("/api/sessions/contract-receipt")) == (404, "session_not_found")
        body = json.dumps({"input": "SLEEP 0.5\nTEXT it ran", "session_id": "contract-receipt"}).encode()
        head = f"POST /v1/runs HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n"
        head += f"Authorization: {wire.http.headers['authorization']}\r\n\r\n"
        async with await anyio.connect_tcp(host, port or 80) as connection:
            await connection.send(head.encode() + body)

        async def finished() -> bool:
            rows = await wire.rows("contract-receipt")
            return bool(rows) and rows[-1]["role"] == "assistant"

        await eventually(finished)
        rows = await wire.rows("contract-receipt")
        assert (rows[-1]["content"], rows[-1]["finish_reason"]) == ("it ran", "stop")
        listed = (await wire.get("/api/sessions?source=api_server&limit=200")).json()["data"]
        assert [row["id"] for row in listed].count("contract-receipt") == 1

    @pytest.mark.proves("A161")
    async def test_discovery_says_who_serves_and_what(self, wire: Wire) -> None:
        assert (await wire.get("/health")).json()["version"] == "0.19.0"
        detailed = (await wire.get("/health/detailed")).json()
        assert detailed["gateway_state"] == "running"
        assert isinstance(detailed["pid"], int)
        features = (await wire.get("/v1/capabilities")).json()["features"]
        for name in ("run_submission", "run_status", "run_events_sse", "run_stop", "run_approval_response"):
            assert features[name] is True
        assert "runs_idempotency" not in features
        assert [model["id"] for model in (await wire.get("/v1/models")).json()["data"]] == ["hermes-agent"]
        assert (await wire.get("/v1/skills")).status_code == (await wire.get("/v1/toolsets")).status_code == 200

    async def test_a_chat_completion_is_answered_outside_the_runs(self, wire: Wire) -> None:
        messages = [{"role": "user", "content": "TEXT chat answer"}]
        answer = await wire.http.post("/v1/chat/completions", json={"model": "hermes-agent", "messages": messages})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "chat answer"}

    @pytest.mark.proves("A002", "A122", "A168")
    async def test_a_killed_process_loses_its_runs_and_keeps_its_sessions(self, wire: Wire, provider: Provider) -> None:
        command, waiting = f"touch {provider.folder / 'outlives'}", deletion(provider, "unasked")
        done = await wire.start("TEXT done early", session_id="contract-done")
        await wire.reaches(done, "completed")
        tool = await wire.start(f"TOOL sleep 1 && {command}", "TEXT end", session_id="contract-tool")
        asking = await wire.start(f"TOOL {waiting}", "TEXT end", session_id="contract-asking")
        before = (await wire.get("/health/detailed")).json()["pid"]
        async with wire.reading(tool) as reader:
            await reader.sees("tool.started")
            await wire.reaches(asking, "waiting_for_approval")
            provider.kill()
            await reader.ends()
        assert reader.names == ["tool.started", ": connection lost"]
        provider.start()
        for run_id in (done, tool, asking):
            assert error_of(await wire.get(f"/v1/runs/{run_id}")) == (404, "run_not_found")
            assert error_of(await wire.get(f"/v1/runs/{run_id}/events")) == (404, "run_not_found")
            assert error_of(await wire.stop(run_id)) == (404, "run_not_found")
            assert error_of(await wire.decide(run_id, "once")) == (404, "run_not_found")
        assert (await wire.get("/health/detailed")).json()["pid"] != before
        assert [row["content"] for row in await wire.rows("contract-done")] == ["TEXT done early", "done early"]
        for session_id in ("contract-tool", "contract-asking"):
            assert [row["role"] for row in await wire.rows(session_id)] == ["user", "assistant"]
        if provider.differences.tool_outlives_kill:
            await wire.has(command)
        assert provider.carried_out(command) is provider.differences.tool_outlives_kill
        assert not provider.carried_out(waiting)
