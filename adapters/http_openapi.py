"""The OpenAPI 3.1 document, made from the route table and from nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from adapters.http_route import Route, errors_of
from adapters.http_wire import ErrorAnswer
from domain.errors import TABLE

REFERENCE = "#/components/schemas/{name}"
PARAMETERS = {
    "action_id": "Id of an Action.",
    "approval_id": "Id of an approval.",
    "delivery_id": "Id of a delivery.",
    "run_id": "The provider's handle, percent-encoded.",
}
PHRASES = {200: "Done.", 202: "Accepted; a result or a decision follows."}
KEY_HEADER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\x21-\x7e]+$"},
    "description": "The caller's name for one intended effect; instead of the member idempotency_key.",
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document for these routes."""
    kinds = [kind for route in routes for kind in (*route.answers.values(), route.body) if kind is not None]
    _, schemas = msgspec.json.schema_components([*kinds, ErrorAnswer], ref_template=REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hermes-reconciler",
            "version": "1.0",
            "description": "A durable host in front of Hermes Agent: claims before effects, evidence before answers.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_" + re.sub(r"\W+", "_", route.path).strip("_"),
        "summary": route.summary,
        "responses": _responses(route),
    }
    if route.scopes:
        operation["description"] = "Scopes: " + ", ".join(route.scopes) + "."
    parameters = [*_path_parameters(route), *_query_parameters(route.query)]
    if route.counted:
        parameters.append(KEY_HEADER)
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(route.body)}},
        }
    operation["security"] = [] if route.open else [{"bearer": []}]
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in route.pattern if part.startswith("{")]
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": PARAMETERS[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in names
    ]


@cache
def _query_schema(kind: type) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    schema: dict[str, Any] = components[kind.__name__]
    return schema


def _query_parameters(kind: type) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "required": False, "schema": _without_null(schema)}
        for name, schema in _query_schema(kind).get("properties", {}).items()
    ]


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter is absent rather than null."""
    if "anyOf" not in schema:
        return dict(schema)
    (kept,) = [dict(option) for option in schema["anyOf"] if option.get("type") != "null"]
    return kept


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def _responses(route: Route) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in route.answers.items():
        content: dict[str, Any] = {"application/json": {"schema": _reference(kind)}}
        if route.follows and status == 200:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        responses[str(status)] = {"description": PHRASES[status], "content": content}
    codes: dict[int, list[str]] = {}
    for code in errors_of(route):
        codes.setdefault(TABLE[code].status, []).append(code)
    for status, names in sorted(codes.items()):
        responses.setdefault(
            str(status),
            {
                "description": ", ".join(names),
                "content": {"application/json": {"schema": _reference(ErrorAnswer)}},
            },
        )
    return responses
