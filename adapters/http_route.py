"""What a route is: one entry of the table that drives dispatch, validation, the OpenAPI document and the reference."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec

from adapters.http_ports import HttpPorts
from adapters.http_wire import BODY_BYTES
from domain.values import Actor

Limit = Annotated[int, msgspec.Meta(ge=1, le=1000, description="Entries of a page.")]
Cursor = Annotated[str, msgspec.Meta(max_length=2048, description="Opaque; as an earlier page gave it.")]
Position = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1, description="Wait until the view has this position.")]


class NoQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A route without query parameters."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request that passed the door: who asks, for what, with which checked parameters.

    ``still_admitted`` tells whether the caller's token still names the same principal.
    """

    actor: Actor
    params: Mapping[str, str]
    query: Any
    body: Any
    headers: Mapping[str, str]
    still_admitted: Callable[[], bool]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON answer; ``body`` may hold structs, times and private content."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = {}


class Feed(msgspec.Struct, frozen=True, kw_only=True):
    """An answer by server-sent events: complete frames, each of them stored before it is told."""

    frames: AsyncIterator[bytes]


Handler = Callable[[HttpPorts, Call], Awaitable[Answer | Feed]]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. ``scopes`` are all needed; ``open`` needs no token.

    ``answers`` names the type of each success status. ``audited`` refusals are stored; ``counted`` requests are those
    that the host's request metrics speak of.
    """

    method: str
    path: str
    summary: str
    handler: Handler
    scopes: tuple[str, ...] = ()
    query: type = NoQuery
    body: type | None = None
    body_bytes: int = BODY_BYTES
    answers: Mapping[int, type]
    errors: tuple[str, ...] = ()
    follows: bool = False
    open: bool = False
    audited: bool = False
    counted: bool = False

    @property
    def pattern(self) -> tuple[str, ...]:
        """The segments of the path; ``{name}`` stands for one segment."""
        return tuple(self.path.split("/")[1:])

    def match(self, segments: tuple[str, ...]) -> dict[str, str] | None:
        """The named segments of a path that fits, else ``None``."""
        if len(segments) != len(self.pattern):
            return None
        params: dict[str, str] = {}
        for wanted, given in zip(self.pattern, segments, strict=True):
            if wanted.startswith("{"):
                if not given:
                    return None
                params[wanted[1:-1]] = given
            elif wanted != given:
                return None
        return params


DOOR_ERRORS = ("auth.unverified_actor", "auth.not_authorized", "request.invalid")
BODY_ERRORS = ("request.malformed", "request.too_large", "request.timeout")
FAULTS = ("storage.unavailable", "internal.fault")


def errors_of(route: Route) -> tuple[str, ...]:
    """Every code that the route can answer, its own first."""
    door = () if route.open else DOOR_ERRORS if route.scopes else (DOOR_ERRORS[0], DOOR_ERRORS[2])
    body = () if route.body is None else BODY_ERRORS
    return tuple(dict.fromkeys((*route.errors, *body, *door, *FAULTS)))
