"""Answers and refusals of the practice Hermes, and its checks of request bodies, as measured on Hermes Agent 0.19.0."""

from __future__ import annotations

import json
import os
from typing import Any

from starlette.responses import PlainTextResponse, Response


class Refused(Exception):
    """Carries the answer of a refused request."""

    def __init__(self, answer: Response) -> None:
        self.answer = answer


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer, text escaped to ASCII."""
    body = json.dumps(content).encode()
    return Response(body, status, headers, media_type="application/json; charset=utf-8")


def refusal(status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None) -> Refused:
    """A refusal in the JSON error envelope."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    return Refused(answer({"error": {"message": message, "type": kind, "param": None, "code": code}}, status, headers))


def text_answer(status: int, content: str) -> Response:
    """A plain text answer."""
    return PlainTextResponse(content, status)


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; refuses what is not JSON (400) or not an object (500)."""
    try:
        parsed = json.loads(body.decode())
    except ValueError:
        raise refusal(400, "Invalid JSON") from None
    if not isinstance(parsed, dict):
        raise Refused(text_answer(500, "500 Internal Server Error\n\nServer got itself in trouble"))
    return parsed


def prompt_of(given: Any) -> str:
    """The prompt of an ``input`` or ``messages`` value; refuses values without one."""
    content = given
    if not given:
        raise refusal(400, "Missing 'input' field")
    if isinstance(given, list):
        if not isinstance(given[-1], dict):
            raise Refused(text_answer(500, "500 Internal Server Error\n\nServer got itself in trouble"))
        content = given[-1].get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part.get("type") in ("text", "input_text"))
    if not isinstance(content, str) or not content:
        raise refusal(400, "No user message found in input")
    return content


def history_of(given: Any) -> list[dict[str, Any]]:
    """The conversation history of a request; refuses items without role or content."""
    if given and not isinstance(given, list):
        raise refusal(400, "'conversation_history' must be an array of message objects")
    for index, item in enumerate(given or []):
        if not isinstance(item, dict) or "role" not in item or "content" not in item:
            raise refusal(400, f"conversation_history[{index}] must have 'role' and 'content' fields")
    return given or []


def health_detailed(version: str, state: str, active: int, started: str, pid: int) -> dict[str, Any]:
    """The detailed health answer of a provider with this many active runs."""
    checks: dict[str, Any] = {name: {"status": "ok"} for name in ("state_db", "config", "model")}
    disk = os.statvfs("/")
    used = round(100.0 * (1 - disk.f_bavail / max(disk.f_blocks, 1)), 1)
    checks["disk"] = {"status": "ok", "used_percent": used, "free_bytes": disk.f_bavail * disk.f_frsize}
    checks["gateway"] = {"status": "ok", "state": state, "connected_platforms": 1, "platforms": 1}
    queues = {"active_api_runs": active, "process_completions": 0, "active_delegations": 0}
    checks["background_queues"] = {"status": "ok"} | queues
    platform = {"state": "connected", "error_code": None, "error_message": None, "updated_at": started}
    return {
        "status": "ok",
        "readiness": {"status": "ok", "checks": checks},
        "platform": "hermes-agent",
        "version": version,
        "gateway_state": state,
        "platforms": {"api_server": platform},
        "active_agents": active,
        "gateway_busy": active > 0,
        "gateway_drainable": True,
        "exit_reason": None,
        "updated_at": started,
        "pid": pid,
    }


def capabilities(endpoints: dict[str, Any], *, durable: bool) -> dict[str, Any]:
    """The capabilities answer; ``durable`` adds the idempotency feature of flavour 0.22."""
    served = "run_submission run_status run_events_sse run_stop run_approval_response tool_progress_events"
    served += " approval_events chat_completions responses_api session_resources skills_api"
    absent = "chat_completions_streaming responses_streaming session_chat session_chat_streaming session_fork"
    absent += " admin_config_rw jobs_admin memory_write_api audio_api realtime_voice cors"
    features: dict[str, Any] = dict.fromkeys(served.split(), True) | dict.fromkeys(absent.split(), False)
    features |= {"session_continuity_header": "X-Hermes-Session-Id", "session_key_header": "X-Hermes-Session-Key"}
    if durable:
        features |= {"runs_idempotency": {"supported": True, "durable": True, "retention_seconds": 86400}}
    return {
        "object": "hermes.api_server.capabilities",
        "platform": "hermes-agent",
        "model": "hermes-agent",
        "auth": {"type": "bearer", "required": True},
        "runtime": {
            "mode": "server_agent",
            "tool_execution": "server",
            "split_runtime": False,
            "description": "Scripted practice provider; commands become entries of a ledger.",
        },
        "features": features,
        "endpoints": endpoints,
    }
