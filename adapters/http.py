"""The public listener: the door through which every request goes to its route.

The door finds the route, the caller, the scopes, the query and the body in this order, hands over to the route's
handler, and puts every refusal into one shape. Refused mutations are stored before they are answered.
"""

from __future__ import annotations

import logging
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapters.http_openapi import document
from adapters.http_ports import HttpPorts
from adapters.http_private import plain
from adapters.http_route import Answer, Call, Feed, Route
from adapters.http_routes import ROUTES
from adapters.http_sse import FeedResponse, Feeds
from adapters.http_wire import (
    error_answer,
    json_answer,
    log_fault,
    read_body,
    read_object,
    read_query,
    segments,
    typed,
)
from domain.errors import PREFIX, CallerError, HostError, NotNow
from domain.values import Actor

log = logging.getLogger(__name__)

AUDIT_S = 5.0
AUDITED = ("auth.", "policy.")
AUDITED_CODES = frozenset({"action.not_found", "idempotency.conflict", PREFIX + "tenant_mismatch"})


class PublicApp:
    """The ASGI application of the public listener. ``routes`` may be extended by further tables."""

    def __init__(self, ports: HttpPorts, routes: tuple[Route, ...] = ROUTES) -> None:
        self._ports = ports
        self._routes = (*routes, _openapi(routes))
        self._feeds = Feeds()

    def end_feeds(self) -> None:
        """End every open feed; its reader goes on elsewhere from its last cursor."""
        self._feeds.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
        path = segments(raw)
        found = [(route, params) for route in self._routes if path and (params := route.match(path)) is not None]
        if not found:
            return error_answer(CallerError("request.route_not_found"))
        chosen = [(route, params) for route, params in found if route.method == request.method]
        if not chosen:
            allowed = {"Allow": ", ".join(sorted({route.method for route, _ in found}))}
            return error_answer(CallerError("request.method_not_allowed"), allowed)
        return await self._perform(request, *chosen[0])

    async def _perform(self, request: Request, route: Route, params: dict[str, str]) -> Response:
        """The route's answer, or the one shape of everything that prevents it."""
        counts, actor = self._ports.counts, None
        counts.requests_total += route.counted
        try:
            token = _token(request)
            actor = None if route.open else self._caller(token)
            call = await self._call(request, route, params, actor, token)
            return await self._told(call, await route.handler(self._ports, call))
        except HostError as error:
            counts.rejected_total += route.counted
            await self._audit(route, actor, error, params)
            return error_answer(error)
        except ClientDisconnect:
            raise
        except Exception as fault:  # noqa: BLE001 - the one place that turns what nobody foresaw into an answer
            counts.rejected_total += route.counted
            trace_id = self._ports.clock.new_id("trace_")
            return error_answer(log_fault(fault, trace_id, f"{route.method} {route.path}"))

    def _caller(self, token: str) -> Actor:
        actor = self._ports.callers.find(token) if token else None
        if actor is None:
            raise CallerError("auth.unverified_actor")
        return actor

    async def _call(
        self, request: Request, route: Route, params: dict[str, str], actor: Actor | None, token: str
    ) -> Call:
        who = actor or NOBODY
        for scope in route.scopes:
            if not who.may(scope):
                raise CallerError("auth.not_authorized", details={"scope": scope})
        query: Any = read_query(request.scope.get("query_string", b""), route.query)
        body: Any = None
        if route.body is not None:
            body = typed(read_object(await read_body(request, route.body_bytes)), route.body)
        return Call(
            actor=who,
            params=params,
            query=query,
            body=body,
            headers=request.headers,
            still_admitted=lambda: route.open or self._ports.callers.find(token) == actor,
        )

    async def _told(self, call: Call, answer: Answer | Feed) -> Response:
        if isinstance(answer, Feed):
            if self._feeds.ending:
                raise NotNow("connector_host.not_ready", retry_after_ms=1_000, details={"reason": "draining"})
            return FeedResponse(answer.frames, self._feeds)
        body = await plain(self._ports.vault, call.actor, answer.body)
        return json_answer(answer.status, body, answer.headers)

    async def _audit(self, route: Route, actor: Actor | None, error: HostError, params: dict[str, str]) -> None:
        """Store who was refused what; a store that is away must not turn a refusal into a fault."""
        if not route.audited or not (error.code.startswith(AUDITED) or error.code in AUDITED_CODES):
            return
        name = f"{route.method} {route.path}"
        if actor is None:
            log.warning("http.unverified", extra={"route": name, "code": error.code})
            return
        try:
            with anyio.fail_after(AUDIT_S):
                await self._ports.intake.refused(actor, name, error.code, next(iter(params.values()), ""))
        except (HostError, TimeoutError):
            log.error("http.refusal_not_stored", extra={"route": name, "code": error.code})


NOBODY = Actor(id="", tenant="-")


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _openapi(routes: tuple[Route, ...]) -> Route:
    """The route of the document that describes the table; it needs no token."""
    told = document(routes)

    async def answer(ports: HttpPorts, call: Call) -> Answer:  # noqa: ARG001 - the shape of a handler
        return Answer(body=told)

    return Route(
        method="GET",
        path="/openapi.json",
        summary="This document.",
        handler=answer,
        answers={200: dict},
        open=True,
    )
