"""Waiting in an event loop for a call that another thread makes, at the least cost for each wait.

On asyncio this is a future and a timer; on trio, where tests run on virtual time, an event and a cancel scope.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

Handoff = Callable[[Callable[[], object]], object]


class Wakeup(Protocol):
    """One wait of one task. `handoff` gets a call into its loop from any thread; `wake` is to be called there."""

    handoff: Handoff

    def wake(self) -> None:
        """End the wait; more than once does no harm."""

    async def wait(self, seconds: float) -> None:
        """Return once woken, or when the time is over."""


class _AsyncioWakeup:
    __slots__ = ("_future", "_loop", "handoff")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future = loop.create_future()
        self.handoff: Handoff = loop.call_soon_threadsafe

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, seconds: float) -> None:
        timer = self._loop.call_later(max(0.0, seconds), self.wake)
        try:
            await self._future
        finally:
            timer.cancel()


class _TrioWakeup:
    def __init__(self) -> None:
        import trio

        self._event = trio.Event()
        self._move_on_after = trio.move_on_after
        self.handoff: Handoff = trio.lowlevel.current_trio_token().run_sync_soon

    def wake(self) -> None:
        self._event.set()

    async def wait(self, seconds: float) -> None:
        with self._move_on_after(max(0.0, seconds)):
            await self._event.wait()


def wakeup() -> Wakeup:
    """A wait of the running task."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return _TrioWakeup()
    return _AsyncioWakeup(loop)
