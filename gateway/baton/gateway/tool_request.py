"""A chat's tools, from OpenAI's form to the gateway's own, and what cannot be served of them."""

from __future__ import annotations

from baton.gateway.openai_types import ChatCompletionRequest, NamedToolChoice, ToolDefinition
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest


def tool_use_of(request: ChatCompletionRequest) -> ToolUse:
    """What the request asks. Raises InvalidRequest for a choice among tools that are not there."""
    choice = request.tool_choice
    tools = tuple(tool_of(definition) for definition in request.tools or ())
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice is only allowed when tools are given.", field="tool_choice")
        return ToolUse()
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if all(tool.name != name for tool in tools):
            raise InvalidRequest(
                f"tool_choice: the function {name!r} is not in tools.", field="tool_choice.function.name"
            )
        return ToolUse(tools, ToolMode.NAMED, name, parallel)
    return ToolUse(tools, ToolMode(choice or "auto"), parallel=parallel)


def tool_of(definition: ToolDefinition) -> Tool:
    """One tool."""
    function = definition.function
    return Tool(function.name, function.description, function.parameters, bool(function.strict))
