"""What the public listener needs from the rest of the host, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from adapters.intake import Intake
from adapters.notices import Notices
from adapters.probes import Counters
from adapters.store import Rows
from adapters.views import Views
from domain.ports import Clock
from domain.values import Actor, Private


class Callers(Protocol):
    """Who a bearer token names; `adapters.principals.Principals` is one."""

    def find(self, token: str) -> Actor | None:
        """The principal of a token, or None."""


class Opener(Protocol):
    """The part of `adapters.vault.Vault` that answers need."""

    async def open_many(self, privates: Sequence[Private]) -> list[bytes]:
        """Plain contents in order; HostError `private.erased` if the key of one is destroyed."""

    def digest(self, content: bytes) -> str:
        """A keyed digest, 64 hex digits."""


class HttpPorts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a handler may use.

    ``endpoints`` gives (id, display name, origin, tenant binding) of each admitted endpoint; ``at_start`` the start-up
    summary that never changes. With ``confirm_reads`` an answer that rests on a read alone is confirmed before it is
    told (a synchronous standby). ``view_wait_s`` bounds the wait for a position of the views.
    """

    intake: Intake
    callers: Callers
    journal: Rows
    vault: Opener
    views: Views
    notices: Notices
    clock: Clock
    counts: Counters
    endpoints: Callable[[], Sequence[tuple[str, str, str, str]]]
    at_start: Callable[[], Mapping[str, Any] | None] = lambda: None
    approval_timeouts_ms: Mapping[str, int] = {}
    confirm_reads: bool = False
    view_wait_s: float = 30.0
