"""Generates the OpenAPI 3.1 document from the route table and the types of requests, responses and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from baton.gateway.anthropic.types import AnthropicErrorResponse
from baton.gateway.errors.anthropic import speaks_anthropic
from baton.gateway.errors.http import reason_phrase
from baton.gateway.rest.routing import ANY_ID, API_VERSION, Parameter, Route
from baton.gateway.schemas.answers import ErrorResponse, Readiness
from baton.gateway.version import VERSION

# Errors of any request: invalid HTTP, timeout, internal error, too many connections.
_EVERYWHERE = (400, 408, 431, 500, 503)
_WITHOUT_RIGHT = (401, 403)
_RETRIED = (429, 503, 529)
_REQUEST_ID = Parameter(
    "X-Request-Id",
    "The request's id in logs, traces and the response. Generated if left out.",
    {"type": "string", "pattern": "^[!-~]{1,256}$"},
    place="header",
)
_COMMON = (_REQUEST_ID, API_VERSION)
# for gateways with keys
_SECURITY: Mapping[str, Mapping[str, str]] = {
    "Bearer": {"type": "http", "scheme": "bearer"},
    "ApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_HEADERS: Mapping[str, Mapping[str, Any]] = {
    "X-Request-Id": {"description": "The request's id.", "schema": {"type": "string"}},
    "X-Baton-Ignored": {
        "description": "Ignored fields and tools of the request, separated by commas.",
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
}


class ApiDescription(Struct):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, dict[str, Any]]
    components: dict[str, dict[str, Any]]
    security: list[dict[str, list[str]]]


def openapi_document(routes: Sequence[Route]) -> bytes:
    """Returns the JSON document."""
    _, schemas = msgspec.json.schema_components(_types_of(routes), ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    responses: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
        responses.update({_error_name(route, status): _error(route, status) for status in _errors_of(route)})
    info = {
        "title": "Baton",
        "version": VERSION,
        "description": "LLM inference, compatible with OpenAI's and Anthropic's APIs. "
        "The header X-Baton-Ignored lists unknown fields.",
    }
    components = {
        "schemas": schemas,
        "responses": responses,
        "parameters": {one.name: _parameter(one) for one in _COMMON},
        "headers": dict(_HEADERS),
        "securitySchemes": dict(_SECURITY),
    }
    security: list[dict[str, list[str]]] = [{}]
    security += [{name: []} for name in _SECURITY]
    return msgspec.json.encode(ApiDescription("3.1.0", info, paths, components, security))


def _types_of(routes: Sequence[Route]) -> list[type[Struct]]:
    kinds = {
        kind: None
        for route in routes
        for kind in (route.request, route.response, route.other_response, route.anthropic, route.chunk)
        if kind
    }
    return [*kinds, ErrorResponse, AnthropicErrorResponse]


def _operation(route: Route) -> dict[str, Any]:
    errors = {str(status): _reference("responses", _error_name(route, status)) for status in _errors_of(route)}
    operation: dict[str, Any] = {
        **({"security": []} if route.public else {}),
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{''.join(_words(route.path))}",
        "parameters": [
            *_path_parameters(route),
            *map(_parameter, route.parameters),
            *(_reference("parameters", one.name) for one in _COMMON),
        ],
        "responses": {"200": _answer(route), **errors},
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {route.body_type: _schema(route.request)}}
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    schemas: list[dict[str, Any]] = [{"type": "string", "minLength": 1} for _ in route.path_names]
    if schemas and route.ids != ANY_ID:
        schemas[0]["pattern"] = f"^{route.ids}$"
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in zip(route.path_names, schemas, strict=True)
    ]


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.summary,
        "schema": parameter.schema,
        **({"style": parameter.style, "explode": True} if parameter.style else {}),
    }


def _answer(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.response is not None:
        kinds = [kind for kind in (route.response, route.other_response, route.anthropic) if kind]
        content[route.content_type] = {"schema": _any_of(*kinds)}
    elif route.content_type != "application/json":
        content[route.content_type] = {"schema": {"type": "string"}}
    if route.chunk is not None:
        content["text/event-stream"] = {"schema": _event(route)}
    return {"description": reason_phrase(200), **_headers(200), **({"content": content} if content else {})}


def _event(route: Route) -> dict[str, Any]:
    """Returns the schema of one event. OpenAI's streams end with [DONE], and an error may end any stream."""
    assert route.chunk is not None
    document = {"contentMediaType": "application/json", "contentSchema": _any_of(route.chunk, *_error_types(route))}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, document]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _errors_of(route: Route) -> list[int]:
    statuses = {*_EVERYWHERE, *(() if route.public else _WITHOUT_RIGHT), *route.errors}
    if 503 in statuses and AnthropicErrorResponse in _error_types(route):
        statuses.add(529)
    if ErrorResponse not in _error_types(route):
        statuses.discard(503)
    return sorted(statuses)


def _error_types(route: Route) -> tuple[type[Struct], ...]:
    if route.anthropic is not None:
        return ErrorResponse, AnthropicErrorResponse
    return (AnthropicErrorResponse if speaks_anthropic(route.path) else ErrorResponse,)


def _error_name(route: Route, status: int) -> str:
    families: dict[tuple[type[Struct], ...], str] = {(AnthropicErrorResponse,): "Anthropic", (ErrorResponse,): ""}
    family = "Readiness" if _is_readiness(route, status) else families.get(_error_types(route), "Either")
    return f"{family}Error{status}"


def _error(route: Route, status: int) -> dict[str, Any]:
    kinds = (Readiness, ErrorResponse) if _is_readiness(route, status) else _error_types(route)
    content = {"application/json": {"schema": _any_of(*kinds)}}
    return {"description": reason_phrase(status), **_headers(status), "content": content}


def _is_readiness(route: Route, status: int) -> bool:
    return route.response is Readiness and status == 503


def _any_of(*kinds: type[Struct]) -> dict[str, Any]:
    references = [_reference("schemas", kind.__name__) for kind in kinds]
    return {"anyOf": references} if len(references) > 1 else references[0]


def _headers(status: int) -> dict[str, Any]:
    names = [name for name in _HEADERS if name != "Retry-After" or status in _RETRIED]
    return {"headers": {name: _reference("headers", name) for name in names}}


def _schema(kind: type[Struct]) -> dict[str, Any]:
    return {"schema": _any_of(kind)}


def _reference(section: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{section}/{name}"}


def _words(path: str) -> list[str]:
    return [word.strip("{}").replace(".", "_").title() for word in path.split("/") if word]
