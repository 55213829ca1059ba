"""Handlers of the views: answered from the store alone, also while Hermes is away (interface page, Views)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import msgspec

from adapters import http_sse as sse
from adapters.http_actions import EVENTS, READ, Moment, Text
from adapters.http_cursor import list_cursor, read_list_cursor
from adapters.http_feeds import follow_run, run_events
from adapters.http_ports import HttpPorts
from adapters.http_private import content, plain
from adapters.http_reading import owned_run, owner_filter, reach
from adapters.http_route import Answer, Call, Cursor, Feed, Limit, Position
from adapters.notices import LOOK_AGAIN_S
from adapters.view_tables import Filters
from domain.errors import CallerError
from domain.values import ID_PATTERN, rfc3339
from projections import Projection
from projections.actions import ACTIONS
from projections.explain import explain_action
from projections.recovery import needs_after, needs_person, recovery_view
from projections.runs import RUNS, RunRow, run_key, run_summary, run_view, sealed_result

TOLD_OF_AN_END = ("output", "usage", "error", "model")
OTHER_RUNS = 100
PAGE = 500
BOTH: tuple[Projection[Any], ...] = (ACTIONS, RUNS)


class RunsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters of the list of runs; ``since`` (inclusive) and ``until`` (exclusive) bound the start."""

    state: Text = ""
    endpoint_id: Text = ""
    session_id: Text = ""
    principal_id: Text = ""
    run_id: Text = ""
    since: Moment | None = None
    until: Moment | None = None
    newest: bool = False
    cursor: Cursor = ""
    limit: Limit = 100
    min_position: Position | None = None


class RunQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which run is meant when several endpoints have one of this handle."""

    endpoint_id: Text = ""
    min_position: Position | None = None


class RunEventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of a run's feed after a cursor; ``follow`` answers server-sent events."""

    endpoint_id: Text = ""
    after: Cursor = ""
    limit: Limit = 100
    follow: bool = False
    min_position: Position | None = None


class AsOfQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wait for the view to have a position, at most 30 s."""

    min_position: Position | None = None


class RecoveryQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages of the lists of unfinished Actions and runs; the counts are those of all."""

    actions_cursor: Cursor = ""
    runs_cursor: Cursor = ""
    limit: Limit = 100
    min_position: Position | None = None


class NeedsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of what waits for a person; ``follow`` answers what begins to wait, by server-sent events."""

    cursor: Cursor = ""
    limit: Limit = 100
    follow: bool = False
    min_position: Position | None = None


async def as_of(ports: HttpPorts, *projections: Projection[Any]) -> dict[str, Any]:
    """How far the views that an answer rests on are, and when that was read. Asked before the rows are."""
    positions = [await ports.views.position(projection) for projection in projections or BOTH]
    age = ports.views.lag().read_age_s or 0.0
    return {"position": min(positions), "at": rfc3339(ports.clock.now() - timedelta(seconds=age))}


# ---- runs ------------------------------------------------------------------------------------------------------------


async def list_runs(ports: HttpPorts, call: Call) -> Answer:
    """The runs that the caller may see."""
    query: RunsQuery = call.query
    await reach(ports, query.min_position)
    told_as_of, owner = await as_of(ports, RUNS), owner_filter(call.actor, READ)
    if owner and query.principal_id not in ("", owner):
        return Answer(body={"runs": [], "total_size": 0, "as_of": told_as_of})
    filters = Filters(
        tenant=call.actor.tenant,
        state=query.state,
        endpoint_id=query.endpoint_id,
        session=query.session_id,
        principal=owner or query.principal_id,
        run_id=query.run_id,
        since=query.since,
        until=query.until,
    )
    page = await ports.views.list(RUNS, filters, query.cursor, query.limit, newest=query.newest)
    body = {"runs": [run_summary(row) for row in page.rows], "total_size": page.total, "as_of": told_as_of}
    return Answer(body=body | ({"cursor": page.cursor} if page.cursor else {}))


async def run(ports: HttpPorts, call: Call) -> Answer:
    """One run with everything known of it."""
    query: RunQuery = call.query
    await reach(ports, query.min_position)
    told_as_of = await as_of(ports, RUNS)
    row = await owned_run(ports, call.actor, call.params["run_id"], query.endpoint_id, READ)
    tie = row.run.tie
    end = await content(ports.vault, call.actor, sealed_result(row))
    if isinstance(end, dict) and "redacted" not in end:
        end = {name: end[name] for name in TOLD_OF_AN_END if name in end}
    body = run_view(
        row,
        approval_timeout_ms=ports.approval_timeouts_ms.get(tie.endpoint_id),
        result=end if isinstance(end, dict) or end is None else {"content": end},
        other_runs=await _other_runs(ports, row),
    )
    return Answer(body=await plain(ports.vault, call.actor, body) | {"as_of": told_as_of})


async def _other_runs(ports: HttpPorts, row: RunRow) -> list[str]:
    """Other unfinished runs of the same session at the same endpoint, of the same principal."""
    if not row.session:
        return []
    tie = row.run.tie
    filters = Filters(
        tenant=tie.tenant, endpoint_id=tie.endpoint_id, session=row.session, principal=tie.principal, unfinished=True
    )
    page = await ports.views.list(RUNS, filters, limit=OTHER_RUNS)
    return [other.run.tie.run_id for other in page.rows if other.run.tie.run_id != tie.run_id]


async def events_of_run(ports: HttpPorts, call: Call) -> Answer | Feed:
    """Every stored event of a run, provider events among them."""
    query: RunEventsQuery = call.query
    await reach(ports, query.min_position)
    told_as_of = await as_of(ports, RUNS)
    row = await owned_run(ports, call.actor, call.params["run_id"], query.endpoint_id, EVENTS)
    if query.follow:
        return follow_run(ports, call, row, query.limit, sse.given_cursor(call, query.after))
    return Answer(body=await run_events(ports, call, row, query.limit, query.after) | {"as_of": told_as_of})


# ---- Actions and recovery --------------------------------------------------------------------------------------------


async def explained(ports: HttpPorts, call: Call) -> Answer:
    """One Action explained: what is known and by which event, what is not, the one next step."""
    query: AsOfQuery = call.query
    await reach(ports, query.min_position)
    told_as_of, actor, action_id = await as_of(ports), call.actor, call.params["action_id"]
    if not ID_PATTERN.match(action_id):
        raise CallerError("action.not_found")
    row = await ports.views.get(ACTIONS, f"{actor.tenant}/{action_id}")
    if row is None or row.action.accepted is None:
        raise CallerError("action.not_found")
    if row.request.principal != actor.id and not actor.may_any(READ):
        raise CallerError("action.not_found")
    request = row.request
    bound = (
        await ports.views.get(RUNS, run_key(request.tenant, request.endpoint_id, row.run_id)) if row.run_id else None
    )
    return Answer(body=await plain(ports.vault, actor, explain_action(row, bound)) | {"as_of": told_as_of})


async def recovery(ports: HttpPorts, call: Call) -> Answer:
    """Work that is not settled, grouped by reason."""
    query: RecoveryQuery = call.query
    await reach(ports, query.min_position)
    told_as_of = await as_of(ports)
    filters = Filters(tenant=call.actor.tenant, principal=owner_filter(call.actor, READ), unfinished=True)
    actions = await ports.views.list(ACTIONS, filters, query.actions_cursor, query.limit)
    runs = await ports.views.list(RUNS, filters, query.runs_cursor, query.limit)
    counts: dict[str, int] = {}
    for projection in BOTH:
        for reason, count in (await ports.views.tally(projection, filters, "reason")).items():
            counts[reason] = counts.get(reason, 0) + count
    faults = await ports.views.faults(call.actor.tenant) if call.actor.may_any(READ) else ()
    unreadable = [msgspec.to_builtins(fault) for fault in faults]
    body = recovery_view(counts, actions.rows, runs.rows, unreadable=unreadable, at_start=ports.at_start())
    cursors = {"actions_cursor": actions.cursor, "runs_cursor": runs.cursor}
    told = await plain(ports.vault, call.actor, body)
    return Answer(body=told | {name: text for name, text in cursors.items() if text} | {"as_of": told_as_of})


# ---- people ----------------------------------------------------------------------------------------------------------


def _needs_filter(call: Call, *, waiting: bool) -> Filters:
    return Filters(tenant=call.actor.tenant, principal=owner_filter(call.actor, READ), waiting=waiting)


async def _all_rows(ports: HttpPorts, filters: Filters, after: int) -> AsyncIterator[Iterable[Any]]:
    for projection in BOTH:
        place = after
        while rows := await ports.views.changes(projection, filters, place, PAGE):
            yield rows
            place = rows[-1].position


async def needs(ports: HttpPorts, call: Call) -> Answer | Feed:
    """What waits for a person, with the reason and the possible decisions."""
    query: NeedsQuery = call.query
    await reach(ports, query.min_position)
    told_as_of, digest = await as_of(ports), ports.vault.digest
    scope = {"tenant": call.actor.tenant, "principal": owner_filter(call.actor, READ)}
    if query.follow:
        return _follow_needs(ports, call, scope, sse.given_cursor(call, query.cursor))
    waiting: dict[str, dict[str, Any]] = {}
    async for rows in _all_rows(ports, _needs_filter(call, waiting=True), 0):
        waiting |= {entry["id"]: entry for entry in needs_person(rows)}
    found = sorted(waiting.values(), key=lambda entry: (entry["position"], entry["id"]))
    place = read_list_cursor(digest, "needs-person", scope, query.cursor)
    left = [entry for entry in found if place is None or [entry["position"], entry["id"]] > place]
    page = left[: query.limit]
    body: dict[str, Any] = {
        "needs_person": await plain(ports.vault, call.actor, page),
        "total_size": len(found),
        "follow_cursor": list_cursor(digest, "needs-feed", scope, told_as_of["position"]),
        "as_of": told_as_of,
    }
    if len(left) > len(page):
        body["cursor"] = list_cursor(digest, "needs-person", scope, [page[-1]["position"], page[-1]["id"]])
    return Answer(body=body)


def _follow_needs(ports: HttpPorts, call: Call, scope: dict[str, str], cursor: str) -> Feed:
    """What waits now, if no cursor is given, then everything that begins to wait."""
    digest = ports.vault.digest
    read_list_cursor(digest, "needs-feed", scope, cursor)

    told_up_to = 0

    async def look(where: str) -> sse.Step:
        nonlocal told_up_to
        place = read_list_cursor(digest, "needs-feed", scope, where)
        told_up_to = (await as_of(ports))["position"]
        found: list[dict[str, Any]] = []
        async for rows in _all_rows(ports, _needs_filter(call, waiting=place is None), place or 0):
            found += needs_person(rows) if place is None else needs_after(rows, place)
        new = {entry["id"]: entry for entry in found if entry["position"] <= told_up_to}  # a row may be read twice
        told = sorted(new.values(), key=lambda entry: (entry["position"], entry["id"]))
        return sse.Step(
            frames=tuple(sse.frame(entry["kind"], {"event": entry}, entry["id"]) for entry in told),
            cursor=list_cursor(digest, "needs-feed", scope, max(told_up_to, place or 0)),
        )

    async def wait(seconds: float) -> None:
        await ports.views.wait_for(told_up_to + 1, min(seconds, LOOK_AGAIN_S))

    return Feed(frames=sse.follow(ports, call, "needs-person", look, wait, cursor))
