"""The language in which a prompt tells the practice Hermes what to do, and the record that survives its process.

One directive per line; lines that begin with no known word are ignored when at least one line does.  A prompt without
any directive is answered with ``ok: <prompt>``.

===================  =====================================================================================
``TEXT words``       final answer, one ``message.delta`` per word
``SAY text``         one ``message.delta``; beside the next tool call, or part of the answer when it comes last
``WORDS n s``        answer of n words, s seconds apart
``TOOL command``     terminal command; a single word is the name of a tool instead.  A command that deletes
                     recursively below ``/`` asks for approval first
``SEQ a ;; b``       several commands, one model message each
``PTOOL a ;; b``     several commands in one model message, run one after another
``ASK command``      command that always asks for approval
``ASK-SESSION c``    the same, but ``always`` is not offered
``ASK-ONCE c``       the same, but only ``once`` and ``deny`` are offered
``ASK-BOTH a ;; b``  two commands whose approvals are pending at the same time
``SLEEP s``          the model thinks for s seconds; keepalive comments go on
``SILENCE s``        the same, without keepalive comments
``DELTAS n size``    n ``message.delta`` frames of size characters, held back while a reader lags behind
``FRAME json``       one event frame with exactly this object
``BYTES text``       these bytes into the stream (Python escapes are understood)
``FAIL text``        run fails with this error; a number gives ``HTTP <number>: scripted failure <number>``
``EMPTY``            the model gives no text
===================  =====================================================================================

A command is never given to a shell: ``a && sleep 2 && b`` appends effect ``a``, waits, appends effect ``b``; ``false``
ends it with exit code 1.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import msgspec

VERBS = frozenset(
    {"TEXT", "SAY", "WORDS", "TOOL", "SEQ", "PTOOL", "ASK", "ASK-SESSION", "ASK-ONCE", "ASK-BOTH", "SLEEP"}
)
VERBS |= {"SILENCE", "DELTAS", "FRAME", "BYTES", "FAIL", "EMPTY"}
_DELETES_BELOW_ROOT = re.compile(r"\brm\s+-\w*r\w*\s+/")


class Directive(msgspec.Struct, frozen=True):
    """One line of a script: its first word and the rest of the line."""

    verb: str
    text: str = ""

    def numbers(self) -> list[float]:
        """The arguments as numbers; raises ValueError for other words."""
        return [float(word) for word in self.text.split()]

    def commands(self) -> list[str]:
        """The arguments as commands divided by ``;;``."""
        return [part.strip() for part in self.text.split(";;")]


def parse(prompt: str) -> list[Directive]:
    """The directives of a prompt, or the echo answer when it holds none."""
    found = []
    for line in prompt.splitlines():
        verb, _, text = line.strip().partition(" ")
        if verb in VERBS:
            found.append(Directive(verb, text.strip()))
    return found or [Directive("TEXT", f"ok: {prompt}".strip())]


def pattern_of(command: str, *, always_asks: bool) -> str | None:
    """Name of the guarded pattern that a command matches, None when it may run unasked."""
    if _DELETES_BELOW_ROOT.search(command):
        return "delete in root path"
    return f"practice command {command.split(maxsplit=1)[0]}" if always_asks and command else None


class Choice(msgspec.Struct, frozen=True):
    """An approval decision that was applied to one pending command."""

    run_id: str
    choice: str
    command: str


class Effect(msgspec.Struct, frozen=True):
    """A part of a command that was carried out."""

    run_id: str
    command: str


class Ledger(msgspec.Struct):
    """The provider's own count of what reached it and of what it did."""

    requests: dict[str, int] = msgspec.field(default_factory=dict)  #: per route, authorised or not
    runs: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)  #: per run id, per route
    created: list[str] = msgspec.field(default_factory=list)  #: run ids in order of creation
    choices: list[Choice] = msgspec.field(default_factory=list)
    effects: list[Effect] = msgspec.field(default_factory=list)

    @property
    def starts_received(self) -> int:
        """Requests to start a run, refused ones included."""
        return self.requests.get("start", 0)

    @property
    def runs_created(self) -> int:
        """Runs that exist or existed."""
        return len(self.created)

    @property
    def choices_applied(self) -> int:
        """Pending commands that were decided."""
        return len(self.choices)

    @property
    def stops_received(self) -> int:
        """Requests to stop a run, refused ones included."""
        return self.requests.get("stop", 0)

    @property
    def tool_effects(self) -> int:
        """Command parts that were carried out."""
        return len(self.effects)

    @property
    def subscriptions(self) -> int:
        """Requests for an event stream, refused ones included."""
        return self.requests.get("events", 0)

    def count(self, route: str, run_id: str | None = None) -> int:
        """Requests received on a route, all or for one run."""
        return (self.requests if run_id is None else self.runs.get(run_id, {})).get(route, 0)

    def answer(self) -> dict[str, Any]:
        """JSON shape served by the practice provider: the fields plus the totals."""
        totals = ("starts_received", "runs_created", "choices_applied", "stops_received", "tool_effects")
        return {
            **msgspec.to_builtins(self),
            **{name: getattr(self, name) for name in totals},
            "subscriptions": self.subscriptions,
        }


class PracticeRecord:
    """What the practice provider keeps beyond its process: ledger, sessions, permanent permissions, keyed runs.

    Every fact is one JSON line, written before it is answered; without a file the record lives as long as the object.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self.sessions: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.allowed: set[str] = set()
        self.keyed: dict[str, dict[str, Any]] = {}
        self.responses: dict[str, dict[str, Any]] = {}
        self._row_count = 0
        self._file = None
        if path is not None:
            if path.exists():
                whole, _, torn = path.read_bytes().rpartition(b"\n")
                for line in whole.splitlines():
                    self._apply(json.loads(line))
                if torn:
                    path.write_bytes(whole + b"\n" if whole else b"")
            self._file = path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file; the record can still be read."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def ledger(self) -> Ledger:
        """An independent copy of the ledger as of now."""
        with self._lock:
            return msgspec.convert(msgspec.to_builtins(self._ledger), Ledger)

    def write(self, kind: str, **fields: Any) -> None:
        """Store one fact of a kind that ``_apply`` knows."""
        fact = {"kind": kind, **fields}
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(fact).encode() + b"\n")
            self._apply(fact)

    def row(self, session_id: str, now: float, role: str, content: str, **more: Any) -> None:
        """Append one message row to a session."""
        empty = ("tool_call_id", "tool_calls", "tool_name", "token_count", "finish_reason", "reasoning")
        row = {"id": self._row_count + 1, "session_id": session_id, "role": role, "content": content}
        row |= dict.fromkeys(empty) | {"timestamp": now, "reasoning_content": None} | more
        self.write("row", row=row)

    def session(self, session_id: str) -> dict[str, Any] | None:
        """The session object as the API shows it, None when no turn of it has begun."""
        stored = self.sessions.get(session_id)
        if stored is None:
            return None
        rows = self.rows.get(session_id, [])
        calls = sum(1 for row in rows if row["role"] == "assistant")
        tools = sum(len(row["tool_calls"] or ()) for row in rows)
        unset = ("user_id", "title", "ended_at", "end_reason", "actual_cost_usd", "parent_session_id")
        return {
            "id": session_id,
            "source": "api_server",
            "model": "scripted",
            "started_at": stored["started_at"],
            "message_count": len(rows),
            "tool_call_count": tools,
            "input_tokens": 11 * calls,
            "output_tokens": 7 * calls,
            "cache_read_tokens": 0,
            "cache_write_tokens": 0,
            "reasoning_tokens": 0,
            "estimated_cost_usd": 0.0,
            "api_call_count": calls,
            "has_system_prompt": True,
            "has_model_config": True,
            **dict.fromkeys(unset),
        }

    def _apply(self, fact: dict[str, Any]) -> None:
        match fact:
            case {"kind": "request", "route": route, "run_id": run_id}:
                self._ledger.requests[route] = self._ledger.requests.get(route, 0) + 1
                if run_id is not None:
                    per_run = self._ledger.runs.setdefault(run_id, {})
                    per_run[route] = per_run.get(route, 0) + 1
            case {"kind": "created", "run_id": run_id}:
                self._ledger.created.append(run_id)
            case {"kind": "choice", "run_id": run_id, "choice": choice, "command": command}:
                self._ledger.choices.append(Choice(run_id, choice, command))
            case {"kind": "effect", "run_id": run_id, "command": command}:
                self._ledger.effects.append(Effect(run_id, command))
            case {"kind": "session", "session_id": session_id, "started_at": started_at}:
                self.sessions.setdefault(session_id, {"started_at": started_at})
            case {"kind": "row", "row": row}:
                self.rows.setdefault(row["session_id"], []).append(row)
                self._row_count = row["id"]
            case {"kind": "allowed", "pattern": pattern}:
                self.allowed.add(pattern)
            case {"kind": "keyed", "scope": scope, "record": record}:
                self.keyed[scope] = record
            case {"kind": "response", "response_id": response_id, "response": None}:
                self.responses.pop(response_id, None)
            case {"kind": "response", "response_id": response_id, "response": response}:
                self.responses[response_id] = response
            case _:
                raise ValueError(f"unknown kind of fact: {fact.get('kind')}")
