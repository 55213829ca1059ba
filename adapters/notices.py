"""Wake-ups inside one process: who waits for a history is rung when an event of it was stored.

A ring is a hint that saves time. Whoever waits looks again after a bounded time anyway, so a lost ring costs a delay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

LOOK_AGAIN_S = 2.0


class Bell:
    """Remembers one ring until it is cleared."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        """Wake whoever waits, or the next one who does."""
        self._event.set()

    def clear(self) -> None:
        """Forget earlier rings. Clear before looking, so that a ring after the look is not lost."""
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

    def tell(self, *histories: str) -> None:
        """Something was stored in these histories."""
        for history in histories:
            for bell in self._bells.get(history, ()):
                bell.ring()
