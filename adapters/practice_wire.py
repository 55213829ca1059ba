"""The HTTP side of the practice Hermes: routes, admission, event streams.

One ``PracticeServer`` is the ASGI application of one provider process; its runs live in ``adapters.practice_runs``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapters.practice_answers import (
    Refused,
    answer,
    capabilities,
    health_detailed,
    history_of,
    parsed,
    prompt_of,
    refusal,
    text_answer,
)
from adapters.practice_faults import FaultOrder, Faults
from adapters.practice_runs import CHOICES, TERMINAL, PracticeRuns, Run
from adapters.practice_script import PracticeRecord, parse

_RUN = r"/v1/runs/(?P<run_id>[^/]+)"
_SHOWN = {  # route name: its name and its identifier in the capabilities answer
    "health_detailed": ("health_detailed", ""),
    "models": ("models", ""),
    "chat_completions": ("chat_completions", ""),
    "response_create": ("responses", ""),
    "start": ("runs", ""),
    "status": ("run_status", "run_id"),
    "events": ("run_events", "run_id"),
    "approval": ("run_approval", "run_id"),
    "stop": ("run_stop", "run_id"),
    "skills": ("skills", ""),
    "toolsets": ("toolsets", ""),
    "sessions": ("sessions", ""),
    "session": ("session", "session_id"),
    "messages": ("session_messages", "session_id"),
}


class Received(msgspec.Struct, frozen=True):
    """One request as it arrived; header names in lower case, the credential included."""

    route: str
    run_id: str | None
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Asked(NamedTuple):
    """A request that passed the checks of every route: its body and the identifier in its path."""

    request: Request
    body: bytes
    identifier: str


Handler = Callable[[Asked], Awaitable[Response]]


class PracticeServer:
    """The ASGI application of one provider process.

    ``drop`` must close the connection of the given scope at once.
    """

    def __init__(
        self,
        record: PracticeRecord,
        runs: PracticeRuns,
        key: str,
        pid: int,
        drop: Callable[[Scope], Awaitable[None]],
        received: list[Received],
    ) -> None:
        self.record, self.runs, self.key, self.pid, self.received = record, runs, key, pid, received
        self.faults = Faults()
        self._drop = drop
        self._version = "0.19.0" if runs.flavour == "0.19" else "0.22.2"
        self._routes: list[tuple[str, str, re.Pattern[str], Handler]] = [
            (name, method, re.compile(pattern), handler)
            for name, method, pattern, handler in (
                ("health", "GET", r"/(?:v1/)?health", self._health),
                ("health_detailed", "GET", "/health/detailed", self._health_detailed),
                ("models", "GET", "/v1/models", self._models),
                ("capabilities", "GET", "/v1/capabilities", self._capabilities),
                ("skills", "GET", "/v1/skills", self._empty_list),
                ("toolsets", "GET", "/v1/toolsets", self._empty_list),
                ("chat_completions", "POST", "/v1/chat/completions", self._chat),
                ("start", "POST", "/v1/runs", self._start),
                ("status", "GET", _RUN, self._status),
                ("approval", "POST", _RUN + "/approval", self._approval),
                ("stop", "POST", _RUN + "/stop", self._stop),
                ("events", "GET", _RUN + "/events", self._status),
                ("response_create", "POST", "/v1/responses", self._respond),
                ("response", "GET", r"/v1/responses/(?P<run_id>[^/]+)", self._response),
                ("response_delete", "DELETE", r"/v1/responses/(?P<run_id>[^/]+)", self._response),
                ("sessions", "GET", "/api/sessions", self._sessions),
                ("session", "GET", r"/api/sessions/(?P<run_id>[^/]+)", self._session),
                ("messages", "GET", r"/api/sessions/(?P<run_id>[^/]+)/messages", self._messages),
                ("practice", "GET", "/practice/ledger", self._ledger),
                ("practice", "POST", "/practice/faults", self._order),
            )
        ]

    def order(self, order: FaultOrder) -> None:
        """Apply a change of behaviour; must run on the server's event loop."""
        self.faults.order(order)
        if order.approval_timeout is not None:
            self.runs.approval_timeout = order.approval_timeout
        if order.forget_runs:
            self.runs.forget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        path = re.sub(r"^/p/[^/]+(?=/)", "", scope["path"])
        found = [(route, match) for route in self._routes if (match := route[2].fullmatch(path))]
        chosen = next(((route, match) for route, match in found if route[1] == request.method), None)
        if request.method == "OPTIONS" or "origin" in request.headers:
            await Response(status_code=403)(scope, receive, send)
        elif chosen is None:
            await (text_answer(405, "405: Method Not Allowed") if found else text_answer(404, "404: Not Found"))(
                scope, receive, send
            )
        else:
            (name, _, _, handler), match = chosen
            identifier = match.groupdict().get("run_id", "")
            run_id = identifier if name in ("status", "events", "approval", "stop") else None
            try:
                body = await self._body(request, name, run_id)
                await self._serve(name, handler, Asked(request, body, identifier), send)
            except (ClientDisconnect, asyncio.CancelledError):
                return  # nobody is left to answer, or the process ends under the request
            except Refused as refused:
                await refused.answer(scope, receive, send)

    async def _body(self, request: Request, name: str, run_id: str | None) -> bytes:
        if name != "practice":
            self.record.write("request", route=name, run_id=run_id)
        length = request.headers.get("content-length")
        if length is not None and int(length) > self.runs.options.body_limit:
            raise refusal(413, "Request body too large.", "body_too_large")
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self.runs.options.body_limit:
                chunks.append(chunk)
        body = b"".join(chunks) if size <= self.runs.options.body_limit else b"{"
        if name != "practice":
            headers = dict(request.headers)
            self.received.append(Received(name, run_id, request.method, request.url.path, headers, body))
        if name != "health" and request.headers.get("authorization") != f"Bearer {self.key}":
            error = {"message": "Invalid API key", "type": "invalid_request_error", "code": "invalid_api_key"}
            if self.runs.durable:
                error |= {"message": "Invalid gateway API key", "type": "gateway_auth_error"}
                error["code"] = "gateway_auth_failed"
            raise Refused(answer({"error": error}, 401))
        return body

    async def _serve(self, name: str, handler: Handler, asked: Asked, send: Send) -> None:
        fault = self.faults.next(name) if name != "practice" else None
        scope, receive = asked.request.scope, asked.request.receive
        if fault is None or fault.kind in ("cut", "delay"):
            if fault is not None and fault.kind == "delay":
                await asyncio.sleep(fault.seconds)
            if name == "events":
                await self._stream(asked, send, fault.frames if fault and fault.kind == "cut" else None)
            else:
                await (await handler(asked))(scope, receive, send)
            return
        if fault.carried_out and name != "events":
            with contextlib.suppress(Refused):
                await handler(asked)
        if fault.kind == "answer":
            replaced = Response(fault.body.encode(), fault.status, fault.headers, media_type=fault.content_type)
            await replaced(scope, receive, send)
            return
        if fault.kind == "hang":
            await asyncio.sleep(fault.seconds)
        await self._drop(scope)

    async def _health(self, _: Asked) -> Response:
        return answer({"status": "ok", "platform": "hermes-agent", "version": self._version})

    async def _health_detailed(self, _: Asked) -> Response:
        state = "draining" if self.faults.draining else "running"
        return answer(health_detailed(self._version, state, self.runs.active, self.runs.started_at, self.pid))

    async def _models(self, _: Asked) -> Response:
        model = {"id": "hermes-agent", "object": "model", "created": int(self.runs.now()), "owned_by": "hermes"}
        return answer({"object": "list", "data": [model | {"permission": [], "root": "hermes-agent", "parent": None}]})

    async def _capabilities(self, _: Asked) -> Response:
        endpoints = {
            shown: {"method": method, "path": pattern.pattern.replace("(?P<run_id>[^/]+)", f"{{{identifier}}}")}
            for name, method, pattern, _ in self._routes
            if name in _SHOWN
            for shown, identifier in [_SHOWN[name]]
        }
        return answer(capabilities(endpoints, durable=self.runs.durable))

    async def _empty_list(self, _: Asked) -> Response:
        return answer({"object": "list", "data": []})

    async def _chat(self, asked: Asked) -> Response:
        self._admit()
        given = parsed(asked.body)
        text = self._scriptedtext_answer(prompt_of(given.get("messages")))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body: dict[str, Any] = {
            "id": f"chatcmpl-{self.runs.new_id()[:29]}",
            "object": "chat.completion",
            "model": "hermes-agent",
        }
        used = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        return answer(body | {"created": int(self.runs.now()), "choices": [choice], "usage": used})

    def _scriptedtext_answer(self, prompt: str) -> str:
        return " ".join(line.text for line in parse(prompt) if line.verb in ("TEXT", "SAY")) or "ok:"

    async def _respond(self, asked: Asked) -> Response:
        self._admit()
        given = parsed(asked.body)
        prompt, made = prompt_of(given.get("input")), self.runs.new_id()
        content = [{"type": "output_text", "text": self._scriptedtext_answer(prompt)}]
        response: dict[str, Any] = {
            "id": f"resp_{made[:28]}",
            "object": "response",
            "status": "completed",
            "created_at": int(self.runs.now()),
            "model": "hermes-agent",
            "output": [{"type": "message", "role": "assistant", "content": content}],
            "usage": {"input_tokens": 11, "output_tokens": 7, "total_tokens": 18},
        }
        kept: dict[str, Any] = {
            "answer": response,
            "session_id": str(given.get("session_id") or made),
            "prompt": prompt,
        }
        self.record.write("response", response_id=response["id"], response=kept)
        return answer(response, headers={"X-Hermes-Session-Id": kept["session_id"]})

    async def _response(self, asked: Asked) -> Response:
        response_id = asked.identifier
        kept = self.record.responses.get(response_id)
        if kept is None:
            raise refusal(404, f"Response not found: {response_id}")
        if asked.request.method == "DELETE":
            self.record.write("response", response_id=response_id, response=None)
            return answer({"id": response_id, "object": "response", "deleted": True})
        return answer(kept["answer"])

    def _admit(self) -> None:
        limit = self.runs.options.max_concurrent_runs
        if self.faults.draining:
            message = "Gateway is draining existing work; retry shortly."
            raise refusal(503, message, "gateway_draining", {"Retry-After": "1"})
        if limit and self.runs.active >= limit:
            message = f"Too many concurrent runs (max {limit})"
            raise refusal(429, message, "rate_limit_exceeded", {"Retry-After": "1"})

    async def _start(self, asked: Asked) -> Response:
        session_key = asked.request.headers.get("x-hermes-session-key", "")
        if len(session_key) > 256:
            raise Refused(answer({"error": {"message": "Session key too long", "type": "invalid_request_error"}}, 400))
        echoed = {"X-Hermes-Session-Key": session_key} if session_key else {}
        if not self.runs.durable:
            self._admit()
        given = parsed(asked.body)
        prompt, history = prompt_of(given.get("input")), history_of(given.get("conversation_history"))
        scope, fingerprint = self._key_scope(asked.request), hashlib.sha256()
        if self.runs.durable and self.faults.draining:
            self._admit()
        fingerprint.update(json.dumps([given, session_key], sort_keys=True).encode())
        if scope is not None and scope in self.record.keyed:
            return self._replay(self.record.keyed[scope], fingerprint.hexdigest(), echoed)
        self._admit()
        stored = self.record.responses.get(str(given.get("previous_response_id"))) if not history else None
        session_id = given.get("session_id") or (stored["session_id"] if stored else None)
        turn = {"instructions": given.get("instructions"), "history": history}
        model = given.get("model", "hermes-agent")
        run = self.runs.start(prompt, session_id, model, turn)
        if scope is not None:
            record = {"fingerprint": fingerprint.hexdigest(), "status": dict(run.status)}
            self.record.write("keyed", scope=scope, record=record)
            run.key_scope = scope
        replayed = {"replayed": False} if self.runs.durable else {}
        return answer({"run_id": run.run_id, "status": "started"} | replayed, 202, echoed)

    def _key_scope(self, request: Request) -> str | None:
        key = request.headers.get("idempotency-key", "") if self.runs.durable else ""
        if len(key) > 255 or not all("!" <= character <= "~" for character in key):
            raise refusal(400, "Idempotency-Key must be 1-255 visible ASCII characters", "invalid_idempotency_key")
        return hashlib.sha256(f"{self.key} {key}".encode()).hexdigest() if key else None

    def _replay(self, record: dict[str, Any], fingerprint: str, echoed: dict[str, str]) -> Response:
        if record["fingerprint"] != fingerprint:
            raise refusal(409, "Idempotency-Key was used with another request", "idempotency_key_conflict")
        status = self._settled(record["status"])
        receipt = {"run_id": status["run_id"], "status": status["status"], "replayed": True}
        return answer(receipt, 202, echoed | {"Idempotency-Replayed": "true"})

    def _settled(self, status: dict[str, Any]) -> dict[str, Any]:
        """A keyed run's stored status; interrupted when its process ended before the run did."""
        if status["run_id"] in self.runs.runs or status["status"] in TERMINAL:
            return status
        error = "The gateway restarted before this run settled."
        return status | {"status": "interrupted", "error": error, "updated_at": self.runs.now()}

    def _known_status(self, run_id: str) -> dict[str, Any]:
        """Status of a run of this process or of a keyed one of an earlier process; refuses unknown ids."""
        if run_id in self.runs.runs:
            return self.runs.runs[run_id].status
        for record in self.record.keyed.values() if self.runs.durable else ():
            if record["status"]["run_id"] == run_id:
                return self._settled(record["status"])
        raise refusal(404, f"Run not found: {run_id}", "run_not_found")

    async def _status(self, asked: Asked) -> Response:
        status = self._known_status(asked.identifier)
        return answer(status | self.faults.next_status())

    async def _approval(self, asked: Asked) -> Response:
        run_id = asked.identifier
        self._known_status(run_id)
        given = parsed(asked.body)
        choice = str(given.get("choice", "")).strip().lower()
        choice = "once" if choice in ("approve", "approved", "allow") else choice
        if choice not in CHOICES:
            expected = "Invalid approval choice; expected one of: " + ", ".join(CHOICES)
            raise refusal(400, expected, "invalid_approval_choice")
        request_id = given.get("request_id") if self.runs.durable else None
        if request_id is not None and not (isinstance(request_id, str) and 0 < len(request_id) <= 256):
            raise refusal(400, "Invalid approval request_id", "invalid_approval_request")
        run = self.runs.runs.get(run_id)
        if run is None or not run.active:
            raise refusal(409, f"Run has no active approval session: {run_id}", "approval_not_active")
        everything = given.get("all") is True or given.get("resolve_all") is True
        resolved = self.runs.decide(run, choice, everything=everything, request_id=request_id)
        if not resolved:
            raise refusal(409, f"Run has no pending approval: {run_id}", "approval_not_pending")
        body = {"object": "hermes.run.approval_response", "run_id": run_id, "choice": choice, "resolved": resolved}
        return answer(body)

    async def _stop(self, asked: Asked) -> Response:
        run_id = asked.identifier
        run = self.runs.runs.get(run_id)
        if run is None or not run.active:
            if self.runs.durable:
                return answer(self._known_status(run_id))
            raise refusal(404, f"Run not found: {run_id}", "run_not_found")
        self.runs.ask_to_stop(run)
        return answer({"run_id": run_id, "status": "stopping"})

    async def _transport(self, run_id: str) -> Run:
        waited = 0.0
        while waited < self.runs.options.subscribe_wait:
            run = self.runs.runs.get(run_id)
            if run is not None and run.queue is not None:
                return run
            await asyncio.sleep(0.05)
            waited += 0.05
        raise refusal(404, f"Run not found: {run_id}", "run_not_found")

    async def _stream(self, asked: Asked, send: Send, cut_after: int | None) -> None:
        request = asked.request
        run = await self._transport(asked.identifier)
        last = request.headers.get("last-event-id") or request.query_params.get("last_seq") or "-1"
        gone = asyncio.ensure_future(_disconnected(request))
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        headers += [(b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = b": open\n\n" if self.runs.durable else b""
        await send({"type": "http.response.body", "body": opening, "more_body": True})
        self.runs.attach(run)
        sent = 0
        try:
            async for frame in self.runs.frames(run, int(last) if last.lstrip("-").isdigit() else -1):
                if cut_after is not None and sent >= cut_after:
                    await self._drop(request.scope)
                    return
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                sent += 1
            if run.lost:
                await self._drop(request.scope)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.runs.detach(run)
            gone.cancel()

    async def _sessions(self, asked: Asked) -> Response:
        query = asked.request.query_params
        limit, offset = (
            int(query[name]) if query.get(name, "").isdigit() else default
            for name, default in (("limit", 50), ("offset", 0))
        )
        newest = sorted(self.record.sessions, key=lambda name: -self.record.sessions[name]["started_at"])
        wanted = newest if query.get("source", "api_server") == "api_server" else []
        page = wanted[offset : offset + min(limit, 200)]
        more = len(wanted) > offset + len(page)
        found = [self.record.session(name) for name in page]
        return answer({"object": "list", "data": found, "limit": limit, "offset": offset, "has_more": more})

    def _session_object(self, session_id: str) -> dict[str, Any]:
        session = self.record.session(session_id)
        if session is None:
            raise refusal(404, f"Session not found: {session_id}", "session_not_found")
        return session

    async def _session(self, asked: Asked) -> Response:
        return answer({"object": "hermes.session", "session": self._session_object(asked.identifier)})

    async def _messages(self, asked: Asked) -> Response:
        session_id = asked.identifier
        self._session_object(session_id)
        rows = self.record.rows.get(session_id, [])
        return answer({"object": "list", "session_id": session_id, "data": rows})

    async def _ledger(self, _: Asked) -> Response:
        return answer(self.record.ledger().answer())

    async def _order(self, asked: Asked) -> Response:
        try:
            self.order(msgspec.json.decode(asked.body, type=FaultOrder))
        except msgspec.ValidationError as wrong:
            raise refusal(400, str(wrong), "invalid_fault_order") from None
        return answer({"faults": len(self.faults), "draining": self.faults.draining})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
