"""Reading for answers: histories from the journal, and who may see what stands in them.

Another tenant's object, an object of another principal without the scope's ``:any`` form, and an unknown id are the
same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import anyio.lowlevel
from eventsourcing.persistence import PersistenceError

from adapters.codec import decode
from adapters.http_ports import HttpPorts
from adapters.http_private import may_open, open_all
from adapters.journal import NotConfirmed
from adapters.view_tables import Filters
from domain.errors import CallerError, HostError, IntegrityFault, NotNow
from domain.events import ActionAccepted, FramesStored
from domain.history import Recorded, action_history
from domain.values import ID_PATTERN, Actor
from projections import feed, folded
from projections.actions import ACTIONS, ActionRow
from projections.feed import Frame
from projections.runs import RUNS, RunRow


async def history(ports: HttpPorts, name: str, after: int = 0) -> list[Recorded]:
    """The events of a history after a version. HostError ``storage.unavailable``, IntegrityFault if unreadable."""
    try:
        return [decode(row) for row in await ports.journal.read(name, after)]
    except PersistenceError as error:
        raise HostError("storage.unavailable", "The journal cannot be read.") from error


async def confirm(ports: HttpPorts) -> None:
    """Make what was only read durable where acknowledged data must be, before it is told."""
    if ports.confirm_reads:
        try:
            await ports.journal.confirm()
        except NotConfirmed as error:
            raise NotNow("storage.unknown", retry_after_ms=1_000) from error


def owner_filter(actor: Actor, scope: str) -> str:
    """The principal whose objects a list shows: the caller itself, or everyone with the scope's ``:any`` form."""
    return "" if actor.may_any(scope) else actor.id


async def tenant_action(ports: HttpPorts, tenant: str, action_id: str) -> ActionRow:
    """An Action of a tenant, whoever owns it. CallerError ``action.not_found``."""
    if not ID_PATTERN.match(action_id):
        raise CallerError("action.not_found")
    row = folded(ACTIONS, await history(ports, action_history(tenant, action_id)))
    if row is None or row.action.accepted is None:
        raise CallerError("action.not_found")
    await confirm(ports)
    return row


async def owned_action(ports: HttpPorts, actor: Actor, action_id: str, scope: str) -> ActionRow:
    """An Action that the caller may see under this scope. CallerError ``action.not_found``."""
    try:
        row = await tenant_action(ports, actor.tenant, action_id)
    except IntegrityFault:
        if actor.may_any(scope) or await _accepted_from(ports, actor.tenant, action_id) == actor.id:
            raise
        raise CallerError("action.not_found") from None
    if row.request.principal != actor.id and not actor.may_any(scope):
        raise CallerError("action.not_found")
    return row


async def _accepted_from(ports: HttpPorts, tenant: str, action_id: str) -> str:
    """The principal of a history that cannot be read as a whole; empty if not even its beginning can."""
    for row in (await ports.journal.read(action_history(tenant, action_id)))[:1]:
        with suppress(IntegrityFault):
            event = decode(row).event
            return event.principal if isinstance(event, ActionAccepted) else ""
    return ""


async def owned_run(ports: HttpPorts, actor: Actor, run_id: str, endpoint_id: str, scope: str) -> RunRow:
    """A run in the view that the caller may see. CallerError ``action.not_found``; ``request.invalid`` if several."""
    filters = Filters(tenant=actor.tenant, run_id=run_id, endpoint_id=endpoint_id, principal=owner_filter(actor, scope))
    rows: Sequence[RunRow] = (await ports.views.list(RUNS, filters, limit=2)).rows
    if not rows:
        raise CallerError("action.not_found")
    if len(rows) > 1:
        raise CallerError("request.invalid", "Several endpoints have this run; name endpoint_id.")
    return rows[0]


async def reach(ports: HttpPorts, position: int | None) -> None:
    """Wait until the views have a position, for a bounded time. NotNow ``connector_host.not_ready`` after that."""
    if position and not await ports.views.wait_for(position, ports.view_wait_s):
        raise NotNow("connector_host.not_ready", "The views have not reached this position.", retry_after_ms=1_000)


async def frames(ports: HttpPorts, actor: Actor, batches: Sequence[Recorded]) -> list[tuple[Recorded, list[Frame]]]:
    """The frames of stored batches, opened for readers with the scope; erased content is told as masked.

    Other tasks have their turn between batches: a long stream takes its time, and nobody else's.
    """
    opens = may_open(actor)
    found: list[tuple[Recorded, list[Frame]]] = []
    for batch in batches:
        if isinstance(batch.event, FramesStored):
            opened = (await open_all(ports.vault, [batch.event.frames]))[0] if opens else None
            content = opened if isinstance(opened, bytes) else None
            found.append((batch, list(feed.frames_of(batch.event, content))))
            await anyio.lowlevel.checkpoint()
    return found
