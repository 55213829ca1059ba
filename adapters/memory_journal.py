"""The journal in memory: the same contract without a database, for tests and simulation.

Nothing here waits, times out or loses an answer; a wrapper adds such faults. One event loop uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import anyio.lowlevel

from adapters.append_call import Clock
from adapters.command import NotTaken, Outcome, Stored, Takeover, Verdict, fence_history, pack
from adapters.follower import Horizon
from adapters.wakeup import wakeup
from domain.values import Fence


class MemoryJournal:
    """Rows in a list; `now` is the clock that `not_after` is held against, as the database's is elsewhere."""

    state = "healthy"
    in_doubt = 0

    def __init__(self, *, clock: Clock, now: Callable[[], datetime]) -> None:
        self.last_commit_at: float | None = None
        self._clock, self._now = clock, now
        self._log: list[Stored] = []
        self._histories: dict[str, dict[int, Stored]] = {}
        self._horizon = Horizon()

    async def start(self) -> None:
        """Ready at once."""
        await anyio.lowlevel.checkpoint()

    async def stop(self, grace_s: float = 5.0) -> None:  # noqa: ARG002 - the port
        """Nothing is open."""
        await anyio.lowlevel.checkpoint()

    async def append(
        self,
        rows: Sequence[Stored],
        *,
        fence: Fence | None,
        deadline_s: float,
        not_after: datetime | None = None,
    ) -> Outcome:
        """See `Journal.append`; a deadline that is over already withdraws the command."""
        return await self._append(rows, fence, None, deadline_s, not_after)

    async def take_sequence(
        self, replica: str, state: bytes, topic: str, *, sequence: int | None = None, deadline_s: float = 30.0
    ) -> int:
        """See `Journal.take_sequence`."""
        while True:
            current = self._current(replica)
            wanted = current + 1 if sequence is None else sequence
            if wanted <= current:
                raise NotTaken(Outcome(Verdict.FENCED, 0, f"sequence {current} is stored"))
            row = Stored(history=fence_history(replica), version=wanted, topic=topic, state=state)
            outcome = await self._append([row], None, Takeover(replica, current), deadline_s, None)
            if outcome.verdict is Verdict.COMMITTED:
                return wanted
            if outcome.verdict is not Verdict.FENCED:
                raise NotTaken(outcome)

    async def expire(
        self,
        replica: str,
        sequence: int,
        state: bytes,
        topic: str,
        *,
        rows: Sequence[Stored] = (),
        fence: Fence | None = None,
        deadline_s: float = 30.0,
    ) -> Outcome:
        """See `Journal.expire`."""
        row = Stored(history=fence_history(replica), version=sequence + 1, topic=topic, state=state)
        return await self._append([row, *rows], fence, Takeover(replica, sequence), deadline_s, None)

    async def read(self, history: str, after: int = 0) -> list[Stored]:
        """See `Journal.read`."""
        await anyio.lowlevel.checkpoint()
        found = self._histories.get(history, {})
        return [found[version] for version in sorted(found) if version > after]

    async def read_many(self, histories: Sequence[str]) -> dict[str, list[Stored]]:
        """See `Journal.read_many`."""
        return {history: await self.read(history) for history in histories}

    async def read_log(self, after_position: int, limit: int) -> list[Stored]:
        """See `Journal.read_log`."""
        await anyio.lowlevel.checkpoint()
        return self._log[after_position : after_position + limit]

    async def last_position(self) -> int:
        """See `Journal.last_position`."""
        await anyio.lowlevel.checkpoint()
        return len(self._log)

    async def confirm(self, deadline_s: float = 10.0) -> None:  # noqa: ARG002 - the port
        """Memory has no standby."""
        await anyio.lowlevel.checkpoint()

    async def wait_beyond(self, position: int, timeout_s: float) -> int:
        """See `Journal.wait_beyond`."""
        waiting = wakeup()
        key = self._horizon.await_beyond(position, waiting)
        if key is not None:
            try:
                await waiting.wait(timeout_s)
            finally:
                self._horizon.forget(key)
        return self._horizon.position

    async def _append(
        self,
        rows: Sequence[Stored],
        fence: Fence | None,
        takeover: Takeover | None,
        deadline_s: float,
        not_after: datetime | None,
    ) -> Outcome:
        pack(rows, fence, takeover, not_after)
        await anyio.lowlevel.checkpoint()
        if deadline_s <= 0:
            return Outcome(Verdict.NOT_APPENDED, 0, "given up before its first try")
        refusal = self._refusal(rows, fence, takeover, not_after)
        if refusal is not None:
            return refusal
        for row in rows:
            stored = Stored(
                history=row.history,
                version=row.version,
                topic=row.topic,
                state=row.state,
                position=len(self._log) + 1,
            )
            self._log.append(stored)
            self._histories.setdefault(row.history, {})[row.version] = stored
        self.last_commit_at = self._clock.monotonic()
        self._horizon.reach(len(self._log))
        return Outcome(Verdict.COMMITTED, len(self._log))

    def _refusal(
        self, rows: Sequence[Stored], fence: Fence | None, takeover: Takeover | None, not_after: datetime | None
    ) -> Outcome | None:
        """The steps of `append_events` in their order: identity, fences, taken keys, expiry."""
        there = [self._histories.get(row.history, {}).get(row.version) for row in rows]
        same = [
            row
            for row, old in zip(rows, there, strict=True)
            if old and (old.topic, old.state) == (row.topic, row.state)
        ]
        if len(same) == len(rows):
            position = max((old.position for old in there if old), default=0)
            return Outcome(Verdict.COMMITTED, position, "by identity")
        for replica, sequence in (
            (fence.replica, fence.sequence) if fence else (None, 0),
            (takeover.replica, takeover.expected) if takeover else (None, 0),
        ):
            if replica is not None and self._current(replica) > sequence:
                return Outcome(Verdict.FENCED, 0, "a newer sequence is stored")
            if replica is not None and self._current(replica) < sequence:
                return Outcome(Verdict.UNLEASED, 0, "its sequence is not stored, or only an older one")
        if same:
            return Outcome(Verdict.CONFLICT, 0, "integrity: some of its rows are stored and others are not")
        if any(there):
            return Outcome(Verdict.CONFLICT, 0, "other bytes stand at one of its keys")
        if not_after is not None and self._now() > not_after:
            return Outcome(Verdict.EXPIRED, 0, "the database's clock passed the last moment to store it")
        return None

    def _current(self, replica: str) -> int:
        return max(self._histories.get(fence_history(replica), {}), default=0)
