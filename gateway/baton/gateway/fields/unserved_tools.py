"""Skips a chat's unsupported tools, unless the client requires one."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.http.ignored_fields import ignored_tool
from baton.gateway.schemas.requests import AllowedToolsChoice, ChatCompletionRequest, ToolDefinition
from baton.rpc.errors import InvalidRequest


def served_tools(tools: Sequence[ToolDefinition] | None) -> tuple[list[ToolDefinition] | None, list[str]]:
    """Returns the functions and the names of skipped tools.

    Raises InvalidRequest for a function tool without a function.
    """
    served: list[ToolDefinition] = []
    skipped: list[str] = []
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            skipped.append(ignored_tool(index, tool.type))
        elif tool.function is None:
            field = f"tools.{index}.function"
            raise InvalidRequest(f"{field} is required", field=field)
        else:
            served.append(tool)
    return served or None, skipped


def skip_tools(request: ChatCompletionRequest) -> list[str]:
    """Removes unsupported tools in place and returns their names. Raises InvalidRequest."""
    request.tools, skipped = served_tools(request.tools)
    choice = request.tool_choice
    insists = choice == "required" or isinstance(choice, AllowedToolsChoice)
    if skipped and request.tools is None and insists:
        raise InvalidRequest(f"tool_choice: none of the tools is supported: {', '.join(skipped)}", field="tool_choice")
    return skipped
