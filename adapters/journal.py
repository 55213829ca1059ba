"""The journal: histories of events in PostgreSQL, appended by commands and followed in commit order.

It works on bytes; what they mean is somebody else's. An append returns a verdict, never an exception, for everything
that can happen to it on the way; `ValueError` means that the command could never be one. A caller appends version n + 1
of a history only after it knows that n was committed. The recorded bytes of a command carry an id made for it alone, so
that the same bytes are the same command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread

from adapters.append_call import Clock
from adapters.command import NotConfirmed, NotTaken, Outcome, Stored, Takeover, Verdict, fence_history, pack
from adapters.follower import POLL_S, Horizon, Listener
from adapters.recorder import JournalRecorder, datastore
from adapters.wakeup import Wakeup, wakeup
from adapters.writer import Pending, Writer
from domain.values import Fence

__all__ = ["Clock", "Fence", "Journal", "NotConfirmed", "NotTaken", "Outcome", "Stored", "Verdict", "fence_history"]

START_S = 5.0

_Result = TypeVar("_Result")


class Journal:
    """The journal on PostgreSQL; one writer thread, one listener thread and a few reading connections.

    `dsn` reaches the primary directly or through a pooler in session mode; `schema` is the one that the migrations
    made. `on_state` hears `healthy`, `doubting` (something sent has no verdict) and `away`, from the writer's thread.
    Limits: commands waiting, events and bytes of a batch, seconds of one try; a command of more bytes goes alone.
    """

    def __init__(
        self,
        dsn: str,
        *,
        clock: Clock,
        schema: str = "public",
        queue_limit: int = 10_000,
        batch_events: int = 1024,
        batch_bytes: int = 4 * 2**20,
        try_timeout_s: float = 10.0,
        reading_connections: int = 4,
        on_state: Callable[[str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._batch_events = batch_events
        self._horizon = Horizon()
        self._writer = Writer(
            dsn,
            schema=schema,
            clock=clock,
            queue_limit=queue_limit,
            batch_events=batch_events,
            batch_bytes=batch_bytes,
            try_timeout_s=try_timeout_s,
            stored=self._horizon.reach,
            on_state=on_state,
        )
        self._dsn, self._schema, self._connections = dsn, schema, reading_connections
        self._reading = anyio.CapacityLimiter(reading_connections)
        self._recorder: JournalRecorder | None = None
        self._listener: Listener | None = None

    @property
    def state(self) -> str:
        """`healthy`, `doubting` or `away`."""
        return self._writer.state

    @property
    def in_doubt(self) -> int:
        """How many commands were sent and have no verdict."""
        return self._writer.in_doubt

    @property
    def last_commit_at(self) -> float | None:
        """The clock's monotonic time of the last acknowledged commit."""
        return self._writer.last_commit_at

    async def start(self) -> None:
        """Open the connections and try one commit, which `state` tells the end of.

        Raises eventsourcing's `PersistenceError` when the database cannot be read. An idle journal learns nothing new
        about its database: a probe that wants to know confirms.
        """
        self._recorder = await anyio.to_thread.run_sync(self._open_recorder)
        self._horizon.reach(await self.last_position())
        self._listener = Listener(self._dsn, self._schema, self._horizon, self._clock)
        self._listener.start()
        self._writer.start()
        await self._append([], None, None, START_S, None)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Store what has queued for at most `grace_s`, answer everyone, close everything."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close, grace_s)

    async def append(
        self,
        rows: Sequence[Stored],
        *,
        fence: Fence | None,
        deadline_s: float,
        not_after: datetime | None = None,
    ) -> Outcome:
        """Store a command, all rows or none, and return its verdict.

        With a `fence` it is a decision, without one an observation. After `not_after`, by the database's clock at the
        append, it is `EXPIRED`. At `deadline_s` a command that was sent is `UNKNOWN` and still being resolved, one
        that was not is withdrawn. A cancelled caller withdraws its command too, where that is still possible.
        """
        return await self._append(rows, fence, None, deadline_s, not_after)

    def submit(self, rows: Sequence[Stored], *, fence: Fence | None, not_after: datetime | None = None) -> Pending:
        """The same for threads: queue a command, then `wait(timeout_s)` for its outcome."""
        return self._submit(rows, fence, None, not_after, None)

    async def take_sequence(
        self, replica: str, state: bytes, topic: str, *, sequence: int | None = None, deadline_s: float = 30.0
    ) -> int:
        """Make a higher sequence of `replica` the current one and return it, acknowledged.

        It is the next one, or `sequence` where the lease names it. `state` is the event's bytes, unlike those of any
        other takeover. Raises `NotTaken` when `sequence` is not higher than the current one, or the deadline passed.
        """
        until = self._clock.monotonic() + deadline_s
        while True:
            current = max((row.version for row in await self.read(fence_history(replica))), default=0)
            wanted = current + 1 if sequence is None else sequence
            if wanted <= current:
                raise NotTaken(Outcome(Verdict.FENCED, 0, f"sequence {current} is stored"))
            row = Stored(history=fence_history(replica), version=wanted, topic=topic, state=state)
            left = until - self._clock.monotonic()
            outcome = await self._append([row], None, Takeover(replica, current), left, None)
            if outcome.verdict is Verdict.COMMITTED:
                return wanted
            if outcome.verdict is not Verdict.FENCED or left <= 0:
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
        """End the sequence of another replica by storing the next one, with further `rows` in the same command.

        Refused (`FENCED`, `UNLEASED`) unless `sequence` is exactly the current one. `fence` is that of the replica
        that takes over. From the commit on, no decision under `sequence` is stored.
        """
        row = Stored(history=fence_history(replica), version=sequence + 1, topic=topic, state=state)
        return await self._append([row, *rows], fence, Takeover(replica, sequence), deadline_s, None)

    async def read(self, history: str, after: int = 0) -> list[Stored]:
        """Rows of one history with a higher version than `after`, by version."""
        return await self._in_thread(partial(self._reader().history, history, after))

    async def read_many(self, histories: Sequence[str]) -> dict[str, list[Stored]]:
        """Rows of several histories; one that does not exist has none."""
        return await self._in_thread(partial(self._reader().histories, histories))

    async def read_log(self, after_position: int, limit: int) -> list[Stored]:
        """At most `limit` rows after a notification id, in commit order. Ids have gaps."""
        return await self._in_thread(partial(self._reader().log, after_position, limit))

    async def last_position(self) -> int:
        """The highest notification id that can be read; 0 for an empty journal."""
        return await self._in_thread(self._reader().last_position)

    async def confirm(self, deadline_s: float = 10.0) -> None:
        """Commit a record that covers everything read so far; raises `NotConfirmed` when that is not known."""
        outcome = await self._append([], None, None, deadline_s, None)
        if outcome.verdict is not Verdict.COMMITTED:
            raise NotConfirmed(outcome.detail)

    async def wait_beyond(self, position: int, timeout_s: float) -> int:
        """The highest known position, as soon as it is beyond `position` or the time is over.

        A notification is a hint; at least every two seconds the log itself is asked.
        """
        until = self._clock.monotonic() + timeout_s
        while True:
            left = until - self._clock.monotonic()
            waiting = wakeup()
            key = self._horizon.await_beyond(position, waiting)
            if key is not None:
                try:
                    await waiting.wait(min(left, POLL_S))
                finally:
                    self._horizon.forget(key)
                if self._horizon.position <= position:
                    self._horizon.reach(await self.last_position())
            if self._horizon.position > position or left <= POLL_S:
                return self._horizon.position

    async def _append(
        self,
        rows: Sequence[Stored],
        fence: Fence | None,
        takeover: Takeover | None,
        deadline_s: float,
        not_after: datetime | None,
    ) -> Outcome:
        answered = wakeup()
        pending = self._submit(rows, fence, takeover, not_after, answered)
        if pending.outcome is None:
            try:
                await answered.wait(deadline_s)
            finally:
                outcome = pending.give_up()
            return outcome
        return pending.outcome

    def _submit(
        self,
        rows: Sequence[Stored],
        fence: Fence | None,
        takeover: Takeover | None,
        not_after: datetime | None,
        waiting: Wakeup | None,
    ) -> Pending:
        packed = pack(rows, fence, takeover, not_after)
        if packed.count > self._batch_events:
            raise ValueError(f"a command is at most {self._batch_events} events")
        return self._writer.submit(packed, waiting)

    def _open_recorder(self) -> JournalRecorder:
        store = datastore(self._dsn, schema=self._schema, connections=self._connections)
        try:
            return JournalRecorder(store)
        except BaseException:
            store.close()
            raise

    def _close(self, grace_s: float) -> None:
        self._writer.stop(grace_s)
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        if self._recorder is not None:
            self._recorder.datastore.close()
            self._recorder = None

    def _reader(self) -> JournalRecorder:
        if self._recorder is None:
            raise RuntimeError("the journal is not started")
        return self._recorder

    async def _in_thread(self, call: Callable[[], _Result]) -> _Result:
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._reading)
