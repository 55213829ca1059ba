"""The runs of the practice Hermes: one asyncio task per run, its approvals, its stop and its event transport.

Everything here lives on one event loop and is lost with it; what lasts is in the ``PracticeRecord``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from adapters.practice_faults import Flavour, PracticeOptions
from adapters.practice_script import Directive, PracticeRecord, parse, pattern_of
from domain.ports import Clock

TERMINAL = frozenset({"completed", "failed", "cancelled", "interrupted"})
CHOICES = ("once", "session", "always", "deny")
_NO_TEXT = "\u26a0\ufe0f The practice model gave no text."
_RUN_AHEAD_FRAMES = 256
_REPLAYED_FRAMES = 1000
_MESSAGE_END_SECONDS = 0.005


class _Stopped(Exception):
    """A stop reached the script."""


class _Failed(Exception):
    """The script failed the run."""


class Pending:
    """One command that waits for a decision."""

    def __init__(self, command: str, pattern: str, request_id: str) -> None:
        self.command, self.pattern, self.request_id = command, pattern, request_id
        self.choice: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Run:
    """One run: status object, pending approvals, stop mark and frames.

    ``frames`` is the single destructive queue of 0.19 (None is its end mark) or the replayable backlog of 0.22;
    it is None once the transport is gone.
    """

    def __init__(self, run_id: str, session_id: Any, status: dict[str, Any], session_turn: dict[str, Any]) -> None:
        self.run_id, self.session_id, self.status, self.turn = run_id, session_id, status, session_turn
        self.queue: asyncio.Queue[dict[str, Any] | bytes | None] | None = asyncio.Queue()
        self.backlog: list[dict[str, Any] | bytes] = []
        self.news = asyncio.Event()
        self.readers = 0
        self.unread = asyncio.Event()  #: set while nobody reads
        self.unread.set()
        self.muted = False
        self.lost = False  #: its process is gone, so its streams break off
        self.pending: deque[Pending] = deque()
        self.allowed: set[str] = set()
        self.stop = asyncio.Event()
        self.active = True
        self.key_scope: str | None = None
        self.task: asyncio.Task[None] | None = None


class PracticeRuns:
    """Registry of the runs of one provider process.

    Times of answers and events come from the clock.
    """

    def __init__(self, record: PracticeRecord, options: PracticeOptions, flavour: Flavour, clock: Clock) -> None:
        self.record, self.options, self.flavour = record, options, flavour
        self.approval_timeout = options.approval_timeout
        self.runs: dict[str, Run] = {}
        self.started_at = clock.now().isoformat()
        self._clock = clock

    def now(self) -> float:
        """Epoch seconds."""
        return self._clock.now().timestamp()

    @property
    def durable(self) -> bool:
        """Whether keys, replay and request ids exist (flavour 0.22)."""
        return self.flavour == "0.22"

    @property
    def active(self) -> int:
        """Runs that hold a slot."""
        return sum(1 for run in self.runs.values() if run.active)

    def new_id(self) -> str:
        """32 hexadecimal characters that no other process makes."""
        return hashlib.sha256(self._clock.new_id("practice").encode()).hexdigest()[:32]

    def start(self, prompt: str, session_id: Any, model: Any, turn: dict[str, Any]) -> Run:
        """Create a run and its task; ``turn`` holds instructions and history of the request."""
        run_id = f"run_{self.new_id()}"
        now = self.now()
        status = {"object": "hermes.run", "run_id": run_id, "status": "running", "updated_at": now, "created_at": now}
        run = Run(run_id, session_id or run_id, status, turn)
        status |= {"session_id": run.session_id, "model": model}
        self.runs[run_id] = run
        self.record.write("created", run_id=run_id)
        run.task = asyncio.get_running_loop().create_task(self._perform(run, prompt))
        return run

    def forget(self) -> None:
        """Lose every run at once, as a killed process does."""
        for run in self.runs.values():
            if run.task is not None:
                run.task.cancel()
            run.lost, run.active = True, False
            for _ in range(run.readers):
                self._put(run, None)
        self.runs.clear()

    def terminate(self) -> None:
        """What SIGTERM puts on the wire: every active run is cancelled, or interrupted on 0.22."""
        for run in [run for run in self.runs.values() if run.active]:
            if run.task is not None:
                run.task.cancel()
            if self.durable:
                self._finish(run, "interrupted", error="The gateway restarted before this run settled.")
            else:
                self._finish(run, "cancelled")

    async def read_out(self, within: float) -> None:
        """Wait until every reader has its last frame, at most the given seconds."""
        deadline = asyncio.get_running_loop().time() + within
        for run in list(self.runs.values()):
            left = deadline - asyncio.get_running_loop().time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.unread.wait(), max(left, 0))

    def decide(self, run: Run, choice: str, *, everything: bool, request_id: str | None) -> int:
        """Apply a decision to the oldest pending command (or all, or the named one); the number it reached."""
        chosen = [p for p in run.pending if request_id in (None, p.request_id)]
        for pending in chosen if everything else chosen[:1]:
            run.pending.remove(pending)
            if choice == "session":
                run.allowed.add(pending.pattern)
            if choice == "always":
                self.record.write("allowed", pattern=pending.pattern)
            self.record.write("choice", run_id=run.run_id, choice=choice, command=pending.command)
            pending.choice.set_result(choice)
        resolved = len(chosen) if everything else len(chosen[:1])
        if resolved:
            self._set(run, "running", last_event="approval.responded")
            self._emit(run, "approval.responded", choice=choice, resolved=resolved)
        return resolved

    def ask_to_stop(self, run: Run) -> None:
        """Mark the run as stopping; its task notices by itself."""
        self._set(run, "stopping", last_event="run.stopping")
        run.stop.set()

    def sweep(self) -> None:
        """Drop transports and terminal states that are older than their retention."""
        now = self.now()
        for run in list(self.runs.values()):
            if run.readers == 0 and now - run.status["created_at"] > self.options.stream_retention:
                self.drop_transport(run)
            if not run.active and now - run.status["updated_at"] > self.options.status_retention:
                del self.runs[run.run_id]

    def attach(self, run: Run) -> None:
        """One more reader of the run's stream."""
        run.readers += 1
        run.unread.clear()

    def detach(self, run: Run) -> None:
        """One reader less; on 0.19 the shared queue goes with it."""
        run.readers -= 1
        if run.readers == 0:
            run.unread.set()
        if not self.durable:
            self.drop_transport(run)

    def drop_transport(self, run: Run) -> None:
        """The event stream of the run is gone for good; the run goes on."""
        run.queue = None
        run.backlog = []

    async def frames(self, run: Run, after: int) -> AsyncIterator[bytes]:
        """Encoded frames and comments for one reader, up to the close comment.

        On 0.19 frames are taken from the queue that all readers of the run share; on 0.22 every reader gets each frame
        with a sequence number above ``after``.
        """
        keepalive = self.options.keepalive or (10.0 if self.durable else 30.0)
        queue, position = run.queue, after + 1
        while queue is not None:
            if not self.durable:
                try:
                    frame = await asyncio.wait_for(queue.get(), keepalive)
                except TimeoutError:
                    if not run.muted:
                        yield b": keepalive\n\n"
                    continue
                if frame is None:
                    break
                yield frame if isinstance(frame, bytes) else b"data: " + json.dumps(frame).encode() + b"\n\n"
                continue
            news, oldest = run.news, len(run.backlog) - _REPLAYED_FRAMES
            if position < oldest:
                lost = {"event": "replay.truncated", "requested_seq": position, "oldest_retained_seq": oldest}
                yield b"data: " + json.dumps(lost).encode() + b"\n\n"
                position = oldest
            while position < len(run.backlog):
                frame = run.backlog[position]
                numbered = frame if isinstance(frame, bytes) else json.dumps(frame | {"seq": position}).encode()
                yield numbered if isinstance(frame, bytes) else b"id: %d\ndata: " % position + numbered + b"\n\n"
                position += 1
            if not run.active:
                break
            try:
                await asyncio.wait_for(news.wait(), keepalive)
            except TimeoutError:
                if not run.muted:
                    yield b": keepalive\n\n"
        if not run.lost:
            yield b": stream closed\n\n"

    def _put(self, run: Run, frame: dict[str, Any] | bytes | None) -> None:
        if run.queue is None:
            return
        if self.durable:
            if frame is not None:
                run.backlog.append(frame)
            news, run.news = run.news, asyncio.Event()
            news.set()
        else:
            run.queue.put_nowait(frame)

    def _emit(self, run: Run, event: str, **fields: Any) -> None:
        self._put(run, {"event": event, "run_id": run.run_id, "timestamp": self.now(), **fields})

    def _set(self, run: Run, status: str | None = None, **fields: Any) -> None:
        run.status |= {"status": status or run.status["status"], "updated_at": self.now(), **fields}
        if run.key_scope is not None:
            keyed = self.record.keyed[run.key_scope]
            self.record.write("keyed", scope=run.key_scope, record=keyed | {"status": dict(run.status)})

    def _progress(self, run: Run, event: str, **fields: Any) -> None:
        self._set(run, last_event=event)
        self._emit(run, event, **fields)

    def _finish(self, run: Run, status: str, **fields: Any) -> None:
        run.active = False
        run.pending.clear()
        if self.durable and status != "interrupted":
            flags = {"completed": status == "completed", "partial": False, "interrupted": status == "cancelled"}
            fields |= flags
        self._emit(run, f"run.{status}", **fields)
        self._set(run, status, last_event=f"run.{status}", **fields)
        self._put(run, None)

    async def _perform(self, run: Run, prompt: str) -> None:
        for wrong in (run.session_id, run.turn.get("instructions") or ""):
            if not isinstance(wrong, str):
                self._finish(run, "failed", error=f"str expected, not {type(wrong).__name__}")
                return
        turn = _Turn(self, run)
        try:
            await asyncio.sleep(0)
            self.record.write("session", session_id=run.session_id, started_at=self.now())
            turn.row("user", prompt)
            output = await turn.converse(parse(prompt))
            if run.stop.is_set():
                raise _Stopped
        except _Stopped:
            if turn.calls > 1 or turn.tools:
                turn.row("assistant", "Operation interrupted.")
            await asyncio.sleep(self.options.stop_delay)
            self._finish(run, "cancelled")
        except (_Failed, ValueError) as wrong:
            self._finish(run, "failed", error=str(wrong))
        else:
            used = {"input_tokens": 11 * turn.calls, "output_tokens": 7 * turn.calls, "total_tokens": 18 * turn.calls}
            if self.durable:
                used |= {"cache_read_tokens": 0, "cache_write_tokens": 0}
            self._finish(run, "completed", output=output, usage=used)


class _Turn:
    """One pass through a script: what the model says, the tools it calls, the rows that stay."""

    def __init__(self, runs: PracticeRuns, run: Run) -> None:
        self.runs, self.run = runs, run
        self.calls, self.tools = 1, 0
        self._said: list[str] = []
        self._after_tool = False

    def row(self, role: str, content: str, **more: Any) -> None:
        self.runs.record.row(self.run.session_id, self.runs.now(), role, content, **more)

    async def converse(self, script: list[Directive]) -> str:
        """Perform the script; the final output.  Raises _Stopped, _Failed, or ValueError for malformed numbers."""
        output, reason = "", "stop"
        for line in script:
            await self._pause(0)
            match line.verb:
                case "TEXT":
                    for word in line.text.split(" "):
                        await self._say(" " * bool(self._said) + word)
                case "SAY":
                    await self._say(" " * bool(self._said) + line.text)
                case "WORDS":
                    count, seconds = line.numbers()
                    for number in range(int(count)):
                        await self._say(" " * bool(self._said) + f"w{number}")
                        await self._pause(seconds)
                case "DELTAS":
                    await self._flood(*(int(number) for number in line.numbers()))
                    output = f"sent {line.text} deltas"
                case "SLEEP":
                    await self._pause(line.numbers()[0])
                case "SILENCE":
                    self.run.muted = True
                    await self._pause(line.numbers()[0])
                    self.run.muted = False
                case "FRAME":
                    self.runs._put(self.run, json.loads(line.text))
                case "BYTES":
                    self.runs._put(self.run, line.text.encode().decode("unicode_escape").encode("latin-1"))
                case "FAIL":
                    code = line.text.isdigit()
                    raise _Failed(f"HTTP {line.text}: scripted failure {line.text}" if code else line.text)
                case "EMPTY":
                    output, reason = _NO_TEXT, ""
                case "SEQ":
                    for command in line.commands():
                        await self._call([command], "TOOL")
                case "PTOOL" | "ASK-BOTH":
                    await self._call(line.commands(), line.verb)
                case _:
                    await self._call([line.text], line.verb)
        output = await self._end_message() or output or ("ok:" if reason else output)
        self.row("assistant", output if reason else "(empty)", finish_reason=reason or None)
        return output

    async def _pause(self, seconds: float) -> None:
        if seconds and not self.run.stop.is_set():
            try:
                await asyncio.wait_for(self.run.stop.wait(), seconds)
            except TimeoutError:
                return
        if self.run.stop.is_set():
            raise _Stopped

    async def _say(self, text: str) -> None:
        self.runs._emit(self.run, "message.delta", delta="\n\n" * self._after_tool + text)
        self._after_tool = False
        self._said.append(text)

    async def _flood(self, count: int, size: int) -> None:
        text = "x" * size
        for number in range(count):
            self.runs._emit(self.run, "message.delta", delta=text)
            if number % 16 == 15:
                await asyncio.sleep(0)
                while self.run.readers and self.run.queue and self.run.queue.qsize() > _RUN_AHEAD_FRAMES:
                    await self._pause(0.002)

    async def _end_message(self) -> str:
        text = "".join(self._said)
        self._said = []
        if text:
            await self._pause(_MESSAGE_END_SECONDS)
            self.runs._progress(self.run, "reasoning.available", text=text)
        return text

    async def _call(self, commands: list[str], verb: str) -> None:
        text = await self._end_message()
        named = verb == "TOOL" and commands[0] and " " not in commands[0]
        tool = commands[0] if named else "terminal"
        calls: list[dict[str, Any]] = []
        for command in commands:
            self.tools += 1
            arguments = json.dumps({} if named else {"command": command})
            function = {"name": tool, "arguments": arguments}
            calls.append({"id": f"call_{self.run.run_id[4:12]}_{self.tools}", "type": "function", "function": function})
        self.row("assistant", text, tool_calls=calls, finish_reason="tool_calls")
        work = [self._tool(tool, call["id"], command, verb) for call, command in zip(calls, commands, strict=True)]
        if verb == "ASK-BOTH":
            await asyncio.gather(*work)
        else:
            for one in work:
                await one
        self.calls += 1
        self._after_tool = True
        await self._pause(0)

    async def _tool(self, tool: str, call_id: str, command: str, verb: str) -> None:
        began = self.runs.now()
        self.runs._progress(self.run, "tool.started", tool=tool, preview=command)
        pattern = pattern_of(command, always_asks=verb.startswith("ASK"))
        result: dict[str, Any] = {"output": "", "exit_code": -1, "error": "command denied", "status": "blocked"}
        if pattern is None or await self._permitted(command, pattern, verb):
            code = await self._execute(command)
            result = {"output": "", "exit_code": code, "error": None if code == 0 else f"exit code {code}"}
        took = round(self.runs.now() - began, 3)
        self.runs._progress(self.run, "tool.completed", tool=tool, duration=took, error=result["exit_code"] != 0)
        self.row("tool", json.dumps(result), tool_call_id=call_id, tool_name=tool)

    async def _permitted(self, command: str, pattern: str, verb: str) -> bool:
        runs, run = self.runs, self.run
        if pattern in run.allowed or pattern in runs.record.allowed:
            return True
        pending = Pending(command, pattern, runs.new_id())
        run.pending.append(pending)
        request: dict[str, Any] = {"command": command, "pattern_key": pattern, "pattern_keys": [pattern]}
        request |= {"description": pattern, "allow_permanent": verb not in ("ASK-SESSION", "ASK-ONCE")}
        offered = {"ASK-ONCE": ("once", "deny"), "ASK-SESSION": ("once", "session", "deny")}.get(verb, CHOICES)
        if verb == "ASK-ONCE":
            request["smart_denied"] = True
        if runs.durable:
            request |= {"request_id": pending.request_id, "allow_session": "session" in offered}
        request |= {"event": "approval.request", "run_id": run.run_id, "timestamp": runs.now(), "choices": offered}
        runs._set(run, "waiting_for_approval", last_event="approval.request")
        if runs.durable:
            runs._set(run, approval=request)
        runs._put(run, request)
        stopping = asyncio.ensure_future(run.stop.wait())
        either: set[asyncio.Future[Any]] = {pending.choice, stopping}
        try:
            done, _ = await asyncio.wait(either, timeout=runs.approval_timeout, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done and not pending.choice.done():
                await asyncio.wait({pending.choice}, timeout=runs.options.approval_stop_delay)
        finally:
            stopping.cancel()
            if pending in run.pending:
                run.pending.remove(pending)
        return pending.choice.done() and pending.choice.result() != "deny"

    async def _execute(self, command: str) -> int:
        """Carry out the parts of a command; its exit code.  A decided command begins even after a stop, as measured."""
        for part in (part.strip() for part in command.split("&&")):
            verb, _, seconds = part.partition(" ")
            if part == "false":
                return 1
            if verb == "sleep":
                try:
                    await self._pause(float(seconds))
                except _Stopped:
                    return 130
            else:
                self.runs.record.write("effect", run_id=self.run.run_id, command=part)
        return 0
