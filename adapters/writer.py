"""The writer: one thread and one connection that append what has queued, a batch for each commit.

It never waits to gather: while one batch commits the next one fills. A failure that is not a verdict has one treatment:
close, connect again, the same bytes at the front of the queue. After a lost connection the next batch is half as large,
so that a command that kills connections ends up alone, and is then set aside and tried with growing pauses.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import psycopg

from adapters.append_call import AppendLine, Clock, Doubtful, Refused
from adapters.command import Outcome, Packed, Verdict
from adapters.wakeup import Handoff, Wakeup

ALONE = 3
PAUSE_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
ASIDE_S = (1.0, 2.0, 5.0, 15.0, 60.0)

HEALTHY, DOUBTING, AWAY = "healthy", "doubting", "away"


class Pending:
    """One command on its way; `outcome` is the verdict of the journal, however late it comes.

    `waiting` is woken once the outcome is there: those of one batch that share an event loop share a call into it.
    """

    __slots__ = ("_answered", "_writer", "alone", "outcome", "packed", "tried", "waiting")

    def __init__(self, packed: Packed, writer: Writer, waiting: Wakeup | None) -> None:
        self.packed, self.waiting = packed, waiting
        self.outcome: Outcome | None = None
        self.tried = False
        self.alone = 0
        self._answered: threading.Event | None = None
        self._writer = writer

    def wait(self, timeout_s: float) -> Outcome:
        """Block the calling thread for the verdict; gives up after `timeout_s`."""
        if self.outcome is None:
            self._answered = threading.Event()
            if self.outcome is None:
                self._answered.wait(timeout_s)
        return self.give_up()

    def give_up(self) -> Outcome:
        """What is true now: the verdict if it came, withdrawn before the first try, unknown after it."""
        return self.outcome or self._writer.withdraw(self)

    def answer(self, outcome: Outcome) -> None:
        """Set the outcome and release a thread that waits for it."""
        self.outcome = outcome
        if self._answered is not None:
            self._answered.set()


class Writer:
    """Takes packed commands from any thread; `stored` is told the highest notification id of each commit."""

    def __init__(
        self,
        dsn: str,
        *,
        schema: str,
        clock: Clock,
        queue_limit: int,
        batch_events: int,
        batch_bytes: int,
        try_timeout_s: float,
        stored: Callable[[int], None],
        on_state: Callable[[str], None] | None,
    ) -> None:
        self._dsn, self._schema, self._clock, self._try_timeout_s = dsn, schema, clock, try_timeout_s
        self._queue_limit, self._batch_events, self._batch_bytes = queue_limit, batch_events, batch_bytes
        self._stored, self._on_state = stored, on_state
        self._changed = threading.Condition()
        self._queue: deque[Pending] = deque()
        self._doubt: deque[Pending] = deque()
        self._aside: list[tuple[float, Pending]] = []
        self._limit = batch_events
        self._only_doubt = False
        self._failures = 0
        self._closing: float | None = None
        self._line: AppendLine | None = None
        self._thread: threading.Thread | None = None
        self.state = AWAY
        self.last_commit_at: float | None = None

    @property
    def in_doubt(self) -> int:
        """How many commands were sent and have no verdict yet, apart from the batch that is being tried."""
        return len(self._doubt) + len(self._aside)

    def start(self) -> None:
        """Start the thread; it connects by itself and goes on trying."""
        self._closing = None
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Take no more, store what has queued for at most `grace_s`, then give every caller its answer."""
        with self._changed:
            self._closing = self._clock.monotonic() + grace_s
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def submit(self, packed: Packed, waiting: Wakeup | None = None) -> Pending:
        """Queue a command; a full or closed queue answers at once."""
        pending = Pending(packed, self, waiting)
        with self._changed:
            closed = self._closing is not None or self._thread is None
            if closed or len(self._queue) >= self._queue_limit:
                detail = "the journal is closed" if closed else "the queue is full"
                pending.outcome = Outcome(Verdict.NOT_APPENDED, 0, detail)
            else:
                self._queue.append(pending)
                self._changed.notify()
        return pending

    def withdraw(self, pending: Pending) -> Outcome:
        """See `Pending.give_up`."""
        with self._changed:
            if pending.outcome is not None:
                return pending.outcome
            if pending.tried:
                return Outcome(Verdict.UNKNOWN, 0, "sent, and no answer is complete yet")
            pending.outcome = Outcome(Verdict.NOT_APPENDED, 0, "given up before its first try")
            return pending.outcome

    def _run(self) -> None:
        try:
            while self._await_work():
                if self._line is None and not self._connect():
                    continue
                batch = self._take()
                if batch and self._line is not None:
                    self._try(self._line, batch)
                elif not batch:
                    self._await_change()
        finally:
            self._drop_line()
            self._answer_rest()

    def _await_work(self) -> bool:
        """Wait until there is a command to try; False when closing and done, or out of time."""
        with self._changed:
            while True:
                now = self._clock.monotonic()
                if self._closing is not None and (now >= self._closing or not (self._queue or self.in_doubt)):
                    return False
                due = min((at for at, _ in self._aside), default=None)
                if self._doubt or self._queue or (due is not None and due <= now):
                    return True
                ends = [at - now for at in (due, self._closing) if at is not None]
                self._changed.wait(min(ends) if ends else None)

    def _await_change(self) -> None:
        """All that waits, waits for a command that was set aside, or was withdrawn."""
        with self._changed:
            if self._closing is None and self._aside:
                due = min(at for at, _ in self._aside)
                self._changed.wait(max(0.0, due - self._clock.monotonic()))

    def _connect(self) -> bool:
        try:
            self._line = AppendLine(self._dsn, self._schema, self._clock, self._try_timeout_s)
        except (psycopg.Error, OSError, Refused, Doubtful):
            self._become(AWAY)
            self._pause()
            return False
        return True

    def _take(self) -> list[Pending]:
        """The next batch: doubt first, each history in one command, closed by a takeover. Marks it as tried."""
        with self._changed:
            now = self._clock.monotonic()
            for entry in self._aside:
                if entry[0] <= now:
                    self._aside.remove(entry)
                    return [entry[1]]
            busy = {history for _, pending in self._aside for history in pending.packed.histories}
            batch: list[Pending] = []
            events = size = 0
            closed = False
            for source in (self._doubt, self._queue):
                if source is self._queue and batch and (self._only_doubt or closed):
                    break
                kept: list[Pending] = []
                while source and len(batch) < self._limit and len(kept) < self._batch_events:
                    pending = source.popleft()
                    packed = pending.packed
                    if pending.outcome is not None:
                        continue
                    if not busy.isdisjoint(packed.histories):
                        busy |= packed.histories
                        kept.append(pending)
                        continue
                    full = events + packed.count > self._batch_events or size + packed.size > self._batch_bytes
                    if batch and (full or batch[-1].packed.takeover):
                        source.appendleft(pending)
                        closed = True
                        break
                    busy |= packed.histories
                    events, size = events + packed.count, size + packed.size
                    pending.tried = True
                    batch.append(pending)
                source.extendleft(reversed(kept))
            return batch

    def _try(self, line: AppendLine, batch: list[Pending]) -> None:
        try:
            outcomes = line.append([pending.packed for pending in batch])
        except Refused as refused:
            if refused.environment:
                self._again(batch, AWAY, halve=False)
            elif len(batch) == 1:
                self._drop_line()
                self._answer(batch, [Outcome(Verdict.REJECTED, 0, str(refused))])
                self._limit = self._batch_events
            else:
                self._again(batch, DOUBTING, halve=True)
        except Exception:  # noqa: BLE001 - no exception says that the batch was not stored
            self._again(batch, DOUBTING, halve=True)
        else:
            self.last_commit_at = self._clock.monotonic()
            self._failures = 0
            self._only_doubt = False
            self._limit = min(self._batch_events, self._limit * 2)
            self._stored(max(outcome.position for outcome in outcomes))
            self._become(DOUBTING if self.in_doubt else HEALTHY)
            self._answer(batch, outcomes)

    def _again(self, batch: list[Pending], state: str, *, halve: bool) -> None:
        self._drop_line()
        with self._changed:
            if halve and len(batch) == 1:
                self._corner(batch[0])
            else:
                self._doubt.extendleft(reversed(batch))
            if not halve:
                self._only_doubt = True
            elif batch[0].alone <= ALONE:
                self._limit = max(1, len(batch) // 2)
        self._become(state)
        self._pause()

    def _corner(self, pending: Pending) -> None:
        pending.alone += 1
        if pending.alone < ALONE:
            self._doubt.appendleft(pending)
            return
        pause = ASIDE_S[min(pending.alone - ALONE, len(ASIDE_S) - 1)]
        self._aside.append((self._clock.monotonic() + pause, pending))

    def _answer(self, batch: Iterable[Pending], outcomes: Iterable[Outcome]) -> None:
        wakes: dict[Handoff, list[Callable[[], None]]] = {}
        for pending, outcome in zip(batch, outcomes, strict=True):
            pending.answer(outcome)
            if pending.waiting is not None:
                wakes.setdefault(pending.waiting.handoff, []).append(pending.waiting.wake)
        for handoff, calls in wakes.items():
            with suppress(RuntimeError):  # the event loop of those callers is gone
                handoff(partial(_call_all, calls))

    def _answer_rest(self) -> None:
        with self._changed:
            everyone = [*self._doubt, *(pending for _, pending in self._aside), *self._queue]
            rest = [pending for pending in everyone if pending.outcome is None]
            self._doubt.clear()
            self._aside.clear()
            self._queue.clear()
        closed = "the journal was closed"
        self._answer(rest, [Outcome(Verdict.UNKNOWN if one.tried else Verdict.NOT_APPENDED, 0, closed) for one in rest])

    def _pause(self) -> None:
        pause = PAUSE_S[min(self._failures, len(PAUSE_S) - 1)]
        self._failures += 1
        with self._changed:
            if self._closing is None or self._clock.monotonic() < self._closing:
                self._changed.wait_for(lambda: self._closing is not None, pause)

    def _drop_line(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _become(self, state: str) -> None:
        if state != self.state:
            self.state = state
            if self._on_state is not None:
                with suppress(Exception):  # whoever listens may not end the writer
                    self._on_state(state)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
