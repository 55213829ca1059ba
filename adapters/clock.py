"""The only reader of time and chance: the system's clocks, sleeping, fresh identifiers and random bytes.

Everything else receives what it needs from here, so a test hands in times, ids and chance of its own.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime

import anyio

_NS_PER_MS = 1_000_000
_JITTER_STEPS = 1 << 53


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
        value = (milliseconds & (1 << 48) - 1) << 80 | 7 << 76 | fraction << 64 | 2 << 62 | secrets.randbits(62)
        return f"{prefix}{value:032x}"

    def jitter(self) -> float:
        """A random number from 0 up to, and without, 1."""
        return secrets.randbelow(_JITTER_STEPS) / _JITTER_STEPS

    def entropy(self, size: int) -> bytes:
        """`size` random bytes fit for keys and nonces."""
        return secrets.token_bytes(size)
