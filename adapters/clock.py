"""The only reader of time and chance: the system's clocks, sleeping, fresh identifiers and random bytes.

Everything else receives what it needs from here, so a test hands in times, ids and chance of its own. Random bytes are
fetched from the operating system a kilobyte at a time, each is given out once, and a child process begins with none.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime

import anyio

_NS_PER_MS = 1_000_000
_JITTER_BITS = 53
_ID_BITS = 62
_FETCHED_BYTES = 1024


class _Entropy:
    """The operating system's random bytes, fetched ahead: a call to it can cost more than all else in an id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead = b""
        os.register_at_fork(after_in_child=self._forget)

    def take(self, size: int) -> bytes:
        """Bytes that nobody was given before."""
        with self._lock:
            if len(self._ahead) < size:
                self._ahead = os.urandom(max(size, _FETCHED_BYTES))
            taken, self._ahead = self._ahead[:size], self._ahead[size:]
            return taken

    def bits(self, count: int) -> int:
        """A number below two to the power of ``count``."""
        size = (count + 7) // 8
        return int.from_bytes(self.take(size), "big") >> size * 8 - count

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._ahead = b""


_ENTROPY = _Entropy()


class SystemClock:
    """`domain.ports.Clock` on the system's clocks and the operating system's source of randomness."""

    def now(self) -> datetime:
        """The time in UTC, with microseconds."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back, whatever is done to the wall clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait on the running event loop."""
        await anyio.sleep(seconds)

    def new_id(self, prefix: str) -> str:
        """`prefix` and a UUIDv7 as 32 hex digits (AIP 1.2), ordered by time down to a quarter of a microsecond.

        The prefix is given with its underscore (``act_``). Uniqueness rests on 62 random bits, not on the time.
        """
        milliseconds, rest = divmod(time.time_ns(), _NS_PER_MS)
        fraction = (rest << 12) // _NS_PER_MS
        value = (milliseconds & (1 << 48) - 1) << 80 | 7 << 76 | fraction << 64 | 2 << 62 | _ENTROPY.bits(_ID_BITS)
        return f"{prefix}{value:032x}"

    def jitter(self) -> float:
        """A random number from 0 up to, and without, 1."""
        return _ENTROPY.bits(_JITTER_BITS) / (1 << _JITTER_BITS)

    def entropy(self, size: int) -> bytes:
        """`size` random bytes fit for keys and nonces."""
        return _ENTROPY.take(size)
