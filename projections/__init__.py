"""Answers: pure folds of the journal into rows, and the words in which rows are told.

A projection is a fold with a name, a version and its topics. Its rows hold domain aggregates, evolved by the domain's
own rules, beside dated facts that point at the events which prove them. Private content stays `Sealed` in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Generic, TypeVar

import msgspec

from domain.history import Recorded
from domain.values import Sealed, rfc3339, sha256

FACTS_FIRST = 16
FACTS_LAST = 48
NEEDS_KEPT = 64


class Fact(msgspec.Struct, frozen=True, omit_defaults=True):
    """A dated fact and the event that proves it (``evidence`` is ``history:version``); ``word`` says more."""

    at: datetime
    evidence: str
    topic: str
    word: str = ""


class Need(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One transition into a state that waits for a person.

    ``id`` is the same in every fold. ``reference`` tells apart needs of one reason (an approval, a request, a stop).
    """

    id: str
    reason: str
    reference: str
    position: int
    at: datetime
    evidence: str
    met_at: datetime | None = None


class Facets(msgspec.Struct, frozen=True, kw_only=True):
    """What lists of a projection filter by. An empty text means that the row has nothing there.

    ``reason`` names why the row is unfinished work, ``person`` why it waits for a person, ``approval`` the status of
    its approval; ``open`` says that a host has work with it, ``needed`` that it waited for a person at some time;
    ``at`` is when the work was accepted.
    """

    tenant: str
    state: str
    principal: str = ""
    capability_id: str = ""
    endpoint_id: str = ""
    session: str = ""
    run_id: str = ""
    approval_id: str = ""
    approval: str = ""
    reason: str = ""
    person: str = ""
    open: bool = False
    needed: bool = False
    at: datetime | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every row has: the position and time of the last event folded into it, its facts, and its needs."""

    position: int = 0
    updated_at: datetime | None = None
    facts: tuple[Fact, ...] = ()
    facts_left_out: int = 0
    needs: tuple[Need, ...] = ()

    @property
    def open_needs(self) -> tuple[Need, ...]:
        """What a person is waited for, oldest first."""
        return tuple(need for need in self.needs if need.met_at is None)


RowT = TypeVar("RowT", bound=Row)


class Projection(msgspec.Struct, Generic[RowT], frozen=True, kw_only=True):
    """A fold. ``version`` rises when rows of the same events change: the stored view is then built anew.

    ``histories`` are the kinds of history (the second word of a name) that it reads. ``key`` names the row of an event,
    or ``None``; it begins with the tenant. Facets of ``None`` keep a row out of lists. Events of several histories may
    meet in one row, in the order of the journal.
    """

    name: str
    version: int
    topics: frozenset[str]
    histories: frozenset[str]
    row: type[RowT]
    key: Callable[[Recorded], str | None]
    fold: Callable[[RowT | None, Recorded], RowT]
    facets: Callable[[RowT], Facets | None]


def folded(projection: Projection[RowT], events: Iterable[Recorded]) -> RowT | None:
    """The row of these events alone, without any stored view; ``None`` if none of them is of the projection."""
    row: RowT | None = None
    for recorded in events:
        if recorded.event.topic in projection.topics and projection.key(recorded) is not None:
            row = projection.fold(row, recorded)
    return row


def evidence(recorded: Recorded) -> str:
    """How an event is cited: ``history:version``."""
    return f"{recorded.history}:{recorded.version}"


def with_fact(row: RowT, recorded: Recorded, word: str = "") -> RowT:
    """The row with one more dated fact; of many the first 16 and the last 48 are kept."""
    fact = Fact(recorded.event.at, evidence(recorded), recorded.event.topic, word)
    facts, left_out = (*row.facts, fact), row.facts_left_out
    if len(facts) > FACTS_FIRST + FACTS_LAST:
        facts, left_out = facts[:FACTS_FIRST] + facts[FACTS_FIRST + 1 :], left_out + 1
    return msgspec.structs.replace(
        row,
        position=recorded.position,
        updated_at=recorded.event.at,
        facts=facts,
        facts_left_out=left_out,
    )


def with_needs(row: RowT, recorded: Recorded, waited: Iterable[tuple[str, str]]) -> RowT:
    """The row with its needs brought to ``waited``, the (reason, reference) pairs that wait for a person now."""
    wanted = dict.fromkeys(waited)
    kept = tuple(
        msgspec.structs.replace(need, met_at=recorded.event.at)
        if need.met_at is None and (need.reason, need.reference) not in wanted
        else need
        for need in row.needs
    )
    there = {(need.reason, need.reference) for need in kept if need.met_at is None}
    new = tuple(
        Need(
            id="need_" + sha256(f"{evidence(recorded)} {reason} {reference}".encode())[:32],
            reason=reason,
            reference=reference,
            position=recorded.position,
            at=recorded.event.at,
            evidence=evidence(recorded),
        )
        for reason, reference in wanted
        if (reason, reference) not in there
    )
    if not new and kept == row.needs:
        return row
    needs = kept + new
    met = [need for need in needs if need.met_at is not None]
    dropped = {need.id for need in met[: max(0, len(needs) - NEEDS_KEPT)]}
    return msgspec.structs.replace(row, needs=tuple(need for need in needs if need.id not in dropped))


def without_content(value: object) -> Sealed | None:
    """A sealed member as a pointer: where the content stands, without the ciphertext itself."""
    return msgspec.structs.replace(value, box="") if isinstance(value, Sealed) else None


def sealed(value: object) -> Sealed | None:
    """The sealed content that a row carries, or ``None``."""
    return value if isinstance(value, Sealed) and value.box else None


def told_facts(row: Row) -> list[dict[str, str]]:
    """The dated facts of a row as they are told, each with the event that proves it."""
    return [
        {"at": rfc3339(fact.at), "fact": fact.topic, "evidence": fact.evidence}
        | ({"says": fact.word} if fact.word else {})
        for fact in row.facts
    ]
