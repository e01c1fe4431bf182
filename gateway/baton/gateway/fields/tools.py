"""Converts a chat's tools and functions to the gateway's own form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.gateway.schemas.requests import (
    AllowedToolsChoice,
    ChatCompletionRequest,
    ChosenFunction,
    FunctionDefinition,
    NamedToolChoice,
    ToolDefinition,
)
from baton.rpc.errors import InvalidRequest, ServiceError

_TOOL = re.compile(r"tools\.(\d+)\.function|tools|tool_choice")


def tool_use_of(request: ChatCompletionRequest) -> ToolUse:
    """Returns the request's tools and choice. Raises InvalidRequest for a choice of an unknown tool."""
    if request.functions or request.function_call:
        return _function_use_of(request)
    choice = request.tool_choice
    tools = tuple(tool_of(definition) for definition in request.tools or ())
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice is allowed only with tools", field="tool_choice")
        return ToolUse()
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        names = [tool.function.name for tool in allowed.tools]
        return ToolUse(only(tools, names, "tool_choice.allowed_tools"), ToolMode(allowed.mode), parallel=parallel)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if all(tool.name != name for tool in tools):
            raise InvalidRequest(
                f"tool_choice: the function {name!r} is not in tools", field="tool_choice.function.name"
            )
        return ToolUse(tools, ToolMode.NAMED, name, parallel)
    return ToolUse(tools, ToolMode(choice or "auto"), parallel=parallel)


def tool_of(definition: ToolDefinition) -> Tool:
    """Returns a tool whose function was validated."""
    assert definition.function is not None
    return _function_of(definition.function)


def only(tools: Sequence[Tool], names: Sequence[str], where: str) -> tuple[Tool, ...]:
    """Returns the tools with these names, in their own order. Raises InvalidRequest for an unknown name."""
    known = {tool.name for tool in tools}
    for index, name in enumerate(names):
        if name not in known:
            field = f"{where}.tools.{index}"
            raise InvalidRequest(f"{field}: the function {name!r} is not in tools", field=field)
    chosen = set(names)
    return tuple(replace(tool, place=place) for place, tool in enumerate(tools) if tool.name in chosen)


@contextmanager
def fields_of(request: ChatCompletionRequest) -> Iterator[None]:
    """Makes errors of tools name the request's functions, if it uses those."""
    try:
        yield
    except ServiceError as error:
        if request.functions and _TOOL.match(error.field):
            field = _TOOL.sub(_as_function, error.field, count=1)
            error.message, error.field = error.message.replace(error.field, field), field
        raise


def _as_function(found: re.Match[str]) -> str:
    if found[0] == "tool_choice":
        return "function_call"
    return "functions" if found[1] is None else f"functions.{found[1]}"


def _function_use_of(request: ChatCompletionRequest) -> ToolUse:
    choice = request.function_call
    for name in ("tools", "tool_choice"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} is not allowed with functions, its deprecated form", field=name)
    if not request.functions:
        raise InvalidRequest("function_call is allowed only with functions", field="function_call")
    tools = tuple(_function_of(function) for function in request.functions)
    if not isinstance(choice, ChosenFunction):
        return ToolUse(tools, ToolMode(choice or "auto"), parallel=False)
    if all(tool.name != choice.name for tool in tools):
        message = f"function_call: the function {choice.name!r} is not in functions"
        raise InvalidRequest(message, field="function_call.name")
    return ToolUse(tools, ToolMode.NAMED, choice.name, parallel=False)


def _function_of(function: FunctionDefinition) -> Tool:
    return Tool(function.name, function.description, function.parameters, bool(function.strict))
