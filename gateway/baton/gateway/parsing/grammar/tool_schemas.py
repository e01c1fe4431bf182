"""JSON Schemas for outputs that must call a request's tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest

_DEFINITIONS = "$defs"
_ANY: dict[str, Any] = {"type": "object"}


def constraint_of(use: ToolUse) -> dict[str, Any] | None:
    """Returns the schema of the output after the reasoning, or None if the output is free.

    A named function's output is its arguments. A required call's output is a list of {"name", "parameters"}.
    constrained_calls.py parses both. Raises InvalidRequest for contradictory schemas.
    """
    if use.mode is ToolMode.NAMED:
        return next(_parameters(tool) for tool in use.tools if tool.name == use.name)
    if use.mode is not ToolMode.REQUIRED:
        return None

    def made(definitions: dict[str, Any]) -> dict[str, Any]:
        calls = [call_schema(tool.name, _parameters(tool), "parameters", definitions) for tool in use.tools]
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        return schema if use.parallel else {**schema, "maxItems": 1}

    return with_definitions(made)


def with_definitions(made: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Returns the schema that `made` makes, with the definitions that it moved to the root, where references start."""
    definitions: dict[str, Any] = {}
    schema = made(definitions)
    return {**schema, _DEFINITIONS: definitions} if definitions else schema


def call_schema(name: str, parameters: Mapping[str, Any], key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of one call, and moves its definitions. Raises InvalidRequest for contradictory ones."""
    parameters = dict(parameters)
    own = parameters.pop(_DEFINITIONS, None)
    for defined, definition in own.items() if isinstance(own, Mapping) else ():
        if definitions.setdefault(defined, definition) != definition:
            raise InvalidRequest(f"tools: two functions define {defined!r} in $defs differently", field="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _parameters(tool: Tool) -> dict[str, Any]:
    return dict(tool.parameters) if tool.parameters is not None else _ANY.copy()
