"""Wake-ups inside one process: who waits for a history is rung when an event of it was stored.

A ring is a hint that saves time. Whoever waits looks again after a bounded time anyway, so a lost ring costs a delay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import anyio

LOOK_AGAIN_S = 2.0


class Placed(Protocol):
    """An event at its place, as it was stored or read."""

    @property
    def history(self) -> str:
        """Its history."""

    @property
    def version(self) -> int:
        """Its version."""


class Bell:
    """Remembers one ring until it is cleared, and the highest version that it was rung for in each history.

    The same event is told by whoever stored it here and again by the log; the second telling does not ring.
    """

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._heard: dict[str, int] = {}

    def ring(self, history: str, version: int) -> None:
        """Wake whoever waits, or the next one who does, if this is news."""
        if version > self.heard(history):
            self._heard[history] = version
            self.wake()

    def wake(self) -> None:
        """Wake whoever waits without news of any history."""
        self._event.set()

    def heard(self, history: str) -> int:
        """The highest version of a history that was told."""
        return self._heard.get(history, 0)

    def clear(self) -> None:
        """Forget earlier rings. Clear before looking and never between a look and the wait that follows it."""
        if self._event.is_set():
            self._event = anyio.Event()

    async def wait(self, seconds: float = LOOK_AGAIN_S) -> bool:
        """Wait for a ring, at most ``seconds``; True if there was one."""
        with anyio.move_on_after(max(0.0, seconds)):
            await self._event.wait()
        return self._event.is_set()


class Notices:
    """Bells by history."""

    def __init__(self) -> None:
        self._bells: dict[str, set[Bell]] = {}

    @contextmanager
    def watch(self, *histories: str) -> Iterator[Bell]:
        """A bell that rings for any of these histories while the block runs."""
        bell = Bell()
        for history in histories:
            self._bells.setdefault(history, set()).add(bell)
        try:
            yield bell
        finally:
            for history in histories:
                bells = self._bells.get(history, set())
                bells.discard(bell)
                if not bells:
                    self._bells.pop(history, None)

    def tell(self, *stored: Placed) -> None:
        """These events are stored."""
        for event in stored:
            for bell in self._bells.get(event.history, ()):
                bell.ring(event.history, event.version)
