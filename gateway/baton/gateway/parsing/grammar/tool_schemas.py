"""What an output must look like so that a request's tools are called as it demands, as JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest

_DEFINITIONS = "$defs"
_ANY: dict[str, Any] = {"type": "object"}


def constraint_of(use: ToolUse) -> dict[str, Any] | None:
    """The schema of the whole output behind the reasoning; None where it is free.

    Where a function is named the output is its arguments. Where any call is required it is a list of
    {"name", "parameters"}. `constrained_calls.py` reads both. Raises InvalidRequest for schemas that contradict.
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
    """One call. References count from the whole schema's root, so definitions move there."""
    parameters = _parameters(tool)
    own = parameters.pop(_DEFINITIONS, None)
    for name, definition in own.items() if isinstance(own, Mapping) else ():
        if definitions.setdefault(name, definition) != definition:
            raise InvalidRequest(f"tools: two functions define {name!r} in $defs, each in its own way.", field="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
