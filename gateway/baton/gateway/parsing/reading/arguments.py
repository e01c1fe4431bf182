"""Writes arguments of a model's own format as the text of a JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from baton.gateway.parsing.reading.event_writer import EventWriter
from baton.gateway.parsing.tool import Tool

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
_ALL_KINDS = frozenset(_KINDS.values())
_MAX_SCHEMA_DEPTH = 16


class ArgumentsWriter:
    """Writes one call's arguments object, member by member."""

    def __init__(self, out: EventWriter, tool: Tool | None) -> None:
        self._out = out
        schema = tool.parameters if tool is not None else None
        properties = schema.get("properties") if schema is not None else None
        self._root: Mapping[str, Any] = schema if schema is not None else {}
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._separator = "{"

    def kinds(self, key: str) -> frozenset[str]:
        """Returns the JSON types that a value may have."""
        return kinds_of(self._properties.get(key), self._root)

    def begin_text(self, key: str) -> None:
        """Starts a member with a string value that arrives in pieces."""
        self._out.arguments(f'{self._next()}{_quoted(key)}: "')

    def text(self, piece: str) -> None:
        """Adds a piece of the string."""
        self._out.arguments(_quoted(piece)[1:-1])

    def end_text(self) -> None:
        """Ends the string."""
        self._out.arguments('"')

    def add(self, key: str, value: str) -> None:
        """Adds a member with this JSON text as its value."""
        self._out.arguments(f"{self._next()}{_quoted(key)}: {value}")

    def close(self) -> None:
        """Ends the object."""
        self._out.arguments("{}" if self._separator == "{" else "}")

    def _next(self) -> str:
        separator, self._separator = self._separator, ", "
        return separator


def json_value(text: str, kinds: frozenset[str]) -> str:
    """Returns the JSON text of an unquoted value: JSON of an allowed type, or else a string."""
    value = text.strip()
    value = _PYTHON_WORDS.get(value, value)
    try:
        kind = _KINDS[type(orjson.loads(value))]
    except (orjson.JSONDecodeError, KeyError):
        return _quoted(text)
    if kind == "string":
        # If the schema names a type, strings are written without quotes, so quotes belong to the string.
        return value if kinds == _ALL_KINDS else _quoted(text)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits or "string" not in kinds else _quoted(text)


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follows references into the root and returns the schema they name."""
    for _ in range(_MAX_SCHEMA_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return schema
        schema = {**{key: value for key, value in schema.items() if key != "$ref"}, **found}
    return schema


def kinds_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a schema allows; all of them if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
        return _ALL_KINDS
    schema = resolved(schema, root)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,)) & _ALL_KINDS or _ALL_KINDS
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str)) & _ALL_KINDS or _ALL_KINDS
    if "const" in schema:
        return frozenset((_KINDS.get(type(schema["const"]), "string"),))
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(_KINDS.get(type(value), "string") for value in schema["enum"])
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            return _union(kinds_of(one, root, depth + 1) for one in schema[name])
    return _ALL_KINDS


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
