"""What keeps views: the calls, and tables in memory; `adapters.view_postgres` keeps them in PostgreSQL.

Rows are bytes here. A batch changes rows, counts, held histories and the position of its generation together or not at
all, and only from the position that it was folded from; so any number of hosts may fold the same journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar

import anyio.lowlevel
import msgspec

from projections import Facets

COUNTED = ("state", "principal", "capability_id", "endpoint_id", "approval", "reason", "person")
NARROW = ("session", "run_id", "approval_id")

_Result = TypeVar("_Result")


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What a list shows: rows of one tenant whose facets equal every text that is given here.

    ``unfinished``, ``waiting`` and ``with_approval`` ask for any reason, any wait for a person, any approval;
    ``needed`` for rows that ever waited for a person. ``since`` (inclusive) and ``until`` (exclusive) bound the time at
    which the work was accepted.
    """

    tenant: str
    state: str = ""
    principal: str = ""
    capability_id: str = ""
    endpoint_id: str = ""
    session: str = ""
    run_id: str = ""
    approval_id: str = ""
    approval: str = ""
    reason: str = ""
    person: str = ""
    unfinished: bool = False
    waiting: bool = False
    with_approval: bool = False
    needed: bool = False
    since: datetime | None = None
    until: datetime | None = None

    @property
    def equal(self) -> dict[str, str]:
        """Facets that are compared, and their values."""
        return {name: value for name in (*COUNTED, *NARROW) if (value := getattr(self, name))}

    @property
    def present(self) -> list[str]:
        """Facets that only have to be there."""
        flags = {"reason": self.unfinished, "person": self.waiting, "approval": self.with_approval}
        return [name for name, wanted in flags.items() if wanted]

    @property
    def counted(self) -> bool:
        """True if the counts answer how many rows there are."""
        return not (set(self.equal) & set(NARROW)) and not self.needed and self.since is None and self.until is None


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A generation of a view: the version of its fold, and the position up to which the journal is folded into it."""

    view: str
    generation: int
    version: int
    position: int = 0
    read_at: datetime | None = None


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A history that is held from this event on; ``reason`` is a code."""

    history: str
    version: int
    position: int
    topic: str
    reason: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One row as it is kept."""

    key: str
    position: int
    doc: bytes
    facets: Facets | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What a span of the journal changes in one generation; ``counts`` are differences by counted facets."""

    place: Place
    position: int
    at: datetime
    entries: tuple[Entry, ...] = ()
    counts: Mapping[tuple[str, ...], int] = {}
    faults: tuple[Fault, ...] = ()


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stored view is not what the journal gives. ``kind``: changed, missing, extra or count."""

    key: str
    kind: str
    stored_position: int | None = None
    journal_position: int | None = None


def count_key(facets: Facets) -> tuple[str, ...]:
    """The tenant and the counted facets of a row."""
    return (facets.tenant, *(getattr(facets, name) for name in COUNTED))


class Tables(Protocol):
    """Keeps generations of views. Calls are made through ``call``; NotNow ``storage.unavailable`` when it is away."""

    async def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Run a function that uses the calls below, where it may block."""

    async def close(self) -> None:
        """Let go of everything."""

    def places(self) -> dict[str, Place]:
        """The live generation of each view that has one."""

    def open(self, view: str, version: int, live: bool) -> Place:
        """A new empty generation; with ``live`` only if there is no live one, which is returned then.

        A generation that is neither live nor this one is dropped: whoever fills it finds that it is gone.
        """

    def swap(self, place: Place) -> bool:
        """Make this generation the live one, if it is as far as the live one, and drop the other."""

    def drop(self, place: Place) -> None:
        """Forget a generation."""

    def docs(self, place: Place, keys: Sequence[str]) -> dict[str, bytes]:
        """Rows by key."""

    def held(self, place: Place) -> list[Fault]:
        """Held histories of a generation."""

    def apply(self, batches: Sequence[Batch]) -> bool:
        """All of it, or nothing and False if a generation is not where its batch began."""

    def one(self, view: str, key: str) -> tuple[Place, bytes | None] | None:
        """A row of the live generation."""

    def page(
        self, view: str, filters: Filters, after: int | None, descending: bool, limit: int, sized: bool = True
    ) -> tuple[Place, list[tuple[int, bytes]], int] | None:
        """(place, rows by position, how many match in all) at one moment; 0 for the last unless it is ``sized``."""

    def tally(self, view: str, filters: Filters, facet: str) -> dict[str, int]:
        """How many rows match by the value of one counted facet."""

    def unfinished(self, view: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Rows of every tenant that a host has work with, by position."""

    def differences(self, place: Place, fresh: Place) -> list[Difference] | None:
        """How a generation differs from a fresh one; ``None`` if they are not at one position."""


class MemoryTables:
    """Tables in memory, for tests and simulation: one event loop, no waiting."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], Place] = {}
        self._live: dict[str, int] = {}
        self._rows: dict[tuple[str, int], dict[str, Entry]] = {}
        self._counts: dict[tuple[str, int], dict[tuple[str, ...], int]] = {}
        self._faults: dict[tuple[str, int], dict[str, Fault]] = {}

    async def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """As `Tables.call`, at once."""
        await anyio.lowlevel.checkpoint()
        return function(*args)

    async def close(self) -> None:
        """Nothing is open."""
        await anyio.lowlevel.checkpoint()

    def places(self) -> dict[str, Place]:
        """As `Tables.places`."""
        return {view: self._places[view, generation] for view, generation in self._live.items()}

    def open(self, view: str, version: int, live: bool) -> Place:
        """As `Tables.open`."""
        if live and view in self._live:
            return self._places[view, self._live[view]]
        for name, number in list(self._places):
            if name == view and number != self._live.get(view):
                self.drop(self._places[name, number])
        generation = max((number for name, number in self._places if name == view), default=0) + 1
        place = Place(view=view, generation=generation, version=version)
        self._places[view, generation] = place
        self._rows[view, generation], self._counts[view, generation], self._faults[view, generation] = {}, {}, {}
        if live:
            self._live[view] = generation
        return place

    def swap(self, place: Place) -> bool:
        """As `Tables.swap`."""
        here, live = self._places.get((place.view, place.generation)), self.places().get(place.view)
        if here is None or (live is not None and live.position > here.position):
            return False
        self._live[place.view] = place.generation
        if live is not None and live.generation != place.generation:
            self.drop(live)
        return True

    def drop(self, place: Place) -> None:
        """As `Tables.drop`."""
        for table in (self._places, self._rows, self._counts, self._faults):
            table.pop((place.view, place.generation), None)

    def docs(self, place: Place, keys: Sequence[str]) -> dict[str, bytes]:
        """As `Tables.docs`."""
        rows = self._rows.get((place.view, place.generation), {})
        return {key: rows[key].doc for key in keys if key in rows}

    def held(self, place: Place) -> list[Fault]:
        """As `Tables.held`."""
        return list(self._faults.get((place.view, place.generation), {}).values())

    def apply(self, batches: Sequence[Batch]) -> bool:
        """As `Tables.apply`."""
        for batch in batches:
            here = self._places.get((batch.place.view, batch.place.generation))
            if here is None or here.position != batch.place.position:
                return False
        for batch in batches:
            name = (batch.place.view, batch.place.generation)
            self._places[name] = msgspec.structs.replace(batch.place, position=batch.position, read_at=batch.at)
            self._rows[name].update({entry.key: entry for entry in batch.entries})
            self._faults[name].update({fault.history: fault for fault in batch.faults})
            for key, change in batch.counts.items():
                self._counts[name][key] = self._counts[name].get(key, 0) + change
        return True

    def one(self, view: str, key: str) -> tuple[Place, bytes | None] | None:
        """As `Tables.one`."""
        place = self.places().get(view)
        return (place, self.docs(place, [key]).get(key)) if place else None

    def page(
        self, view: str, filters: Filters, after: int | None, descending: bool, limit: int, sized: bool = True
    ) -> tuple[Place, list[tuple[int, bytes]], int] | None:
        """As `Tables.page`."""
        place = self.places().get(view)
        if place is None:
            return None
        rows = sorted(self._matching(place, filters), key=lambda entry: entry.position, reverse=descending)
        rest = [
            (entry.position, entry.doc)
            for entry in rows
            if after is None or (entry.position < after if descending else entry.position > after)
        ]
        return place, rest[:limit], len(rows) if sized else 0

    def tally(self, view: str, filters: Filters, facet: str) -> dict[str, int]:
        """As `Tables.tally`."""
        place, found = self.places().get(view), dict[str, int]()
        for entry in self._matching(place, filters) if place else ():
            value = getattr(entry.facets, facet)
            found[value] = found.get(value, 0) + 1
        return found

    def unfinished(self, view: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """As `Tables.unfinished`."""
        place = self.places().get(view)
        entries = self._rows[view, place.generation].values() if place else ()
        found = [(e.position, e.doc) for e in entries if e.facets and e.facets.open and e.position > after]
        return sorted(found)[:limit]

    def differences(self, place: Place, fresh: Place) -> list[Difference] | None:
        """As `Tables.differences`."""
        old, new = (self._places.get((one.view, one.generation)) for one in (place, fresh))
        if old is None or new is None or old.position != new.position:
            return None
        stored, again = self._rows[place.view, place.generation], self._rows[fresh.view, fresh.generation]
        found = [_difference(key, stored.get(key), again.get(key)) for key in sorted(stored.keys() | again.keys())]
        counts = [_nonzero(self._counts[one.view, one.generation]) for one in (place, fresh)]
        keys = sorted(key for key in counts[0].keys() | counts[1].keys() if counts[0].get(key) != counts[1].get(key))
        return [item for item in found if item] + [Difference(key="/".join(key), kind="count") for key in keys]

    def _matching(self, place: Place, filters: Filters) -> Iterator[Entry]:
        for entry in self._rows[place.view, place.generation].values():
            facets = entry.facets
            if (
                facets is not None
                and facets.tenant == filters.tenant
                and all(getattr(facets, name) == value for name, value in filters.equal.items())
                and all(getattr(facets, name) for name in filters.present)
                and (facets.needed or not filters.needed)
                and (filters.since is None or (facets.at is not None and facets.at >= filters.since))
                and (filters.until is None or (facets.at is not None and facets.at < filters.until))
            ):
                yield entry


def _nonzero(counts: Mapping[tuple[str, ...], int]) -> dict[tuple[str, ...], int]:
    return {key: count for key, count in counts.items() if count}


def _difference(key: str, stored: Entry | None, fresh: Entry | None) -> Difference | None:
    if stored == fresh:
        return None
    kind = "extra" if fresh is None else "missing" if stored is None else "changed"
    return Difference(
        key=key,
        kind=kind,
        stored_position=stored.position if stored else None,
        journal_position=fresh.position if fresh else None,
    )
