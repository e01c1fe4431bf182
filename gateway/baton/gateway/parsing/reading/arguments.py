"""Writes arguments of a model's own format as the text of a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from baton.gateway.parsing.reading.event_writer import EventWriter
from baton.gateway.parsing.reading.schema_kinds import ALL_KINDS, KINDS, kinds_of
from baton.gateway.parsing.tool import Tool

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


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
        kind = KINDS[type(orjson.loads(value))]
    except (orjson.JSONDecodeError, KeyError):
        return _quoted(text)
    if kind == "string":
        # If the schema names a type, strings are written without quotes, so quotes belong to the string.
        return value if kinds == ALL_KINDS else _quoted(text)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits or "string" not in kinds else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
