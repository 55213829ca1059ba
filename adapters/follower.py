"""Following the journal: listen, read, wait at most two seconds, read.

A notification is a hint that saves time; the read by notification id is the truth. Ids have gaps, so nothing counts on
the next number. With a synchronous standby, rows that were only read may exist on no other machine: a follower that
confirms commits one record between reading and telling, which covers all it has read.
"""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from typing import Protocol

import psycopg

from adapters.append_call import Clock, pinned
from adapters.command import Stored
from adapters.wakeup import Wakeup

POLL_S = 2.0
ANSWER_S = 2.0
PAUSE_S = 0.5
PAGE = 500


class Readable(Protocol):
    """What a follower needs of a journal."""

    async def read_log(self, after_position: int, limit: int) -> list[Stored]:
        """Rows after a position, in commit order."""

    async def wait_beyond(self, position: int, timeout_s: float) -> int:
        """Wait for a higher position."""

    async def confirm(self) -> None:
        """Make what was read durable where acknowledged data must be."""


class Follower:
    """Reads the log from after `position`, each row once and in commit order, page by page.

    `position` is that of the last row handed out: a new follower that starts there goes on without loss. With
    `confirm`, a page is confirmed before it is handed out. Errors of the journal pass through; `position` stays true.
    """

    def __init__(self, journal: Readable, position: int = 0, *, page: int = PAGE, confirm: bool = False) -> None:
        self.position = position
        self._journal, self._page, self._confirm = journal, page, confirm

    async def next_page(self, timeout_s: float) -> list[Stored]:
        """The next rows; waits for some at most `timeout_s` (2 s is enough) and returns none after that."""
        rows = await self._journal.read_log(self.position, self._page)
        if not rows:
            await self._journal.wait_beyond(self.position, timeout_s)
            rows = await self._journal.read_log(self.position, self._page)
        if rows:
            if self._confirm:
                await self._journal.confirm()
            self.position = rows[-1].position
        return rows


class Horizon:
    """The highest position known in this process, and whoever waits for a higher one; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[int, Wakeup]] = {}
        self._next = 0
        self.position = 0

    def reach(self, position: int) -> None:
        """Positions up to this one can be read now."""
        with self._lock:
            if position <= self.position:
                return
            self.position = position
            ready = [key for key, (beyond, _) in self._waiting.items() if beyond < position]
            woken = [self._waiting.pop(key) for key in ready]
        for _, waiting in woken:
            with suppress(RuntimeError):  # the event loop of that follower is gone
                waiting.handoff(waiting.wake)

    def await_beyond(self, position: int, waiting: Wakeup) -> int | None:
        """Ask to be woken beyond a position; None when it is passed already, else the key to forget it by."""
        with self._lock:
            if self.position > position:
                return None
            self._next += 1
            self._waiting[self._next] = (position, waiting)
            return self._next

    def forget(self, key: int) -> None:
        """Stop waiting."""
        with self._lock:
            self._waiting.pop(key, None)


class Listener:
    """A thread on a connection of its own that raises the horizon: at each notification, and every two seconds.

    A connection that does not answer within two seconds is closed and made again, so that a frozen one hides nothing
    for longer than that.
    """

    def __init__(self, dsn: str, schema: str, horizon: Horizon, clock: Clock) -> None:
        self._dsn, self._schema, self._horizon, self._clock = dsn, schema, horizon, clock
        self._stopped = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="journal-listener", daemon=True)

    def start(self) -> None:
        """Start listening; connecting is the thread's business."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._wake_write.send(b"x")
        self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                connection = psycopg.connect(
                    pinned(self._dsn, self._schema, "journal-listener"),
                    autocommit=True,
                    connect_timeout=round(ANSWER_S),
                )
            except (psycopg.Error, OSError):
                self._stopped.wait(PAUSE_S)
                continue
            with suppress(psycopg.Error, OSError, TimeoutError):
                self._listen(connection)
            with suppress(psycopg.Error, OSError):
                connection.close()

    def _listen(self, connection: psycopg.Connection) -> None:
        self._ask(connection, b"listen stored_events")
        while not self._stopped.is_set():
            self._horizon.reach(self._ask(connection, b"select max(notification_id) from stored_events"))
            self._await_notice(connection)

    def _await_notice(self, connection: psycopg.Connection) -> None:
        pg = connection.pgconn
        if pg.notifies() is None and self._readable(connection, POLL_S):
            pg.consume_input()
        while pg.notifies() is not None:
            pass

    def _ask(self, connection: psycopg.Connection, query: bytes) -> int:
        pg = connection.pgconn
        until = self._clock.monotonic() + ANSWER_S
        pg.send_query(query)
        value = 0
        while True:
            while pg.is_busy():
                if not self._readable(connection, until - self._clock.monotonic()):
                    raise TimeoutError("the listening connection does not answer")
                pg.consume_input()
            result = pg.get_result()
            if result is None:
                return value
            if result.status == psycopg.pq.ExecStatus.FATAL_ERROR:
                raise psycopg.OperationalError("the listening connection was refused")
            if result.ntuples:
                value = int(result.get_value(0, 0) or 0)

    def _readable(self, connection: psycopg.Connection, seconds: float) -> bool:
        poll = select.poll()
        poll.register(connection.pgconn.socket, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        ready = dict(poll.poll(max(0.0, seconds) * 1000))
        if self._wake_read.fileno() in ready:
            raise TimeoutError("stopped")
        return connection.pgconn.socket in ready
