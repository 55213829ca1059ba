"""Handlers of approvals, callback deliveries and the audit (interface page, Actions)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from eventsourcing.persistence import PersistenceError

from adapters.codec import decode
from adapters.http_actions import POSITION_HEADER, Moment, Text
from adapters.http_cursor import list_cursor, read_list_cursor
from adapters.http_ports import HttpPorts
from adapters.http_private import content, plain
from adapters.http_reading import confirm, history, owned_action, owner_filter, tenant_action
from adapters.http_route import Answer, Call, Cursor, Limit
from adapters.view_tables import Filters
from domain.errors import CallerError, HostError, IntegrityFault
from domain.events import ActionAccepted, KeyReserved, RequestRefused, RunBound
from domain.history import Recorded, action_history, run_history, run_token
from domain.values import SYSTEM, Actor, rfc3339
from projections import feed
from projections.actions import ACTIONS, ActionRow, sealed_input
from projections.approvals import approval_list, approval_of, approval_record_view

READ = "approval:read"
PREFIX = "appr_"
SCAN_PAGE = 500
SCAN_PAGES = 8


class ApprovalQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters of the list of approvals."""

    status: Literal["", "pending", "approved", "denied", "expired", "revoked"] = ""
    requester: Text = ""
    cursor: Cursor = ""
    limit: Limit = 100


class DecisionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person's decision about one approval."""

    decision: Literal["approved", "denied"]
    reason: Annotated[str, msgspec.Meta(max_length=2000)] = ""


class CallbackQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters of the list of deliveries."""

    action_id: Text = ""
    status: Text = ""
    profile: Text = ""
    target: Text = ""
    cursor: Cursor = ""
    limit: Limit = 100


class AuditQuery(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"since": "from", "until": "to"}
):
    """Filters of the audit; ``from`` is inclusive, ``to`` exclusive."""

    action_id: Text = ""
    principal_id: Text = ""
    run_id: Text = ""
    since: Moment | None = None
    until: Moment | None = None
    cursor: Cursor = ""
    limit: Limit = 100


# ---- approvals -------------------------------------------------------------------------------------------------------


def _action_id(approval_id: str) -> str:
    if not approval_id.startswith(PREFIX):
        raise CallerError("action.not_found")
    return approval_id.removeprefix(PREFIX)


async def _record(ports: HttpPorts, actor: Actor, row: ActionRow) -> Answer:
    snapshot = await content(ports.vault, actor, sealed_input(row))
    body = {"approval_record_view": approval_record_view(row, snapshot)}
    return Answer(body=body, headers={POSITION_HEADER: str(row.position)})


async def list_approvals(ports: HttpPorts, call: Call) -> Answer:
    """Waiting and settled approvals that the caller may see."""
    query: ApprovalQuery = call.query
    owner = owner_filter(call.actor, READ)
    if owner and query.requester not in ("", owner):
        return Answer(body={"approval_list": approval_list((), 0, "")})
    filters = Filters(
        tenant=call.actor.tenant,
        principal=owner or query.requester,
        approval=query.status,
        with_approval=True,
    )
    page = await ports.views.list(ACTIONS, filters, query.cursor, query.limit)
    return Answer(body={"approval_list": approval_list(page.rows, page.total, page.cursor)})


async def approval(ports: HttpPorts, call: Call) -> Answer:
    """One approval with the snapshot of the input that it is for."""
    row = await owned_action(ports, call.actor, _action_id(call.params["approval_id"]), READ)
    approval_of(row)
    return await _record(ports, call.actor, row)


async def decide(ports: HttpPorts, call: Call) -> Answer:
    """Grant or deny; the tenant's policy says who may."""
    body: DecisionBody = call.body
    action_id = _action_id(call.params["approval_id"])
    approval_of(await tenant_action(ports, call.actor.tenant, action_id))
    await ports.intake.decide(call.actor, action_id, granted=body.decision == "approved", reason=body.reason)
    return await _record(ports, call.actor, await tenant_action(ports, call.actor.tenant, action_id))


# ---- callback deliveries ---------------------------------------------------------------------------------------------


async def list_deliveries(ports: HttpPorts, call: Call) -> Answer:
    """Deliveries to callbacks. A submission with a callback is refused, so there is none and no cursor of any."""
    query: CallbackQuery = call.query
    read_list_cursor(ports.vault.digest, "callback-deliveries", {"tenant": call.actor.tenant}, query.cursor)
    return Answer(body={"callback_delivery_list": {"deliveries": []}})


async def delivery(ports: HttpPorts, call: Call) -> Answer:  # noqa: ARG001 - the shape of a handler
    """One delivery."""
    raise CallerError("action.not_found")


# ---- audit -----------------------------------------------------------------------------------------------------------


class _Owners:
    """Whose a history is, looked up once for each history of a page."""

    def __init__(self, ports: HttpPorts, tenant: str) -> None:
        self._ports, self._tenant = ports, tenant
        self._known: dict[str, str] = {}

    async def of(self, recorded: Recorded) -> str:
        """The principal whose history this is; empty if nobody's."""
        name = recorded.history
        if name not in self._known:
            self._known[name] = await self._look(name)
        return self._known[name]

    async def _look(self, name: str) -> str:
        tenant, kind, rest = [*name.split("/", 2), "", ""][:3]
        source = name if kind != "str" else f"{tenant}/run/{rest}"
        try:
            events = await history(self._ports, source)
        except IntegrityFault:
            return ""
        for item in events:
            match item.event:
                case ActionAccepted() | KeyReserved() | RunBound():
                    return item.event.principal
                case RequestRefused():
                    return item.event.by
        return ""


async def audit_events(ports: HttpPorts, call: Call) -> Answer:
    """Stored events of the caller's tenant, in the order of the journal, as far as the caller may see them."""
    query: AuditQuery = call.query
    actor = call.actor
    filters = msgspec.to_builtins(query) | {"tenant": actor.tenant, "principal": actor.id, "cursor": "", "limit": 0}
    place = read_list_cursor(ports.vault.digest, "audit", filters, query.cursor)
    after = place if isinstance(place, int) else 0
    owners = _Owners(ports, actor.tenant)
    found: list[Recorded] = []
    more = True
    for _ in range(SCAN_PAGES):
        page = await _log(ports, after, query, actor)
        for recorded in page.events:
            if len(found) == query.limit:
                break
            after = recorded.position
            if await _shown(owners, actor, query, recorded):
                found.append(recorded)
        else:
            after, more = max(after, page.last), page.more
            if more:
                continue
        break
    await confirm(ports)
    told = [_told(recorded) for recorded in found]
    body: dict[str, Any] = {"events": await plain(ports.vault, actor, told)}
    if more:
        body["cursor"] = list_cursor(ports.vault.digest, "audit", filters, after)
    return Answer(body={"audit_query_result": body})


class _LogPage(msgspec.Struct, frozen=True):
    events: list[Recorded]
    last: int
    more: bool


async def _log(ports: HttpPorts, after: int, query: AuditQuery, actor: Actor) -> _LogPage:
    """The next readable events of the tenant; of one Action alone if the query names it."""
    if query.action_id:
        events = await history(ports, action_history(actor.tenant, query.action_id))
        left = [recorded for recorded in events if recorded.position > after]
        return _LogPage(left, left[-1].position if left else after, False)
    try:
        rows = await ports.journal.read_log(after, SCAN_PAGE)
    except PersistenceError as error:
        raise HostError("storage.unavailable", "The journal cannot be read.") from error
    events = []
    for row in rows:
        if row.history.startswith(f"{actor.tenant}/"):
            try:
                events.append(decode(row))
            except IntegrityFault:
                continue
    return _LogPage(events, rows[-1].position if rows else after, len(rows) == SCAN_PAGE)


async def _shown(owners: _Owners, actor: Actor, query: AuditQuery, recorded: Recorded) -> bool:
    at = recorded.event.at
    if (query.since and at < query.since) or (query.until and at >= query.until):
        return False
    if query.run_id and not _of_run(recorded, query.run_id):
        return False
    if actor.may_any("audit:read") and not query.principal_id:
        return True
    owner = await owners.of(recorded)
    if query.principal_id and owner != query.principal_id:
        return False
    return owner == actor.id or actor.may_any("audit:read")


def _of_run(recorded: Recorded, run_id: str) -> bool:
    tenant, kind, rest = [*recorded.history.split("/", 2), "", ""][:3]
    endpoint_id = rest.split("/", 1)[0]
    named = run_history(tenant, endpoint_id, run_token(run_id)).split("/", 2)[2]
    return (kind in ("run", "str") and rest == named) or getattr(recorded.event, "run_id", "") == run_id


def _told(recorded: Recorded) -> dict[str, Any]:
    actor = feed.event_actor(recorded.event) or {"id": SYSTEM.id, "kind": SYSTEM.kind}
    place = {"position": recorded.position, "history": recorded.history, "version": recorded.version}
    return {
        "id": recorded.event_id,
        "actor": actor,
        "action": recorded.event.topic,
        "occurred_at": rfc3339(recorded.event.at),
        "data": place | feed.event_data(recorded.event),
    }
