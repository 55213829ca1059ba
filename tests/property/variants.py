"""Planted bugs: real parts of a host, bent in one place. Each breaks one promise that the machine has to miss.

A variant is a function that is given a new host before it runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from adapters.sender import Sender
from domain import action as actions
from domain.action import Action
from domain.events import AttemptClaimed
from domain.history import Command, Recorded
from domain.ports import AppendUnknown, NotStored, Provider, Store
from domain.provider import Exchange, Failure, Outgoing, StreamItem
from tests.world.host import ENDPOINT, Host


class Link:
    """A way to the provider; to be bent."""

    def __init__(self, inner: Provider) -> None:
        self._inner, self.target = inner, inner.target

    async def send(self, out: Outgoing) -> Exchange:
        """One mutation."""
        return await self._inner.send(out)

    async def read(self, out: Outgoing) -> Exchange:
        """One read."""
        return await self._inner.read(out)

    def stream(self, out: Outgoing, idle_s: float = 75) -> AsyncIterator[StreamItem]:
        """One event stream."""
        return self._inner.stream(out, idle_s)


class ResendingLink(Link):
    """Sends again when an answer could not be read, as many clients do."""

    async def send(self, out: Outgoing) -> Exchange:
        """One mutation, or two."""
        exchange = await self._inner.send(out)
        return await self._inner.send(out) if exchange.failure is Failure.READ_ERROR else exchange


class HopefulLink(Link):
    """Takes a lost answer for proof that nothing was done."""

    async def send(self, out: Outgoing) -> Exchange:
        """One mutation."""
        exchange = await self._inner.send(out)
        lost = exchange.failure is Failure.READ_ERROR
        return msgspec.structs.replace(exchange, sent=False) if lost else exchange


class HastyStore:
    """Takes an append whose answer was lost for one that was not stored."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def append(self, command: Command) -> tuple[Recorded, ...]:
        """As `Store.append`, in haste."""
        try:
            return await self._inner.append(command)
        except AppendUnknown as error:
            raise NotStored from error


class ForgetfulSender(Sender):
    """Drops what comes back once the history says something about the attempt already."""

    async def _keep(self, history: str, action: Action, claim: AttemptClaimed, exchange: Exchange | None) -> Action:
        known = actions.replay(await self._reload(history))
        attempt = next(item for item in known.attempts if item.claim.attempt_id == claim.attempt_id)
        if attempt.unknown is not None:
            return known
        return await super()._keep(history, action, claim, exchange)


def resend_on_read_error(host: Host) -> None:
    """S1 is broken."""
    links: dict[str, Any] = host.intake._endpoints  # type: ignore[assignment]
    links[ENDPOINT] = ResendingLink(links[ENDPOINT])


def doubt_at_the_provider_is_failure(host: Host) -> None:
    """S3 is broken."""
    links: dict[str, Any] = host.intake._endpoints  # type: ignore[assignment]
    links[ENDPOINT] = HopefulLink(links[ENDPOINT])


def doubt_at_the_store_is_failure(host: Host) -> None:
    """P1 is broken: a claim in doubt turns into an outcome that nobody knows."""
    host.driver._sender._store = HastyStore(host.driver._sender._store)


def late_receipt_is_dropped(host: Host) -> None:
    """S5 is broken."""
    real = host.driver._sender
    host.driver._sender = ForgetfulSender(
        real._store,
        real._vault,
        real._clock,
        real._lease,
        real._endpoints,
        real._notices,
        real._bound,
        real._policy_of,
    )
