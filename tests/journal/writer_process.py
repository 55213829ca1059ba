"""A process that appends: `python -m tests.journal.writer_process DSN NAME COUNT`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import anyio

from adapters.clock import SystemClock
from adapters.journal import Journal, Verdict
from tests.contract.journal import observe, row


async def main(dsn: str, name: str, count: int) -> None:
    """Append `count` commands and print `[history, position]` for each committed one."""
    journal = Journal(dsn, clock=SystemClock())
    await journal.start()
    numbers = iter(range(count))

    async def caller(mine: Iterator[int]) -> None:
        for number in mine:
            outcome = await observe(journal, row(f"{name}/{number}/a"), row(f"{name}/{number}/b"))
            if outcome.verdict is Verdict.COMMITTED:
                sys.stdout.write(json.dumps([f"{name}/{number}/b", outcome.position]) + "\n")
                sys.stdout.flush()

    async with anyio.create_task_group() as group:
        for _ in range(16):
            group.start_soon(caller, numbers)
    await journal.stop()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
