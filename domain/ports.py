"""What the driver needs from the world, as Protocols: the store of events, the provider, time and ids, and the vault.

Every call here is a point at which a process may die before or after it; the crash tests find them by these names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from domain.events import Target
from domain.history import Command, Recorded
from domain.provider import Exchange, Outgoing, StreamItem
from domain.values import Fence, Private


class Conflict(Exception):
    """The history moved on: load it again and decide again. Nothing of the command was stored."""


class Fenced(Exception):
    """A newer sequence of this replica exists: this process decides nothing any more. Nothing was stored."""


class TooLate(Exception):
    """The database's clock passed the command's ``not_after``. Nothing was stored, and nothing ever will be."""


class AppendUnknown(Exception):
    """Whether the command was stored is not known yet. Nothing may be sent or told because of it."""


class NotStored(Exception):
    """The command was certainly not stored: the store is away, full or refuses it."""


class NeverStored(NotStored):
    """No further try can store the command: it is too large, or holds what cannot be written down."""


class Store(Protocol):
    """Histories of events in PostgreSQL or in memory; ``append`` returns only after the commit is durable."""

    async def load(self, history: str) -> tuple[Recorded, ...]:
        """All events of a history, in order; empty if there is none."""

    async def load_many(self, histories: Sequence[str]) -> Mapping[str, tuple[Recorded, ...]]:
        """Several histories at once."""

    async def append(self, command: Command) -> tuple[Recorded, ...]:
        """Store the command or raise Conflict, Fenced, TooLate, AppendUnknown or NotStored."""

    async def confirm(self) -> None:
        """Make sure that what was only read is durable where acknowledged data must be."""


class Provider(Protocol):
    """One admitted endpoint. Nothing raises for what the provider does; it is in the answer."""

    target: Target

    async def send(self, out: Outgoing) -> Exchange:
        """Send one mutation on a connection of its own."""

    async def read(self, out: Outgoing) -> Exchange:
        """Perform one read."""

    def stream(self, out: Outgoing, idle_s: float = 75) -> AsyncIterator[StreamItem]:
        """Open one event stream; the last item is a ``StreamEnd``."""


class Clock(Protocol):
    """Time and fresh identifiers. ``now`` labels, ``monotonic`` measures."""

    def now(self) -> datetime:
        """The time in UTC."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    def new_id(self, prefix: str) -> str:
        """``prefix`` and a time-ordered unique hex id (AIP 1.2)."""

    def jitter(self) -> float:
        """A random number from 0 up to 1."""


class Vault(Protocol):
    """Opens private content and makes keyed digests of it."""

    async def open(self, private: Private) -> bytes:
        """The plain content, or HostError ``private.erased``."""

    def digest(self, content: bytes) -> str:
        """A keyed digest, 64 hex digits: equal content gives equal digests, and only to holders of the key."""


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """A pointer to work that is not over, from a view: it says where to look, the history says what is true.

    ``kind`` is ``action``, ``approval`` (an Action that waits for a decision) or ``run``. A run's ``id`` is its handle.
    """

    kind: str
    tenant: str
    id: str
    owner: Fence
    endpoint_id: str = ""


class Finder(Protocol):
    """Finds unfinished work without reading the whole log."""

    async def unfinished(self) -> Sequence[Unfinished]:
        """Every Action that is not settled and every run whose observation is not over, as of the latest event."""


class Lease(Protocol):
    """This process's right to decide."""

    @property
    def fence(self) -> Fence:
        """Its replica and sequence."""

    def valid(self) -> bool:
        """False once the lease may have run out by the local monotonic clock, margin included."""
