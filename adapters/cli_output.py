"""What commands print and how they end: tables and sentences for people, the interface's JSON with ``--json``.

Answers go to standard output, progress and errors to standard error (errors to standard output with ``--json``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DONE, REFUSED, USAGE, UNKNOWN = 0, 1, 2, 3
"""Exit codes: done; refused or a failed check; wrong usage; sent, and the outcome is not known."""

WIDEST = 72


def say(text: str = "") -> None:
    """One line of the answer."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def program() -> str:
    """How a person calls these commands from the folder in which this one was called."""
    script = Path(__file__).resolve().parents[1] / "scripts" / "run"
    if not script.is_file():
        return "hermes-reconciler"
    return "scripts/run" if script.parents[1] == Path.cwd().resolve() else str(script)


def note(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def tell_json(body: Any, *, line: bool = False) -> None:
    """A JSON answer; ``line`` writes it without line breaks, as one of many."""
    say(json.dumps(body, ensure_ascii=False, indent=None if line else 2))


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, none: str) -> None:
    """Columns under heads; the sentence ``none`` if there are no rows."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        return say(none)
    widths = [max(len(head), *(len(row[column]) for row in cells)) for column, head in enumerate(heads)]
    for row in ([head.upper() for head in heads], *cells):
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return None


def pairs(entries: Iterable[tuple[str, Any]]) -> None:
    """Names and values, one a line; what has no value is left out."""
    kept = [(name, _cell(value, WIDEST * 3)) for name, value in entries if value not in (None, "", [], {})]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        say(f"  {name.ljust(width)}  {value}")


def tell_error(error: Mapping[str, Any], *, as_json: bool) -> int:
    """The error with its effect and whether the same call may be made again; the exit code."""
    effect = str(error.get("effect", "none"))
    if as_json:
        tell_json({"error": dict(error)})
    else:
        note(f"{error.get('code')}: {error.get('message')}")
        again = "the same call may be made again" if error.get("retryable") else "do not repeat it unchanged"
        if pause := error.get("retry_after_ms"):
            again += f", after {pause} ms"
        note(f"  effect: {effect}; {again}")
        for name, value in dict(error.get("details") or {}).items():
            note(f"  {name}: {_cell(value, WIDEST * 3)}")
    return UNKNOWN if effect == "possible" else REFUSED


def _cell(value: Any, limit: int = WIDEST) -> str:
    match value:
        case None:
            text = "-"
        case bool():
            text = "yes" if value else "no"
        case str():
            text = value
        case list() | tuple():
            text = ", ".join(_cell(item, limit) for item in value)
        case dict():
            text = ", ".join(f"{name} {_cell(item, limit)}" for name, item in value.items())
        case _:
            text = str(value)
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
