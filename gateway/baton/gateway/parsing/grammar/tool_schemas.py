"""JSON Schemas for outputs that must call a request's tools."""

from __future__ import annotations

from collections.abc import Mapping
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
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, definitions) for tool in use.tools]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not use.parallel:
        schema["maxItems"] = 1
    if definitions:
        schema[_DEFINITIONS] = definitions
    return schema


def _parameters(tool: Tool) -> dict[str, Any]:
    return dict(tool.parameters) if tool.parameters is not None else _ANY.copy()


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of one call. Moves definitions to the root, where references start."""
    parameters = _parameters(tool)
    own = parameters.pop(_DEFINITIONS, None)
    for name, definition in own.items() if isinstance(own, Mapping) else ():
        if definitions.setdefault(name, definition) != definition:
            raise InvalidRequest(f"tools: two functions define {name!r} in $defs differently", field="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
