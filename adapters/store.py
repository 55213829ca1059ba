"""The driver's store of events: a journal of bytes, the codec and the vault as one `domain.ports.Store`.

Whatever becomes of a command ends as stored events or as one of the exceptions of `domain.ports`. Its bytes are made
once, with fresh event ids, before its first try; all further tries are the journal's, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

import msgspec
from eventsourcing.persistence import PersistenceError

from adapters.codec import decode, encode, encode_event, sealing_time
from adapters.command import FENCE_PREFIX, NotConfirmed, NotTaken, Outcome, Stored, Verdict, fence_history
from adapters.vault import Vault
from domain.errors import HostError, IntegrityFault
from domain.events import SequenceTaken
from domain.history import Command, Recorded
from domain.ports import AppendUnknown, Conflict, Fenced, NeverStored, NotStored, TooLate
from domain.values import Fence

DEADLINE_S = 10.0
TAKE_SEQUENCE_S = 30.0
REFUSALS: dict[Verdict, type[Exception]] = {
    Verdict.CONFLICT: Conflict,
    Verdict.FENCED: Fenced,
    Verdict.UNLEASED: Fenced,
    Verdict.EXPIRED: TooLate,
    Verdict.REJECTED: NotStored,
    Verdict.NOT_APPENDED: NotStored,
    Verdict.UNKNOWN: AppendUnknown,
}


class Rows(Protocol):
    """What the store needs of a journal; `adapters.journal.Journal` says what each call promises."""

    async def append(
        self, rows: Sequence[Stored], *, fence: Fence | None, deadline_s: float, not_after: datetime | None = None
    ) -> Outcome:
        """Store a command, all rows or none."""

    async def take_sequence(
        self, replica: str, state: bytes, topic: str, *, sequence: int | None = None, deadline_s: float = 30.0
    ) -> int:
        """Make a higher sequence of a replica the current one."""

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
        """Store the next sequence after exactly this one, with further rows."""

    async def read(self, history: str, after: int = 0) -> list[Stored]:
        """Rows of a history."""

    async def read_many(self, histories: Sequence[str]) -> dict[str, list[Stored]]:
        """Rows of several histories."""

    async def read_log(self, after_position: int, limit: int) -> list[Stored]:
        """Rows in commit order."""

    async def confirm(self, deadline_s: float = 10.0) -> None:
        """Make what was read durable."""


class Unreadable(msgspec.Struct, frozen=True, kw_only=True):
    """An event that stands in the log and cannot be read; `reason` is the code of the fault."""

    history: str
    version: int
    position: int
    topic: str
    reason: str


class JournalStore:
    """Implements `domain.ports.Store`. `new_id` is the clock's; `deadline_s` bounds each append.

    `standby` says that acknowledged data has to be on a synchronous standby: then what was only read is confirmed.
    """

    def __init__(
        self,
        journal: Rows,
        vault: Vault,
        new_id: Callable[[str], str],
        *,
        deadline_s: float = DEADLINE_S,
        standby: bool = True,
    ) -> None:
        self._journal = journal
        self._vault = vault
        self._new_id = new_id
        self._deadline_s = deadline_s
        self._standby = standby

    async def load(self, history: str) -> tuple[Recorded, ...]:
        """As `Store.load`; IntegrityFault for a history that cannot be read, HostError `storage.unavailable`."""
        try:
            rows = await self._journal.read(history)
        except PersistenceError as error:
            raise HostError("storage.unavailable", "The journal cannot be read.") from error
        return tuple(map(decode, rows))

    async def load_many(self, histories: Sequence[str]) -> Mapping[str, tuple[Recorded, ...]]:
        """As `Store.load_many`, with an empty tuple for a history that does not exist."""
        try:
            found = await self._journal.read_many(histories)
        except PersistenceError as error:
            raise HostError("storage.unavailable", "The journal cannot be read.") from error
        return {history: tuple(map(decode, found.get(history, []))) for history in histories}

    async def read_log(self, after: int, limit: int) -> list[Recorded | Unreadable]:
        """At most `limit` events after a position, in commit order. One that cannot be read stands as `Unreadable`."""
        try:
            rows = await self._journal.read_log(after, limit)
        except PersistenceError as error:
            raise HostError("storage.unavailable", "The journal cannot be read.") from error
        return [_tolerant(row) for row in rows]

    async def append(self, command: Command) -> tuple[Recorded, ...]:
        """As `Store.append`. The result is what `load` gives, private content sealed.

        A command that adds to a fence history takes over from exactly the sequence that it expects: Conflict when
        another one is current.
        """
        written = await self._written(command)
        rows = [row for row, _ in written]
        takeover = next((row for row in rows if row.history.startswith(FENCE_PREFIX)), None)
        try:
            if takeover is None:
                outcome = await self._journal.append(
                    rows, fence=command.fence, deadline_s=self._deadline_s, not_after=command.not_after
                )
            else:
                outcome = await self._journal.expire(
                    takeover.history.removeprefix(FENCE_PREFIX),
                    takeover.version - 1,
                    takeover.state,
                    takeover.topic,
                    rows=[row for row in rows if row is not takeover],
                    fence=command.fence,
                    deadline_s=self._deadline_s,
                )
        except ValueError as error:
            raise NeverStored(str(error)) from error
        if outcome.verdict is Verdict.COMMITTED:
            return _recorded(written, takeover, outcome.position)
        if takeover is not None and outcome.verdict in (Verdict.FENCED, Verdict.UNLEASED):
            raise await self._why_no_takeover(command.fence, outcome)
        raise REFUSALS[outcome.verdict](outcome.detail)

    async def take_sequence(self, replica: str, event: SequenceTaken, sequence: int | None = None) -> Fence:
        """Make a higher sequence of `replica` the current one: the next, or the one that a lease names.

        Raises Fenced when `sequence` is not higher than the current one, NotStored or AppendUnknown otherwise.
        """
        state = encode_event(event, self._new_id("evt_"))
        try:
            taken = await self._journal.take_sequence(
                replica, state, event.topic, sequence=sequence, deadline_s=TAKE_SEQUENCE_S
            )
        except NotTaken as error:
            raise REFUSALS[error.outcome.verdict](error.outcome.detail) from error
        except PersistenceError as error:
            raise NotStored("The journal cannot be read.") from error
        return Fence(replica, taken)

    async def confirm(self) -> None:
        """As `Store.confirm`; AppendUnknown when it is not known that acknowledged data reached where it must be.

        Without a standby a row that can be read is as durable as it gets, and nothing is asked.
        """
        if not self._standby:
            return
        try:
            await self._journal.confirm(self._deadline_s)
        except NotConfirmed as error:
            raise AppendUnknown(str(error)) from error

    async def _written(self, command: Command) -> list[tuple[Stored, Recorded]]:
        at = sealing_time(command)
        ids = [self._new_id("evt_") for change in command.changes for _ in change.events]
        if at is None:
            return []
        try:
            await self._vault.prepare([change.scope for change in command.changes if change.scope is not None], at)
            return encode(command, ids, self._vault)
        except ValueError as error:
            raise NeverStored(str(error)) from error
        except HostError as error:
            raise NotStored(str(error)) from error

    async def _why_no_takeover(self, fence: Fence | None, outcome: Outcome) -> Exception:
        """Whose sequence was not the current one: our own (Fenced), or the one to be taken over (Conflict)."""
        if fence is not None:
            try:
                rows = await self._journal.read(fence_history(fence.replica))
            except PersistenceError:
                return NotStored(outcome.detail)
            if not rows or rows[-1].version != fence.sequence:
                return Fenced(outcome.detail)
        return Conflict(outcome.detail)


def _recorded(written: list[tuple[Stored, Recorded]], takeover: Stored | None, last: int) -> tuple[Recorded, ...]:
    """The events at their positions. One insert stores a command, so these are consecutive and end at `last`."""
    order = sorted(range(len(written)), key=lambda place: written[place][0] is not takeover)
    positions = dict(zip(order, range(last - len(written) + 1, last + 1), strict=True))
    return tuple(msgspec.structs.replace(event, position=positions[place]) for place, (_, event) in enumerate(written))


def _tolerant(row: Stored) -> Recorded | Unreadable:
    try:
        return decode(row)
    except IntegrityFault as fault:
        return Unreadable(
            history=row.history, version=row.version, position=row.position, topic=row.topic, reason=fault.code
        )
