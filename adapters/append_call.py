"""One connection of the writer, and the one call made on it: a batch goes in, verdicts come out.

An answer counts when the server is ready for the next query and nothing warned: rows and the command's completion come
before the commit and prove nothing, and a commit whose wait for a standby was cancelled answers with a warning. What is
not an answer closes the connection by its socket; nothing is ever cancelled on the server.
"""

from __future__ import annotations

import os
import re
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from adapters.command import Outcome, Packed, Verdict

PINNED = {
    "default_transaction_isolation": "read\\ committed",
    "synchronous_commit": "on",
    "transaction_timeout": "5s",
    "client_encoding": "UTF8",
}
SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
ENVIRONMENT = ("08", "25", "28", "3D", "40", "53", "55", "57", "58", "F0", "XX", "23505")
COLUMNS = 11
STATEMENT = b"select * from append_events(" + b", ".join(b"$%d" % n for n in range(1, COLUMNS + 1)) + b")"

_TEXT, _BIGINT, _TIMESTAMP, _INTEGER, _BYTES = 25, 20, 1184, 23, 17
_ELEMENTS = (
    (_TEXT, 1009), (_BIGINT, 1016), (_TEXT, 1009), (_BIGINT, 1016), (_TIMESTAMP, 1185), (_INTEGER, 1007),
    (_INTEGER, 1007), (_TEXT, 1009), (_BIGINT, 1016), (_TEXT, 1009), (_BYTES, 1001),
)  # fmt: skip
_ARRAY = struct.Struct(">iiiii")
_INDEX = struct.Struct(">ii")
_CODES = {
    2: (Verdict.CONFLICT, "other bytes stand at one of its keys"),
    3: (Verdict.FENCED, "a newer sequence is stored"),
    4: (Verdict.UNLEASED, "its sequence is not stored, or only an older one"),
    5: (Verdict.EXPIRED, "the database's clock passed the last moment to store it"),
    6: (Verdict.CONFLICT, "integrity: some of its rows are stored and others are not"),
}


class Clock(Protocol):
    """Measures durations in seconds; never goes back."""

    def monotonic(self) -> float:
        """Seconds since some moment."""


class Refused(Exception):
    """The server answered with an error and no more; `environment` says that the batch was not the reason."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(f"{sqlstate}: {message}")
        self.environment = sqlstate.startswith(ENVIRONMENT)


class Doubtful(Exception):
    """No complete answer without a warning came; what the server did is not known."""


def pinned(dsn: str, schema: str, application_name: str) -> str:
    """`dsn` with what every connection of the journal sets for itself, whatever the role's defaults are.

    Raises `ValueError` for a schema whose name would need quoting.
    """
    if SCHEMA.fullmatch(schema) is None:
        raise ValueError("the name of a schema is lower-case letters, digits and underscores")
    options = str(conninfo_to_dict(dsn).get("options") or "")
    for name, value in PINNED.items():
        options += f" -c {name}={value}"
    options += f" -c search_path={schema}"
    return make_conninfo(dsn, options=options.strip(), application_name=application_name)


class AppendLine:
    """An open connection with the call prepared; not safe for two threads at once."""

    def __init__(self, dsn: str, schema: str, clock: Clock, try_timeout_s: float) -> None:
        """Connect; raises `psycopg.Error`, `Refused` or `Doubtful`, after each of which nothing is open."""
        self._clock = clock
        self._try_timeout_s = try_timeout_s
        timeout = max(2, round(try_timeout_s))
        self._connection = psycopg.connect(
            pinned(dsn, schema, "journal-writer"), autocommit=True, connect_timeout=timeout
        )
        self._pg = self._connection.pgconn
        self._warned = ""
        self._connection.add_notice_handler(self._notice)
        try:
            self._pg.nonblocking = 1
            self._pg.send_prepare(b"append", STATEMENT, [array for _, array in _ELEMENTS])
            self._answer()
        except BaseException:
            self.close()
            raise

    def append(self, batch: Sequence[Packed]) -> list[Outcome]:
        """Store the batch; one outcome for each command, in order. Raises `Refused` or `Doubtful`."""
        self._pg.send_query_prepared(b"append", _join(batch), [1] * COLUMNS, result_format=0)
        result = self._answer()
        return _outcomes(batch, *(result.get_value(0, column) or b"" for column in range(3)))

    def close(self) -> None:
        """Shut the socket down; a transaction in flight ends as the server decides."""
        with suppress(OSError, psycopg.Error):
            line = socket.socket(fileno=os.dup(self._pg.socket))
            with line:
                line.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            self._warned = f"{notice.sqlstate}: {notice.message_primary}"

    def _answer(self) -> pq.abc.PGresult:
        until = self._clock.monotonic() + self._try_timeout_s
        try:
            while self._pg.flush():
                self._wait(select.POLLIN | select.POLLOUT, until)
                self._pg.consume_input()
            results = []
            while True:
                while self._pg.is_busy():
                    self._wait(select.POLLIN, until)
                    self._pg.consume_input()
                result = self._pg.get_result()
                if result is None:
                    break
                results.append(result)
        except (psycopg.Error, OSError) as error:
            raise Doubtful(str(error).strip()) from error
        for result in results:
            if result.status == pq.ExecStatus.FATAL_ERROR:
                state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
                message = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
                if not state or self._pg.status != pq.ConnStatus.OK:
                    raise Doubtful(message or "connection lost")
                raise Refused(state, message)
        if self._warned or len(results) != 1:
            raise Doubtful(self._warned or "no complete answer")
        return results[0]

    def _wait(self, events: int, until: float) -> None:
        left = until - self._clock.monotonic()
        poll = select.poll()
        poll.register(self._pg.socket, events)
        if left <= 0 or not poll.poll(left * 1000):
            raise Doubtful("no answer in time")


def _join(batch: Sequence[Packed]) -> list[bytes]:
    guards = [_array(len(batch), _ELEMENTS[n][0], [command.guards[n] for command in batch]) for n in range(6)]
    total = sum(command.count for command in batch)
    owners = [_INDEX.pack(4, place) * command.count for place, command in enumerate(batch, 1)]
    events = [_array(total, _ELEMENTS[7 + n][0], [command.columns[n] for command in batch]) for n in range(4)]
    return [*guards, _array(total, _INTEGER, owners), *events]


def _array(count: int, element: int, parts: list[bytes]) -> bytes:
    if count == 0:
        return struct.pack(">iii", 0, 0, element)
    return _ARRAY.pack(1, 1, element, count, 1) + b"".join(parts)


def _outcomes(batch: Sequence[Packed], verdicts: bytes, positions: bytes, ids: bytes) -> list[Outcome]:
    codes = _numbers(verdicts)
    if len(codes) != len(batch):
        raise Doubtful("an answer for other commands")
    before, stored = _numbers(positions), _numbers(ids)
    outcomes = []
    place = 0
    for command, code, position in zip(batch, codes, before, strict=True):
        if code == 0:
            place += command.count
            outcomes.append(Outcome(Verdict.COMMITTED, stored[place - 1]))
        elif code == 1:
            outcomes.append(Outcome(Verdict.COMMITTED, position, "by identity"))
        else:
            verdict, detail = _CODES[code]
            outcomes.append(Outcome(verdict, 0, detail))
    return outcomes


def _numbers(text: bytes) -> list[int]:
    return [int(number) for number in text[1:-1].split(b",")] if len(text) > 2 else []
