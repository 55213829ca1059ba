"""A connection whose every wait for the server is bounded, for calls that nobody else watches.

A network that swallows packets raises no error, and a system gives up on a connection only after many minutes. Here a
server that leaves a call without an answer counts as lost: the connection is closed, the call fails as on any other
connection that broke, and a pool opens another one.
"""

from __future__ import annotations

from typing import TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.rows import Row

ANSWER_S = 10.0  # longer than the server lets a transaction of ours live
LOOK_S = 0.1
_Result = TypeVar("_Result")


class BoundedConnection(psycopg.Connection[Row]):
    """Raises ``psycopg.OperationalError`` where an answer takes longer than ``ANSWER_S`` seconds."""

    def wait(self, gen: PQGen[_Result], interval: float = LOOK_S, timeout: float | None = None) -> _Result:
        """Perform one exchange with the server. A caller's own time limit is the caller's to deal with."""
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, ANSWER_S)
        except psycopg.OperationalError as error:
            if error.sqlstate is None:
                self.pgconn.finish()  # what comes now would be the answer to an earlier question
            raise
