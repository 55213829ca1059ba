"""A Hermes in memory and on virtual time, with a ledger of what it did that no engine can see.

Runs follow scripts chosen by their prompt. The older flavour gives each frame to one reader once; the newer one numbers
its frames and replays them. Tests bend single exchanges with ``faults`` and everything of a kind with ``bend``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import anyio
import msgspec
from anyio.abc import TaskGroup

from domain.provider import (
    TERMINAL_STATES,
    Comment,
    Exchange,
    Failure,
    Outgoing,
    RawFrame,
    StreamEnd,
    StreamItem,
    StreamOpened,
)

KEEPALIVE_S = 30.0
LATENCY_S = 0.01
Step = tuple[Any, ...]
CHOICES = ["once", "session", "always", "deny"]
PLAIN: tuple[Step, ...] = (
    ("wait", 1),
    ("delta", "hello "),
    ("wait", 1),
    ("delta", "world"),
    ("complete", "hello world"),
)


class Entry(msgspec.Struct, kw_only=True):
    """One mutation that reached the provider. ``applied`` says whether it did anything."""

    at: float
    operation: str
    key: str
    run_id: str = ""
    choice: str = ""
    applied: bool = False
    resolved: int = 0
    body: bytes = b""
    headers: dict[str, str] = {}


class SimRun:
    """One run inside the provider's process."""

    def __init__(self, run_id: str, session: str, steps: tuple[Step, ...], at: float) -> None:
        self.run_id, self.session, self.steps = run_id, session, steps
        self.state, self.last_event = "running", ""
        self.output: str | None = None
        self.error = ""
        self.usage: dict[str, int] = {}
        self.created, self.updated = at, at
        self.frames: list[dict[str, Any]] = []
        self.queue: list[tuple[dict[str, Any], list[str]]] = []
        self.stopping = False
        self.stop_takes = 0.2
        self.changed = anyio.Event()
        self.readers, self.reading, self.read = 0, 0, 0
        self.stream_gone = False
        self.stolen = False  # a foreign reader takes every further frame

    def touch(self) -> None:
        """Wake whoever waits for this run."""
        self.changed.set()
        self.changed = anyio.Event()

    def emit(self, event: str, **members: Any) -> None:
        """Put one frame on the stream."""
        now = anyio.current_time()
        self.frames.append({"event": event, "run_id": self.run_id, "timestamp": round(now, 6), **members})
        self.last_event, self.updated = event, now
        self.touch()

    def end(self, state: str, **members: Any) -> None:
        """The run is over."""
        if self.state not in TERMINAL_STATES:
            self.state = state
            self.queue.clear()
            self.emit(f"run.{state}", **members)

    def status(self) -> dict[str, Any]:
        """The status object."""
        told: dict[str, Any] = {
            "object": "hermes.run",
            "run_id": self.run_id,
            "status": self.state,
            "created_at": self.created,
            "updated_at": self.updated,
            "session_id": self.session,
            "model": "hermes-agent",
            "last_event": self.last_event,
        }
        if self.output is not None:
            told |= {"output": self.output, "usage": self.usage}
        return told | ({"error": self.error} if self.error else {})


def answer(status: int, body: Any, *, retry_after: str = "", kind: str = "application/json") -> Exchange:
    """A complete answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Exchange(sent=True, status=status, content_type=kind, body=content, retry_after=retry_after)


def refusal(status: int, code: str, *, retry_after: str = "") -> Exchange:
    """A complete refusal in the provider's error shape."""
    return answer(status, {"error": {"message": f"refused: {code}", "code": code}}, retry_after=retry_after)


LOST = Exchange(sent=True, failure=Failure.READ_ERROR)
UNREACHED = Exchange(sent=False, failure=Failure.CONNECT_REFUSED)
PROXY_PAGE = answer(502, b"<html>Bad gateway</html>", kind="text/html")


class SimHermes:
    """The provider. ``replay`` makes it the newer flavour."""

    def __init__(self, tasks: TaskGroup, *, replay: bool = False) -> None:
        self._tasks, self.replay = tasks, replay
        self.scripts: dict[str, tuple[Step, ...]] = {}
        self.runs: dict[str, SimRun] = {}
        self.created: list[str] = []
        self.ledger: list[Entry] = []
        self.effects: list[tuple[float, str, str]] = []
        self.reads: list[tuple[float, str]] = []
        self.subscriptions: list[tuple[float, str]] = []
        self.faults: dict[str, list[Any]] = {}
        self.bend: dict[str, Callable[[str, Exchange], Exchange]] = {}
        self.stall: dict[str, float] = {}
        self.slots: int | None = None
        self.approval_timeout_s = 60.0
        self.extra_resolved = 0
        self._scopes: list[anyio.CancelScope] = []

    # ---- what the engine calls ---------------------------------------------------------------------------------------

    async def exchange(self, out: Outgoing) -> Exchange:
        """One request and its answer; a fault of its operation is used up in turn."""
        operation, run_id = _route(out)
        fault = self.faults[operation].pop(0) if self.faults.get(operation) else None
        if fault == "unreached":
            await anyio.sleep(LATENCY_S)
            return UNREACHED
        await anyio.sleep(LATENCY_S)
        if fault == "lost_before_effect":
            return LOST
        if isinstance(fault, Exchange):
            if fault.sent:
                self._note(operation, out, run_id)
            return fault
        with anyio.move_on_after(out.timeout_ms / 1000 - LATENCY_S) as limit:
            told = self._act(operation, run_id, out)
            if operation in self.bend:
                told = self.bend[operation](run_id, told)
            await anyio.sleep(LATENCY_S + self.stall.get(operation, 0.0))
        if limit.cancelled_caught:
            return Exchange(sent=True, failure=Failure.TIMEOUT)
        return LOST if fault == "lost" else told

    def _note(self, operation: str, out: Outgoing, run_id: str) -> Entry | None:
        if operation == "status":
            self.reads.append((anyio.current_time(), run_id))
            return None
        headers = dict(out.headers)
        entry = Entry(
            at=anyio.current_time(),
            operation=operation,
            key=headers.get("Idempotency-Key", ""),
            run_id=run_id,
            body=out.body or b"",
            headers=headers,
        )
        self.ledger.append(entry)
        return entry

    def _act(self, operation: str, run_id: str, out: Outgoing) -> Exchange:
        entry = self._note(operation, out, run_id)
        if entry is not None and operation == "start":
            return self._start(entry, json.loads(out.body or b"{}"))
        run = self.runs.get(run_id)
        if run is None:
            return refusal(404, "run_not_found")
        if entry is None:
            return answer(200, run.status())
        return (
            self._stop(run, entry) if operation == "stop" else self._decide(run, entry, json.loads(out.body or b"{}"))
        )

    def _start(self, entry: Entry, body: dict[str, Any]) -> Exchange:
        live = sum(1 for run in self.runs.values() if run.state not in TERMINAL_STATES)
        if self.slots is not None and live >= self.slots:
            return refusal(429, "rate_limit_exceeded", retry_after="1")
        run_id = f"run_{len(self.created) + 1:032x}"
        steps = self.scripts.get(str(body.get("input")), PLAIN)
        run = SimRun(run_id, body.get("session_id") or run_id, steps, anyio.current_time())
        self.runs[run_id] = run
        self.created.append(run_id)
        entry.applied, entry.run_id = True, run_id
        self._tasks.start_soon(self._perform, run)
        return answer(202, {"run_id": run_id, "status": "started"})

    def _decide(self, run: SimRun, entry: Entry, body: dict[str, Any]) -> Exchange:
        entry.choice = body.get("choice", "")
        if run.state in TERMINAL_STATES:
            return refusal(409, "approval_not_active")
        if not run.queue:
            return refusal(409, "approval_not_pending")
        count = len(run.queue) if body.get("resolve_all") else 1
        if self.replay and body.get("request_id"):
            run.queue.sort(key=lambda item: item[0].get("request_id") != body["request_id"])
        decided, run.queue = run.queue[:count], run.queue[count:]
        for _, outcome in decided:
            outcome.append(entry.choice)
        entry.applied, entry.resolved = True, count
        if not run.queue and not run.stopping:
            run.state = "running"
        run.emit("approval.responded", choice=entry.choice, resolved=count)
        told = count + self.extra_resolved
        return answer(200, {"run_id": run.run_id, "choice": entry.choice, "resolved": told})

    def _stop(self, run: SimRun, entry: Entry) -> Exchange:
        if run.state in TERMINAL_STATES:
            return refusal(404, "run_not_found")
        entry.applied = True
        run.stopping, run.last_event = True, "run.stopping"
        if run.state != "waiting_for_approval":
            run.state = "stopping"
        self._tasks.start_soon(self._end_stopped, run)
        run.touch()
        return answer(200, {"run_id": run.run_id, "status": "stopping"})

    async def _end_stopped(self, run: SimRun) -> None:
        await anyio.sleep(run.stop_takes)
        if self.runs.get(run.run_id) is run:
            run.end("cancelled")

    # ---- the agent ---------------------------------------------------------------------------------------------------

    async def _perform(self, run: SimRun) -> None:
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            for step in run.steps:
                match step:
                    case ("wait", seconds):
                        await anyio.sleep(seconds)
                    case ("delta", text):
                        run.emit("message.delta", delta=text)
                    case ("frame", name, members):
                        run.emit(name, **members)
                    case ("ask", *commands):
                        await self._ask(run, [str(command) for command in commands])
                    case ("effect", name):
                        self.effects.append((anyio.current_time(), run.run_id, name))
                    case ("complete", output):
                        if not run.stopping:
                            usage = {"input_tokens": 3, "output_tokens": 4} if output else {}
                            run.output, run.usage = output, usage
                            run.end("completed", output=output, usage=usage)
                    case ("fail", error):
                        run.error = error
                        run.end("failed", error=error)
                    case ("never",):
                        await anyio.sleep_forever()

    async def _ask(self, run: SimRun, commands: list[str]) -> None:
        """Ask for each command, then wait until each is decided or given up."""
        for command in commands:
            members: dict[str, Any] = {"command": command, "choices": CHOICES}
            if self.replay:
                members["request_id"] = f"{len(run.frames):032x}"
            outcome: list[str] = []
            run.queue.append((members, outcome))
            if not run.stopping:
                run.state = "waiting_for_approval"
            run.emit("approval.request", **members)
            self._tasks.start_soon(self._give_up, run, (members, outcome))
        mine = [item for item in run.queue if item[0]["command"] in commands]
        while any(item in run.queue for item in mine):
            await run.changed.wait()
        for members, outcome in mine:
            if outcome and outcome[0] != "deny":
                self.effects.append((anyio.current_time(), run.run_id, members["command"]))
            run.emit("tool.completed", tool="terminal", error=not outcome or outcome[0] == "deny")

    async def _give_up(self, run: SimRun, item: tuple[dict[str, Any], list[str]]) -> None:
        await anyio.sleep(self.approval_timeout_s)
        if item in run.queue:
            run.queue.remove(item)
            run.touch()

    # ---- streams -----------------------------------------------------------------------------------------------------

    async def stream(self, out: Outgoing, idle_s: float) -> AsyncIterator[StreamItem]:
        """One event stream; a frame of the older flavour is gone once it was given."""
        run_id = unquote(out.path.split("/")[3])
        await anyio.sleep(LATENCY_S)
        self.subscriptions.append((anyio.current_time(), run_id))
        fault = self.faults["events"].pop(0) if self.faults.get("events") else None
        if fault == "unreached":
            yield StreamEnd(reason="not_connected", exchange=UNREACHED)
            return
        run = self.runs.get(run_id)
        refused = fault if isinstance(fault, Exchange) else None
        if run is None or run.stream_gone:
            refused = refusal(404, "run_not_found")
        if refused is None and "events" in self.bend:
            bent = self.bend["events"](run_id, answer(200, b""))
            refused = bent if bent.status != 200 else None
        if refused is not None or run is None:
            yield StreamEnd(reason="refused", exchange=refused)
            return
        yield StreamOpened()
        after = dict(out.headers).get("Last-Event-ID", "")
        async with aclosing(self._items(run, int(after) + 1 if self.replay and after else 0)) as items:
            async for item in items:
                yield item

    async def _items(self, run: SimRun, place: int) -> AsyncGenerator[StreamItem, None]:
        run.readers += 1
        run.reading = reader = run.readers
        try:
            while True:
                if run.reading != reader or self.runs.get(run.run_id) is not run:
                    yield StreamEnd(reason="cut")
                    return
                if run.stolen:
                    run.read = len(run.frames)
                place = place if self.replay else run.read
                if place < len(run.frames):
                    body, place = run.frames[place], place + 1
                    run.read = max(run.read, place)
                    yield frame(body | ({"seq": place - 1} if self.replay else {}))
                elif run.state in TERMINAL_STATES and not run.stolen:
                    yield Comment("stream closed")
                    yield StreamEnd(reason="closed")
                    return
                else:
                    changed = run.changed
                    with anyio.move_on_after(KEEPALIVE_S) as quiet:
                        await changed.wait()
                    if quiet.cancelled_caught:
                        yield Comment("keepalive")
        finally:
            if not self.replay and run.readers == reader:
                run.stream_gone = True

    # ---- what happens to it ------------------------------------------------------------------------------------------

    def cut_streams(self) -> None:
        """Every reader loses its connection."""
        for run in self.runs.values():
            run.reading = -1
            run.touch()

    def restart(self) -> None:
        """A new process: it knows no run; what the old one had begun may go on outside of it."""
        runs, self.runs = list(self.runs.values()), {}
        for scope in self._scopes:
            scope.cancel()
        self._scopes.clear()
        for run in runs:
            run.touch()

    def sent(self, operation: str) -> list[Entry]:
        """The requests of one operation that arrived."""
        return [entry for entry in self.ledger if entry.operation == operation]


def frame(body: dict[str, Any]) -> RawFrame:
    """A frame as it stands on the wire."""
    data = json.dumps(body)
    named = f"id: {body['seq']}\n" if "seq" in body else ""
    return RawFrame(raw=f"{named}data: {data}\n\n".encode(), id=str(body.get("seq", "")), data=data)


def _route(out: Outgoing) -> tuple[str, str]:
    parts = out.path.split("/")
    if out.method == "POST" and len(parts) == 3:
        return "start", ""
    if out.method == "GET" and len(parts) == 4:
        return "status", unquote(parts[3])
    return parts[4], unquote(parts[3])
