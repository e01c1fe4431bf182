"""The page of REST routes, from the gateway's OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import MagicMock

from markdown_text import GENERATED_NOTE, cell, code, table

from baton.gateway.config import GatewayConfig
from baton.gateway.rest.routing import Route
from baton.gateway.rest_routes import rest_routes

_FIELDS = ("field", "type", "default", "note")
_MOST_VALUES = 8  # of an enumeration
_LIMITS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


def rest_page() -> str:
    """Returns every route, and the fields of every request and answer."""
    # The routes' handlers are not called, but for the one that returns the document.
    serving = MagicMock()
    serving.config = GatewayConfig(model=".", enable_tokenizer_info_endpoint=True)
    routes = [route for route in rest_routes(serving, MagicMock(), list, MagicMock()) if _is_api(route)]
    document = _document(routes)
    parts = [
        f"# REST API\n\n{GENERATED_NOTE}\n"
        "A running gateway serves the same as an OpenAPI 3.1 document at `/openapi.json`, and as a page at `/docs`. "
        "If the gateway has keys, a request needs one with the scope of its route: `Authorization: Bearer KEY`, or "
        "`x-api-key: KEY`.\n",
        "## Routes\n",
        table(("route", "scope", "what it does", "body", "answer"), [_route(route) for route in routes]),
        *_parameters(document),
        "## Bodies\n",
        "Fields without a default are required. A type that is a name is a body of this page.\n",
    ]
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += _body(name, schema)
    return "\n".join(parts)


def _is_api(route: Route) -> bool:
    return not route.path.startswith(("/playground", "/console")) and route.path != "/"


def _document(routes: list[Route]) -> dict[str, Any]:
    exchange = MagicMock()
    (route,) = (route for route in routes if route.path == "/openapi.json")
    route.handler(exchange)
    document: dict[str, Any] = json.loads(exchange.respond.call_args.args[1])
    return document


def _route(route: Route) -> tuple[str, ...]:
    scope = "none" if route.public else "any" if route.scope is None else route.scope.value
    answer = route.response.__name__ if route.response else route.content_type.replace("application/json", "empty")
    if route.chunk:
        answer += f"; streamed: {route.chunk.__name__}"
    body = _link(route.request.__name__) if route.request else ""
    return code(f"{route.method} {route.path}"), scope, cell(route.summary), body, _linked(answer)


def _parameters(document: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (code(f"{method.upper()} {path}"), code(one["name"]), one["in"], _type(one["schema"]), cell(one["description"]))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for one in operation["parameters"]
        if "description" in one
    ]
    yield "## Parameters\n"
    yield table(("route", "parameter", "in", "type", "what it does"), rows)
    common = document["components"]["parameters"].values()
    yield "Every route takes these too:\n"
    cells = [(code(one["name"]), one["in"], cell(one["description"])) for one in common]
    yield table(("parameter", "in", "what it does"), cells)


def _body(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    if text := schema.get("description", ""):
        yield f"{cell(text)}\n"
    if "properties" not in schema:
        yield f"{_type(schema)}\n"
        return
    required = schema.get("required", ())
    rows = []
    for field, content in schema["properties"].items():
        default = "" if field in required else code(json.dumps(content.get("default")))
        rows.append((code(field), _type(content), default, cell(content.get("description", ""))))
    yield table(_FIELDS, rows)


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if values := schema.get("enum"):
        shown = [code(json.dumps(value)) for value in values[:_MOST_VALUES]]
        return " or ".join([*shown, *(["..."] if len(values) > _MOST_VALUES else [])])
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(option) for option in options))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {_type(schema['items'])}" if schema.get("items") else "array"
    return f"{kind}{_range(schema)}"


def _range(schema: Mapping[str, Any]) -> str:
    return "".join(f" {word} {_number(schema[key])}" for key, word in _LIMITS.items() if key in schema)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _linked(answer: str) -> str:
    first, separator, chunk = answer.partition("; streamed: ")
    linked = first if "/" in first or first == "empty" else _link(first)
    return f"{linked}{separator}{_link(chunk)}" if chunk else linked
