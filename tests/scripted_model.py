"""An OpenAI chat completions endpoint whose replies are written in the prompt, for a real agent in front of it.

The directives are those of ``adapters.practice_script``; a ``TOOL`` line becomes a call of the tool ``terminal``.  The
script is in the last user message; which part of it is due follows from the assistant messages after that one, so the
model itself has no memory.  ``FAIL code`` is an HTTP error, ``SLEEP s`` delays what follows it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from adapters.practice_script import Directive, parse

_USED = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
_CALLS = frozenset({"TOOL", "ASK", "PTOOL", "SEQ"})
_numbers = itertools.count()


def replies(script: list[Directive]) -> list[list[Directive]]:
    """The script cut into model messages; a message ends with its tool calls."""
    cut: list[list[Directive]] = [[]]
    for line in script:
        lines = [Directive("TOOL", one) for one in line.commands()] if line.verb == "SEQ" else [line]
        for one in lines:
            cut[-1].append(one)
            if one.verb in _CALLS:
                cut.append([])
    return cut


def due(messages: list[dict[str, Any]]) -> list[Directive]:
    """The reply that a conversation waits for."""
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    spoken = sum(1 for message in messages[last_user:] if message["role"] == "assistant")
    script = replies(parse(_text(messages[last_user].get("content"))))
    return script[spoken] if spoken < len(script) and script[spoken] else [Directive("TEXT", "ok:")]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""


async def _pieces(reply: list[Directive]) -> AsyncIterator[dict[str, Any]]:
    said = False
    for line in reply:
        match line.verb:
            case "SLEEP" | "SILENCE":
                await asyncio.sleep(line.numbers()[0])
            case "SAY":
                yield {"content": " " * said + line.text}
                said = True
            case "TEXT":
                words = line.text.split(" ")
                for index, word in enumerate(words):
                    yield {"content": word + " " * (index + 1 < len(words))}
            case "WORDS":
                count, seconds = line.numbers()
                for number in range(int(count)):
                    yield {"content": f"w{number} "}
                    await asyncio.sleep(seconds)
            case "DELTAS":
                count, size = line.numbers()
                for _ in range(int(count)):
                    yield {"content": "x" * int(size)}
            case "TOOL" | "ASK" | "PTOOL":
                for index, command in enumerate(line.commands() if line.verb == "PTOOL" else [line.text]):
                    function = {"name": "terminal", "arguments": json.dumps({"command": command})}
                    call = {"index": index, "id": f"call_{next(_numbers)}", "type": "function", "function": function}
                    yield {"tool_calls": [call]}
            case _:
                continue


class ScriptedModel:
    """The endpoint on a thread of its own; ``base_url`` ends in ``/v1``, ``requests`` are the bodies it received."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
            ]
        )
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none"))
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self._listener])), daemon=True
        )

    def __enter__(self) -> Self:
        self._listener.listen(64)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "scripted", "object": "model", "owned_by": "tests"}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        reply = due(body["messages"])
        for line in reply:
            if line.verb == "FAIL":
                error = {"message": f"scripted failure {line.text}", "type": "scripted", "code": line.text}
                return JSONResponse({"error": error}, int(line.text))
        head = {"id": f"chatcmpl-{next(_numbers)}", "created": 0, "model": "scripted"}
        reason = "tool_calls" if reply[-1].verb in _CALLS else "stop"
        if body.get("stream"):
            return StreamingResponse(_stream(head, reply, reason), media_type="text/event-stream")
        pieces = [piece async for piece in _pieces(reply)]
        calls = [call for piece in pieces for call in piece.get("tool_calls", ())]
        text = "".join(piece.get("content", "") for piece in pieces)
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return JSONResponse(head | {"object": "chat.completion", "choices": [choice], "usage": _USED})


async def _stream(head: dict[str, Any], reply: list[Directive], reason: str) -> AsyncIterator[bytes]:
    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        frame = head | {"object": "chat.completion.chunk", "choices": [choice]} | more
        return b"data: " + json.dumps(frame).encode() + b"\n\n"

    yield chunk({"role": "assistant", "content": ""})
    async for piece in _pieces(reply):
        yield chunk(piece)
    yield chunk({}, reason)
    yield chunk({}, None, choices=[], usage=_USED)
    yield b"data: [DONE]\n\n"
