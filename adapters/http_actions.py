"""Handlers of discovery and of Actions: submit, list, status, result, events, chunks, cancel."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from adapters.http_feeds import Wanted, action_events, follow_action
from adapters.http_ports import HttpPorts
from adapters.http_private import Ready, content, may_open
from adapters.http_reading import frames, history, owned_action, owner_filter
from adapters.http_route import Answer, Call, Cursor, Feed, Limit
from adapters.http_sse import given_cursor
from adapters.submission import Submission
from adapters.view_tables import Filters
from domain import contracts
from domain.action import State
from domain.errors import CallerError, HostError
from domain.history import action_history, run_token, stream_history
from domain.values import Actor, Effect, Mode, Operation
from projections import feed, folded
from projections.actions import ACTIONS, ActionRow, action_list, action_result, action_status
from projections.approvals import approval_record_view
from projections.feed import CHUNK_EVENT

READ, WRITE, EVENTS = "action:read", "action:write", "events:read"
GRACE_S = 5.0
POSITION_HEADER = "Journal-Position"
Moment = Annotated[datetime, msgspec.Meta(tz=True)]
Text = Annotated[str, msgspec.Meta(max_length=512)]


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters of the list of Actions; ``since`` (inclusive) and ``until`` (exclusive) bound acceptance."""

    state: Text = ""
    capability_id: Text = ""
    session_id: Text = ""
    principal_id: Text = ""
    endpoint_id: Text = ""
    run_id: Text = ""
    since: Moment | None = None
    until: Moment | None = None
    cursor: Cursor = ""
    limit: Limit = 100


class FeedQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of a feed. ``kinds`` is a comma list of event kinds; ``follow`` answers server-sent events."""

    cursor: Cursor = ""
    limit: Limit = 100
    kinds: Text = ""
    kind: Text = ""
    include_chunks: bool = True
    follow: bool = False


class ChunkQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of chunks; ``follow`` answers server-sent events."""

    cursor: Cursor = ""
    limit: Limit = 100
    follow: bool = False


class CancelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why somebody wants an Action cancelled."""

    reason: Annotated[str, msgspec.Meta(max_length=2000)] = ""


# ---- discovery -------------------------------------------------------------------------------------------------------


async def manifest(ports: HttpPorts, call: Call) -> Answer:
    """What this host offers the caller's tenant."""
    return Answer(body=_manifest(ports, call.actor))


async def capabilities(ports: HttpPorts, call: Call) -> Answer:
    """The capabilities of the manifest alone."""
    return Answer(body={"capabilities": _manifest(ports, call.actor)["capabilities"]})


def _manifest(ports: HttpPorts, actor: Actor) -> dict[str, Any]:
    """An endpoint that is bound to another tenant does not exist for this one."""
    return contracts.manifest([endpoint for endpoint in ports.endpoints() if endpoint[3] in ("", actor.tenant)])


# ---- submitting ------------------------------------------------------------------------------------------------------


async def submit(ports: HttpPorts, call: Call) -> Answer:
    """Accept work; wait for its answer if the caller asked for that."""
    submission = _with_header_key(call.body, call.headers.get("idempotency-key"))
    admitted = await ports.intake.submit(call.actor, submission)
    request = admitted.action.request
    waits = submission.mode is Mode.SYNC and admitted.action.state not in (State.SETTLED, State.UNKNOWN, State.AWAITING)
    if waits:
        timeout_s = request.timeout_ms / 1000 + GRACE_S
        await ports.intake.settled(request.tenant, request.action_id, timeout_s)
    row = await _row(ports, admitted.history)
    headers = _headers(row)
    answerable = row.action.state in (State.SETTLED, State.UNKNOWN)
    if row.action.state is State.AWAITING:
        return Answer(status=202, body=await result_body(ports, call.actor, row, admitted.replay), headers=headers)
    if answerable and (submission.mode is Mode.SYNC or admitted.replay):
        return Answer(body=await result_body(ports, call.actor, row, admitted.replay), headers=headers)
    ack = {"action_id": request.action_id, "status": "accepted" if waits else "queued"}
    return Answer(status=202, body={"ack": ack}, headers=headers)


def _with_header_key(submission: Submission, header: str | None) -> Submission:
    if header is None:
        return submission
    if submission.idempotency_key not in (None, header):
        raise CallerError("request.invalid", "Header and body name different idempotency keys.")
    return msgspec.structs.replace(submission, idempotency_key=header)


async def _row(ports: HttpPorts, name: str) -> ActionRow:
    row = folded(ACTIONS, await history(ports, name))
    if row is None:
        raise CallerError("action.not_found")
    return row


def _headers(row: ActionRow) -> dict[str, str]:
    """Where the Action is, and the position with which a reader of a view can wait for it."""
    return {"Location": f"/aip/v1/actions/{row.request.action_id}", POSITION_HEADER: str(row.position)}


# ---- reading ---------------------------------------------------------------------------------------------------------


async def list_actions(ports: HttpPorts, call: Call) -> Answer:
    """The Actions that the caller may see, by the position of their last change."""
    query: ListQuery = call.query
    owner = owner_filter(call.actor, READ)
    if owner and query.principal_id not in ("", owner):
        return Answer(body={"action_list": action_list((), 0, "")})
    filters = Filters(
        tenant=call.actor.tenant,
        state=query.state,
        capability_id=query.capability_id,
        session=query.session_id,
        principal=owner or query.principal_id,
        endpoint_id=query.endpoint_id,
        run_id=query.run_id,
        since=query.since,
        until=query.until,
    )
    page = await ports.views.list(ACTIONS, filters, query.cursor, query.limit)
    return Answer(body={"action_list": action_list(page.rows, page.total, page.cursor)})


async def status(ports: HttpPorts, call: Call) -> Answer:
    """Where one Action stands."""
    row = await owned_action(ports, call.actor, call.params["action_id"], READ)
    return Answer(body={"action_status": told_status(row)}, headers={POSITION_HEADER: str(row.position)})


def told_status(row: ActionRow) -> dict[str, Any]:
    """``action_status``, with a link to the run that the Action speaks to."""
    body = action_status(row)
    if row.run_id:
        body["links"] = body["links"] | {"run": f"/views/runs/{quote(row.run_id, safe='')}"}
    return body


async def result(ports: HttpPorts, call: Call) -> Answer:
    """The retained result of one Action."""
    row = await owned_action(ports, call.actor, call.params["action_id"], READ)
    body = await result_body(ports, call.actor, row, replay=False)
    return Answer(body=body, headers={POSITION_HEADER: str(row.position)})


async def result_body(ports: HttpPorts, actor: Actor, row: ActionRow, replay: bool) -> dict[str, Any]:
    """``action_result`` with its output opened or masked; ``replay`` puts in the mark of a repeated key."""
    told = action_result(row, await _output(ports, actor, row))
    if row.action.state is State.AWAITING:
        record = approval_record_view(row)["request"]
        told["output"] = {
            "requires_human_approval": True,
            "approval_id": record["id"],
            "capability_id": row.request.capability_id,
            "reason": record["reason"],
            "approval_request": record,
        }
        told["error"] = HostError("policy.human_approval_required").body()
    if replay:
        output = told.get("output")
        told["output"] = (output if isinstance(output, dict) else {}) | {"idempotent_replay": True}
    if "output" in told:
        told["output"] = Ready(told["output"])
    return {"action_result": told, "settled": told["settled"]}


async def _output(ports: HttpPorts, actor: Actor, row: ActionRow) -> dict[str, Any] | None:
    """The output object: the clear facts of a receipt and the provider's own object, or the events that were read."""
    action, request, settled = row.action, row.request, row.action.settled
    if settled is None:
        return None
    if request.operation is Operation.RUN_EVENTS and settled.details:
        name = stream_history(request.tenant, request.endpoint_id, run_token(request.run_id))
        batches = await frames(ports, actor, await history(ports, name))
        read = [frame for _, found in batches for frame in found]
        return feed.events_output(action, read, opened=may_open(actor))
    if settled.output is None and settled.effect is not Effect.CONFIRMED:
        return None
    clear: dict[str, Any] = {"endpoint_id": request.endpoint_id, "operation": request.operation.value}
    if settled.effect is Effect.CONFIRMED or settled.status == "completed":
        clear |= {name: value for name, value in settled.details.items() if value not in (None, "")}
    opened = await content(ports.vault, actor, settled.output)
    if isinstance(opened, dict):
        return clear | opened
    return clear if opened is None else clear | {"content": opened}


async def events(ports: HttpPorts, call: Call) -> Answer | Feed:
    """Stored events of one Action, and its chunks in the room that they leave."""
    query: FeedQuery = call.query
    kinds = frozenset(filter(None, (*query.kinds.split(","), query.kind)))
    only_chunks = kinds == {CHUNK_EVENT}
    wanted = Wanted(
        limit=query.limit,
        kinds=kinds - {CHUNK_EVENT},
        events=not only_chunks,
        chunks=query.include_chunks and (not kinds or CHUNK_EVENT in kinds),
    )
    return await _feed(ports, call, wanted, query.cursor, query.follow)


async def chunks(ports: HttpPorts, call: Call) -> Answer | Feed:
    """Chunks of one Action."""
    query: ChunkQuery = call.query
    return await _feed(ports, call, Wanted(limit=query.limit, events=False), query.cursor, query.follow)


async def _feed(ports: HttpPorts, call: Call, wanted: Wanted, cursor: str, follow: bool) -> Answer | Feed:
    row = await owned_action(ports, call.actor, call.params["action_id"], EVENTS)
    if follow:
        return follow_action(ports, call, row, wanted, given_cursor(call, cursor))
    return Answer(body={"action_events": await action_events(ports, call, row, wanted, cursor)})


# ---- cancelling ------------------------------------------------------------------------------------------------------


async def cancel(ports: HttpPorts, call: Call) -> Answer:
    """Cancel at once while nothing is claimed, else keep the wish; a settled Action is refused."""
    body: CancelBody = call.body
    action_id = call.params["action_id"]
    await owned_action(ports, call.actor, action_id, WRITE)
    done = await ports.intake.cancel(call.actor, action_id, body.reason)
    row = await _row(ports, action_history(call.actor.tenant, action_id))
    told = {"what": done.what} | ({"stop_action_id": done.stop_action_id} if done.stop_action_id else {})
    return Answer(
        status=202,
        body={"action_status": told_status(row), "cancel": told},
        headers={POSITION_HEADER: str(row.position)},
    )
