"""What is stored, also by other hosts, wakes whoever waits for it here and proves which hosts live.

Follows the log from the position at which this process began. It carries hints only: whoever is rung reads the history.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from adapters.lease import Watch
from adapters.notices import LOOK_AGAIN_S, Notices
from adapters.store import Unreadable
from domain.history import Recorded
from domain.ports import Clock

log = logging.getLogger(__name__)

PAGE = 500
PAUSE_S = 0.5


class Log(Protocol):
    """The store's log, in commit order."""

    async def read_log(self, after: int, limit: int) -> Sequence[Recorded | Unreadable]:
        """Events after a position."""


class Echo:
    """``wait_beyond(position, seconds)`` waits until there may be more; the read is the truth."""

    def __init__(
        self,
        log_of: Log,
        clock: Clock,
        notices: Notices,
        watch: Watch,
        wait_beyond: Callable[[int, float], Awaitable[Any]],
        position: int,
    ) -> None:
        self._log, self._clock, self._notices, self._watch = log_of, clock, notices, watch
        self._wait_beyond = wait_beyond
        self.position = position

    async def keep(self) -> None:
        """Follow for ever; a fault pauses it and it goes on where it stood."""
        while True:
            try:
                if not await self.advance():
                    await self._wait_beyond(self.position, LOOK_AGAIN_S)
            except Exception as error:  # noqa: BLE001  whatever one page meets, the loop goes on
                log.warning("echo.paused", extra={"fault": type(error).__name__})
                await self._clock.sleep(PAUSE_S)

    async def advance(self) -> int:
        """Read one page; how many events it had."""
        page = await self._log.read_log(self.position, PAGE)
        for event in page:
            if isinstance(event, Recorded):
                self._watch.notice(event)
            self._notices.tell(event)
            self.position = event.position
        return len(page)
