"""The reference pages of the interface: error codes and routes, as the tables in the code have them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from adapters.http_route import Route, errors_of
from adapters.http_routes import ROUTES
from domain.errors import TABLE

ERRORS_HEAD = """# Error codes

Made by `scripts/docs` from `domain/errors.py`. A code's first word names the boundary that met the fault. *Retryable*
speaks about transport: the same call may be made again. *Effect* speaks about the world: what may have happened because
of the call. Neither follows from the other. The HTTP status is that of an answer which refuses; a failed Action tells
its code inside its result.
"""
ROUTES_HEAD = """# Routes of the public listener

Made by `scripts/docs` from `adapters/http_routes.py`; the same table drives the server and the OpenAPI document at
`/openapi.json`. Every route needs a bearer token; another tenant's object answers like an unknown id. Answers about one
Action carry the header `Journal-Position`; a view that is given it as `min_position` waits until it has that position.
"""


def errors_page() -> str:
    """`docs/errors.md`: every code with its HTTP status, whether the same call may be repeated, and its effect."""
    groups: dict[str, list[str]] = {}
    for row in TABLE.values():
        boundary = row.code.split(".")[0]
        repeat = "yes" if row.retryable else "no"
        groups.setdefault(boundary, []).append(
            f"| `{row.code}` | {row.status} | {row.category} | {repeat} | {row.effect.value} | {row.meaning} |"
        )
    parts = [ERRORS_HEAD]
    for boundary, rows in groups.items():
        head = "| code | HTTP | category | retryable | effect | meaning |\n|---|---|---|---|---|---|\n"
        parts.append(f"\n## {boundary}\n\n{head}" + "\n".join(rows) + "\n")
    return "".join(parts)


def routes_page() -> str:
    """`docs/routes.md`: every route of the public listener with scopes, parameters, answers and codes."""
    return ROUTES_HEAD + "".join(map(_route, ROUTES))


def _route(route: Route) -> str:
    lines = [f"\n## `{route.method} {route.path}`\n", f"{route.summary}\n"]
    lines.append(f"- Scopes: {_words(route.scopes) or 'none beyond a valid token'}")
    if query := [field.encode_name for field in msgspec.structs.fields(route.query)]:
        lines.append(f"- Query: {_words(query)}")
    if route.body is not None:
        members = [field.encode_name for field in msgspec.structs.fields(route.body)]
        lines.append(f"- Body, at most {route.body_bytes:,} bytes: {_words(members)}")
    answers = ", ".join(f"{status} `{kind.__name__}`" for status, kind in route.answers.items())
    lines.append(f"- Answers: {answers}" + ("; with `follow=true` server-sent events" if route.follows else ""))
    lines.append(f"- Codes: {_words(errors_of(route))}")
    return "\n".join(lines) + "\n"


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
