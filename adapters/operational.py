"""The operational listener: health, readiness and metrics, open to whoever reaches it, and nothing else (AIP 5).

Readiness runs live probes; a scrape asks nobody. Bodies hold no tenant, no token and no content.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapters.http_wire import error_answer, json_answer, log_fault
from domain.errors import CallerError, HostError
from projections.metrics import CONTENT_TYPE, HostMetrics, exposition
from projections.readiness import HEALTH, Gates, ready_answer

PATHS = ("/health", "/ready", "/metrics")


class OperationalApp:
    """The ASGI application. ``probe`` looks at the four gates now; ``metrics`` reads this process's own numbers."""

    def __init__(
        self,
        probe: Callable[[], Awaitable[Gates]],
        metrics: Callable[[], HostMetrics],
        new_id: Callable[[str], str],
    ) -> None:
        self._probe, self._metrics, self._new_id = probe, metrics, new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        response = await self._answer(Request(scope))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        if path not in PATHS:
            return error_answer(CallerError("request.route_not_found"))
        if request.method != "GET":
            return error_answer(CallerError("request.method_not_allowed"), {"Allow": "GET"})
        try:
            match path:
                case "/health":
                    return json_answer(200, HEALTH)
                case "/ready":
                    return json_answer(*ready_answer(await self._probe()))
                case _:
                    return Response(exposition(self._metrics()), headers={"Content-Type": CONTENT_TYPE})
        except HostError as error:
            return error_answer(error)
        except Exception as fault:  # noqa: BLE001 - told as every unforeseen fault is
            return error_answer(log_fault(fault, self._new_id("trace_"), f"GET {path}"))
