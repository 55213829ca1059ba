"""Stored views: the journal folded into rows, read by key and by list, rebuilt beside the live rows, and compared.

A view follows the log in batches of up to 500 events; rows and position change in one transaction. An event that cannot
be read or folded holds its own history and nothing else. No read here asks a provider, and no decision rests on a view.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import cache
from typing import Any, Protocol, TypeVar

import anyio
import msgspec

from adapters.codec import _strict_struct as strict_struct
from adapters.store import Unreadable
from adapters.view_tables import COUNTED, Batch, Difference, Entry, Fault, Filters, Place, Tables, count_key
from domain.errors import CallerError, HostError, NotNow
from domain.history import Recorded
from domain.values import canonical, sha256
from projections import Projection, Row
from projections.actions import ACTIONS
from projections.recovery import needs_after
from projections.runs import RUNS

BATCH = 500
POLL_S = 2.0
PAUSE_S = 0.5
LIMIT = 1000
COMPARE_TRIES = 20
FOLD_FAULT = "view.fold_failed"
PROJECTIONS: tuple[Projection[Any], ...] = (ACTIONS, RUNS)

RowT = TypeVar("RowT", bound=Row)


class Journal(Protocol):
    """What views need of the store of events; `adapters.store.JournalStore` is one."""

    async def read_log(self, after: int, limit: int) -> list[Recorded | Unreadable]:
        """Events after a position, in commit order."""

    async def load(self, history: str) -> tuple[Recorded, ...]:
        """A whole history, or IntegrityFault."""


class Clock(Protocol):
    """Time and waiting; `adapters.clock.SystemClock` is one."""

    def now(self) -> datetime:
        """The time in UTC."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list as it stood at ``position``: its rows, how many match in all, and the cursor after the last row.

    The cursor is empty when nothing follows. A row that changes while a list is paged in rising order comes again.
    """

    rows: tuple[Any, ...]
    total: int
    cursor: str
    position: int
    at: datetime | None


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """How views stand: position and version by view, seconds since the log was last read with success, and the code of
    the fault that stops them now, if one does. ``held`` counts histories that cannot be folded."""

    positions: dict[str, int]
    read_age_s: float | None
    failing: str
    held: int


class Views:
    """The views over one journal. ``tables`` keeps the rows; ``wait_beyond(position, seconds)`` waits for more events.

    Reads raise NotNow ``storage.unavailable`` while the tables are away, and NotNow ``connector_host.not_ready`` for a
    view that another release's fold has filled.
    """

    def __init__(
        self,
        tables: Tables,
        journal: Journal,
        clock: Clock,
        *,
        wait_beyond: Callable[[int, float], Awaitable[Any]] | None = None,
        projections: Sequence[Projection[Any]] = PROJECTIONS,
        batch: int = BATCH,
    ) -> None:
        self._tables, self._journal, self._clock = tables, journal, clock
        self._wait_beyond = wait_beyond
        self._projections = {projection.name: projection for projection in projections}
        self._batch = batch
        self._positions: dict[str, int] = {}
        self._held = 0
        self._read_at: float | None = None
        self._failing = ""
        self._turn = anyio.Lock()
        self._moved = anyio.Event()

    # ---- following ----

    async def prepare(self) -> None:
        """Make views that are missing, and build anew those of an older fold or with a held history that reads now."""
        for view in self._projections:
            await self._tables.call(self._tables.open, view, self._projections[view].version, True)
        for view, place in (await self._tables.call(self._tables.places)).items():
            if view in self._projections and (
                place.version < self._projections[view].version or await self._heals(place)
            ):
                await self.rebuild(view)

    async def run(self) -> None:
        """Follow the journal until cancelled. A fault pauses it and shows in `lag`; it goes on where it stood."""
        prepared = False
        while True:
            try:
                if not prepared:
                    await self.prepare()
                    prepared = True
                read = await self.advance()
                if not read:
                    await self._wait()
            except Exception as error:  # noqa: BLE001 - a follower that ends is worse than any fault it meets
                self._failing = error.code if isinstance(error, HostError) else type(error).__name__
                await self._clock.sleep(PAUSE_S)

    async def catch_up(self) -> int:
        """Fold everything that is stored now, and return the position reached."""
        if set(self._projections) - set(await self._tables.call(self._tables.places)):
            await self.prepare()
        while await self.advance():
            pass
        return min(self._positions.values(), default=0)

    async def advance(self) -> int:
        """Fold the next batch into every view that stands where it begins; the number of events read."""
        async with self._turn:
            places = [
                place
                for view, place in (await self._tables.call(self._tables.places)).items()
                if view in self._projections and place.version == self._projections[view].version
            ]
            if not places:
                return 0
            after = min(place.position for place in places)
            events = await self._journal.read_log(after, self._batch)
            self._positions = {place.view: place.position for place in places}
            if events:
                fitting = [place for place in places if place.position == after]
                if await self._tables.call(self._store, fitting, events):
                    self._positions |= {place.view: events[-1].position for place in fitting}
            self._read_at, self._failing = self._clock.monotonic(), ""
            moved, self._moved = self._moved, anyio.Event()
            moved.set()
            return len(events)

    async def _wait(self) -> None:
        if self._wait_beyond is None:
            await self._clock.sleep(POLL_S)
        else:
            await self._wait_beyond(min(self._positions.values(), default=0), POLL_S)

    def _store(self, places: Sequence[Place], events: Sequence[Recorded | Unreadable]) -> bool:
        return self._tables.apply([self._fold(place, events) for place in places])

    def _fold(self, place: Place, events: Sequence[Recorded | Unreadable]) -> Batch:
        """What these events change in one generation."""
        projection = self._projections[place.view]
        held = {fault.history for fault in self._tables.held(place)}
        faults: list[Fault] = []
        keys = {key for event in events if (key := _key(projection, event)) is not None}
        before = {
            key: decode_row(projection, doc) for key, doc in self._tables.docs(place, sorted(keys)).items()
        } if keys else {}  # fmt: skip
        rows: dict[str, Any] = dict(before)
        for event in events:
            if event.history in held or _kind(event.history) not in projection.histories:
                continue
            if isinstance(event, Unreadable):
                held.add(event.history)
                faults.append(_fault(event, event.topic, event.reason))
                continue
            key = _key(projection, event)
            if key is None:
                continue
            try:
                rows[key] = projection.fold(rows.get(key), event)
            except Exception:  # noqa: BLE001 - whatever one history holds, the others stay current
                held.add(event.history)
                faults.append(_fault(event, event.event.topic, FOLD_FAULT))
        changed = {key: row for key, row in rows.items() if row is not before.get(key)}
        self._held = len(held)
        return Batch(
            place=place,
            position=events[-1].position,
            at=self._clock.now(),
            entries=tuple(
                Entry(key=key, position=row.position, doc=msgspec.json.encode(row), facets=projection.facets(row))
                for key, row in sorted(changed.items())
            ),
            counts=_counts(projection, before, changed),
            faults=tuple(faults),
        )

    # ---- building and comparing ----

    async def rebuild(self, view: str) -> Place:
        """Fold the whole journal into a new generation beside the live one, and swap when it has caught up.

        NotNow ``connector_host.not_ready`` if another build of this view began meanwhile.
        """
        place = await self._tables.call(self._tables.open, view, self._projections[view].version, False)
        while True:
            place, read = await self._extend(place, None)
            if not read and await self._tables.call(self._tables.swap, place):
                return place

    async def compare(self, view: str) -> list[Difference]:
        """The drill: the live view against a fresh fold at the same position. Changes nothing of the live view."""
        fresh = await self._tables.call(self._tables.open, view, self._projections[view].version, False)
        try:
            for _ in range(COMPARE_TRIES):
                live = (await self._tables.call(self._tables.places))[view]
                fresh = await self._extend_to(fresh, live.position)
                async with self._turn:
                    live = (await self._tables.call(self._tables.places))[view]
                    fresh = await self._extend_to(fresh, live.position)
                    found = await self._tables.call(self._tables.differences, live, fresh)
                if found is not None:
                    return found
        finally:
            with anyio.CancelScope(shield=True):
                await self._tables.call(self._tables.drop, fresh)
        raise NotNow("connector_host.not_ready", "The view moved on at every try; compare it under less load.")

    async def _extend_to(self, place: Place, position: int) -> Place:
        while place.position < position:
            place, read = await self._extend(place, position)
            if not read:
                break
        return place

    async def _extend(self, place: Place, until: int | None) -> tuple[Place, int]:
        events = await self._journal.read_log(place.position, self._batch)
        if until is not None:
            events = [event for event in events if event.position <= until]
        if not events:
            return place, 0
        if not await self._tables.call(self._store, [place], events):
            raise NotNow("connector_host.not_ready", "Another build of this view began.")
        return msgspec.structs.replace(place, position=events[-1].position), len(events)

    async def _heals(self, place: Place) -> bool:
        """True if a history that is held can be read now."""
        for fault in await self._tables.call(self._tables.held, place):
            if fault.reason == FOLD_FAULT:
                continue
            try:
                await self._journal.load(fault.history)
            except HostError:
                continue
            return True
        return False

    # ---- reading ----

    async def get(self, projection: Projection[RowT], key: str) -> RowT | None:
        """The row of this key, or ``None``. Keys begin with the tenant: build them by `action_key` and `run_key`."""
        found = await self._tables.call(self._tables.one, projection.name, key)
        if found is None:
            raise NotNow("connector_host.not_ready", "The view is not built yet.")
        place, doc = found
        self._check(place)
        return decode_row(projection, doc) if doc is not None else None

    async def list(
        self,
        projection: Projection[RowT],
        filters: Filters,
        cursor: str = "",
        limit: int = 100,
        *,
        newest: bool = False,
    ) -> Page:
        """A page of rows by the position of their last change: oldest change first, or newest first.

        Raises CallerError ``query.invalid_cursor`` for a cursor of another list, or a changed one, and
        ``request.invalid`` for a limit outside 1 to 1000.
        """
        if not 1 <= limit <= LIMIT:
            raise CallerError("request.invalid", f"limit is from 1 to {LIMIT}.")
        after = read_cursor(projection.name, filters, newest, cursor) if cursor else None
        found = await self._tables.call(self._tables.page, projection.name, filters, after, newest, limit + 1)
        if found is None:
            raise NotNow("connector_host.not_ready", "The view is not built yet.")
        place, rows, total = found
        self._check(place)
        more = len(rows) > limit
        rows = rows[:limit]
        return Page(
            rows=tuple(decode_row(projection, doc) for _, doc in rows),
            total=total,
            cursor=make_cursor(projection.name, filters, newest, rows[-1][0]) if more else "",
            position=place.position,
            at=place.read_at,
        )

    async def changes(
        self, projection: Projection[RowT], filters: Filters, after: int, limit: int = 100
    ) -> tuple[RowT, ...]:
        """Rows that changed after a position, by position: what a feed reads next."""
        found = await self._tables.call(self._tables.page, projection.name, filters, after, False, limit, False)
        if found is None:
            return ()
        self._check(found[0])
        return tuple(decode_row(projection, doc) for _, doc in found[1])

    async def needs_after(self, filters: Filters, after: int) -> tuple[tuple[dict[str, Any], ...], int]:
        """The needs-a-person feed: (transitions after a position in commit order, the position to go on from).

        The entries are those of `projections.recovery.told_need`; a repeated call tells the same ids.
        """
        until = min([await self.position(projection) for projection in self._projections.values()])
        wanted = msgspec.structs.replace(filters, needed=True)
        found: dict[str, dict[str, Any]] = {}
        for projection in self._projections.values():
            place = after
            while rows := await self.changes(projection, wanted, place, BATCH):
                found |= {entry["id"]: entry for entry in needs_after(rows, after) if entry["position"] <= until}
                place = rows[-1].position
        ordered = sorted(found.values(), key=lambda entry: (entry["position"], entry["id"]))
        return tuple(ordered), max(after, until)

    async def tally(self, projection: Projection[Any], filters: Filters, facet: str) -> dict[str, int]:
        """How many rows match, by the value of ``state``, ``reason``, ``person`` or another counted facet."""
        if facet not in COUNTED:
            raise ValueError(f"{facet} is not counted")
        return await self._tables.call(self._tables.tally, projection.name, filters, facet)

    async def unfinished(self, projection: Projection[RowT], after: int = 0, limit: int = BATCH) -> tuple[RowT, ...]:
        """Rows of every tenant that a host has work with, after a position: for its recovery, never for a caller."""
        rows = await self._tables.call(self._tables.unfinished, projection.name, after, limit)
        return tuple(decode_row(projection, doc) for _, doc in rows)

    async def faults(self, tenant: str) -> tuple[Fault, ...]:
        """Histories of a tenant that a view holds, each once, by position."""
        found: dict[str, Fault] = {}
        for place in (await self._tables.call(self._tables.places)).values():
            for fault in await self._tables.call(self._tables.held, place):
                if fault.history.split("/", 1)[0] == tenant:
                    found.setdefault(fault.history, fault)
        return tuple(sorted(found.values(), key=lambda fault: fault.position))

    async def position(self, projection: Projection[Any]) -> int:
        """The position up to which the journal is folded into this view."""
        place = (await self._tables.call(self._tables.places)).get(projection.name)
        return place.position if place else 0

    async def wait_for(self, position: int, timeout_s: float) -> bool:
        """Wait until every view has reached a position; False if the time is over first."""
        with anyio.move_on_after(timeout_s):
            while True:
                moved = self._moved
                places = await self._tables.call(self._tables.places)
                if len(places) >= len(self._projections) and all(p.position >= position for p in places.values()):
                    return True
                with anyio.move_on_after(POLL_S):
                    await moved.wait()
        return False

    def lag(self) -> Lag:
        """How the views stand in this process."""
        age = None if self._read_at is None else self._clock.monotonic() - self._read_at
        return Lag(positions=dict(self._positions), read_age_s=age, failing=self._failing, held=self._held)

    def _check(self, place: Place) -> None:
        if place.version != self._projections[place.view].version:
            raise NotNow("connector_host.not_ready", "The view is being built anew.")


def _kind(history: str) -> str:
    return history.split("/", 2)[1] if "/" in history else ""


def _key(projection: Projection[Any], event: Recorded | Unreadable) -> str | None:
    if isinstance(event, Unreadable) or event.event.topic not in projection.topics:
        return None
    return projection.key(event)


def _fault(event: Recorded | Unreadable, topic: str, reason: str) -> Fault:
    return Fault(
        history=event.history, version=event.version, position=event.position, topic=topic[:128], reason=reason
    )


def _counts(projection: Projection[Any], before: dict[str, Any], after: dict[str, Any]) -> dict[tuple[str, ...], int]:
    changes: dict[tuple[str, ...], int] = {}
    for key, row in after.items():
        for one, step in ((before.get(key), -1), (row, 1)):
            facets = projection.facets(one) if one is not None else None
            if facets is not None:
                counted = count_key(facets)
                changes[counted] = changes.get(counted, 0) + step
    return changes


# ---- bytes -----------------------------------------------------------------------------------------------------------


@cache
def _row_decoder(row: type[msgspec.Struct]) -> tuple[msgspec.json.Decoder[Any], Callable[[Any], Any]]:
    strict, rebuild = strict_struct(row)
    return msgspec.json.Decoder(strict), rebuild


def decode_row(projection: Projection[RowT], doc: bytes) -> RowT:
    """A stored row. Only sealed content is accepted where private content stands."""
    decoder, rebuild = _row_decoder(projection.row)
    row: RowT = rebuild(decoder.decode(doc))
    return row


def _seal(view: str, filters: Filters, newest: bool, position: int) -> str:
    return sha256(canonical([view, msgspec.to_builtins(filters), newest, position]))[:24]


def make_cursor(view: str, filters: Filters, newest: bool, position: int) -> str:
    """The opaque place after a row of one list: bound to the list, its tenant, its filters and its order."""
    text = f"{position}.{_seal(view, filters, newest, position)}".encode()
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def read_cursor(view: str, filters: Filters, newest: bool, cursor: str) -> int:
    """The position of a cursor; CallerError ``query.invalid_cursor`` for all that this list did not give out."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except (ValueError, binascii.Error) as error:
        raise CallerError("query.invalid_cursor") from error
    number = text.partition(".")[0]
    if not (number.isdigit() and len(number) < 19) or make_cursor(view, filters, newest, int(number)) != cursor:
        raise CallerError("query.invalid_cursor")
    return int(number)
