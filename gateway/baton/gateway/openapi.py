"""The OpenAPI 3.1 document, made from the route table and the types of openai_types.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from baton.gateway.error_body import reason_phrase
from baton.gateway.openai_types import ErrorResponse
from baton.gateway.routes import Route
from baton.gateway.version import VERSION

_REF = "#/components/schemas/{name}"


def openapi_document(routes: Sequence[Route]) -> bytes:
    """The JSON document."""
    kinds = _types_of(routes)
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Baton",
                "version": VERSION,
                "description": "LLM inference, compatible with OpenAI's API. Unknown fields are ignored.",
            },
            "paths": paths,
            "components": {"schemas": components},
        }
    )


def _types_of(routes: Sequence[Route]) -> list[type[Struct]]:
    kinds = {kind: None for route in routes for kind in (route.request, route.response, route.chunk) if kind}
    return [*kinds, ErrorResponse]


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{''.join(_words(route.path))}",
        "responses": {"200": _answer(route), **{str(status): _error(status) for status in route.errors}},
    }
    if route.parameter:
        parameter = {"name": route.parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(route.request)}}
    return operation


def _answer(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.response is not None:
        content[route.content_type] = _schema(route.response)
    elif route.content_type != "application/json":
        content[route.content_type] = {"schema": {"type": "string"}}
    if route.chunk is not None:
        content["text/event-stream"] = _schema(route.chunk)
    return {"description": reason_phrase(200), **({"content": content} if content else {})}


def _error(status: int) -> dict[str, Any]:
    return {"description": reason_phrase(status), "content": {"application/json": _schema(ErrorResponse)}}


def _schema(kind: type[Struct]) -> Mapping[str, Any]:
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}


def _words(path: str) -> list[str]:
    return [word.strip("{}").replace(".", "_").title() for word in path.split("/") if word]
