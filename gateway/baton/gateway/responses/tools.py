"""Tools of the Responses API: the supported ones, their names for the model, and the form of their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.gateway.fields.tools import only
from baton.gateway.http.ignored_fields import ignored_tool
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest

# The argument with a custom tool's input.
INPUT = "input"
_INPUT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ToolName:
    """The client's name of a tool."""

    name: str
    namespace: str = ""
    is_custom: bool = False  # whether its input is a text rather than an object
    server: str = ""  # label of the MCP server that runs it; empty: the client runs it
    needs_approval: bool = False  # whether the client must approve calls that a server runs

    @property
    def flat(self) -> str:
        """Returns the name that models see, which have no namespaces."""
        prefix = self.server or self.namespace
        if not prefix:
            return self.name
        return f"{prefix}{'' if prefix.endswith('__') else '__'}{self.name}"


@dataclass(frozen=True, slots=True)
class ServedTools:
    """The supported tools of a request."""

    tools: tuple[Tool, ...] = ()
    names: Mapping[str, ToolName] = field(default_factory=dict)  # by flat name
    ignored: tuple[str, ...] = ()  # skipped tools and ignored members of others


def served_tools(given: Sequence[Mapping[str, Any]] | None) -> ServedTools:
    """Returns functions, custom tools and the functions of namespaces. Raises InvalidRequest that names the field.

    Skips MCP servers, which have tools of their own.
    """
    tools: list[Tool] = []
    names: dict[str, ToolName] = {}
    ignored: list[str] = []
    for index, tool in enumerate(given or ()):
        for name, made, where in _made(tool, index, ignored):
            if name.flat in names:
                raise InvalidRequest(f"{where}.name: there are two tools named {name.flat!r}", field=f"{where}.name")
            names[name.flat] = name
            tools.append(made)
    return ServedTools(tuple(tools), names, tuple(ignored))


def tool_use(served: ServedTools, choice: str | Mapping[str, Any] | None, parallel: bool) -> ToolUse:
    """Returns the request's tools and choice. Raises InvalidRequest for an unsupported choice."""
    tools = served.tools
    if not tools and isinstance(choice, str | None) and choice in (None, "none", "auto"):
        return ToolUse()
    if not tools:
        why = f"none of them is supported: {', '.join(served.ignored)}" if served.ignored else "there are none"
        raise InvalidRequest(f"tool_choice is allowed only with tools; {why}", field="tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice, tools, parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "mcp" and choice.get("name") is None:
        return ToolUse(_of_server(choice, served), ToolMode.REQUIRED, parallel=parallel)
    if isinstance(choice, Mapping):
        return ToolUse(tools, ToolMode.NAMED, _chosen(choice, served), parallel)
    try:
        return ToolUse(tools, ToolMode(choice or "auto"), "", parallel)
    except ValueError:
        message = f"tool_choice is {choice!r}; give auto, none, required or a function"
        raise InvalidRequest(message, field="tool_choice") from None


def arguments_of(text: str) -> str:
    """Returns the arguments for a custom tool's input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Returns the input in a custom tool call's arguments, or the arguments unchanged if they have another form."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _made(tool: Mapping[str, Any], index: int, ignored: list[str]) -> list[tuple[ToolName, Tool, str]]:
    kind, where = tool.get("type"), f"tools.{index}"
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where}.type must be a string", field=f"{where}.type")
    if kind == "function":
        made = _function(tool, index, where)
        return [(ToolName(made.name), made, where)]
    if kind == "custom":
        if isinstance(tool.get("format"), Mapping) and tool["format"].get("type") not in (None, "text"):
            ignored.append(f"tools[{index}].format")
        made = _custom(tool, index, where)
        return [(ToolName(made.name, is_custom=True), made, where)]
    if kind == "namespace":
        return _of_namespace(tool, index, ignored)
    if kind == "mcp":
        return []
    ignored.append(ignored_tool(index, kind))
    return []


def _of_namespace(tool: Mapping[str, Any], index: int, ignored: list[str]) -> list[tuple[ToolName, Tool, str]]:
    where = f"tools.{index}"
    namespace, inner = _name(tool, where), tool.get("tools")
    if not isinstance(inner, list):
        ignored.append(ignored_tool(index, "namespace"))
        return []
    if tool.get("description"):
        ignored.append(f"tools[{index}].description")
    found = []
    for at, each in enumerate(inner):
        place = f"{where}.tools.{at}"
        kind = each.get("type") if isinstance(each, Mapping) else None
        if kind != "function":
            ignored.append(f"tools[{index}].{ignored_tool(at, str(kind))}")
            continue
        made = _function(each, index, place)
        name = ToolName(made.name, namespace)
        found.append((name, replace(made, name=name.flat), place))
    return found


def _function(tool: Mapping[str, Any], index: int, where: str) -> Tool:
    name, description, parameters = _name(tool, where), tool.get("description"), tool.get("parameters")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.description must be a string", field=f"{where}.description")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}.parameters must be an object", field=f"{where}.parameters")
    return Tool(name, description, parameters, bool(tool.get("strict")), index)


def _custom(tool: Mapping[str, Any], index: int, where: str) -> Tool:
    made = _function({**tool, "parameters": None}, index, where)
    return replace(made, parameters=_INPUT_SCHEMA, strict=False)


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.name is required", field=f"{where}.name")
    return name


def _allowed(choice: Mapping[str, Any], tools: Sequence[Tool], parallel: bool) -> ToolUse:
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        field = "tool_choice.mode"
        raise InvalidRequest(f"{field} is {mode!r}; give auto or required", field=field)
    if not isinstance(allowed, list) or not allowed:
        field = "tool_choice.tools"
        raise InvalidRequest(f"{field} must be a list of at least one function", field=field)
    names = [_flat(tool) if isinstance(tool, Mapping) else "" for tool in allowed]
    return ToolUse(only(tools, names, "tool_choice"), ToolMode(mode), parallel=parallel)


def _chosen(choice: Mapping[str, Any], served: ServedTools) -> str:
    kind, wanted = choice.get("type"), _flat(choice)
    if kind not in ("function", "custom", "mcp"):
        message = f"tool_choice.type is {kind!r}; give function, custom, mcp or allowed_tools"
        raise InvalidRequest(message, field="tool_choice.type")
    if wanted not in served.names:
        message = f"tool_choice.name is {choice.get('name')!r}, which is not one of the tools"
        raise InvalidRequest(message, field="tool_choice.name")
    return wanted


def _of_server(choice: Mapping[str, Any], served: ServedTools) -> tuple[Tool, ...]:
    """Returns the tools of the chosen MCP server."""
    label = choice.get("server_label")
    tools = tuple(tool for tool in served.tools if label and served.names[tool.name].server == label)
    if not tools:
        field = "tool_choice.server_label"
        raise InvalidRequest(f"{field} is {label!r}, which has no tool here", field=field)
    return tools


def _flat(choice: Mapping[str, Any]) -> str:
    prefix = choice.get("server_label") if choice.get("type") == "mcp" else choice.get("namespace")
    return ToolName(str(choice.get("name")), str(prefix or "")).flat
