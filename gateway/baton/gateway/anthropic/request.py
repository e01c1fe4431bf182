"""Converts Anthropic's fields to Baton's. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.gateway.anthropic.conversation import chat_messages, continues_last
from baton.gateway.anthropic.types import (
    AnyChoice,
    CountTokensRequest,
    MessagesRequest,
    MessagesTool,
    NoneChoice,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoice,
)
from baton.gateway.fields.validation import check_variables
from baton.gateway.http.ignored_fields import ignored_tool
from baton.gateway.parsing.tool import Tool as CallableTool
from baton.gateway.parsing.tool import ToolMode, ToolUse
from baton.gateway.schemas.requests import GenerationFields, JsonSchemaFormat, ResponseFormat
from baton.gateway.serving.chat import ChatTurn
from baton.rpc.errors import InvalidRequest

# Maps the generator's field names to those of this API.
FIELDS: Mapping[str, str] = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
}

# Prompts are cached without cache_control, and metadata is not used.
_WITHOUT_EFFECT = ("metadata", "service_tier", "container", "context_management", "inference_geo", "cache_control")
_VERSION = re.compile(rb"20(2[3-9]|[3-9]\d)-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])")


def check_version(headers: Mapping[bytes, bytes]) -> None:
    """Raises InvalidRequest for an invalid version. Versions are dates; newer ones are treated the same."""
    version = headers.get(b"anthropic-version")
    if version is not None and _VERSION.fullmatch(version) is None:
        shown = version.decode("latin-1")
        raise InvalidRequest(
            f"anthropic-version: {shown!r} is not a valid version; give a date, such as 2023-06-01",
            field="anthropic-version",
        )


def ignored_of(request: CountTokensRequest) -> list[str]:
    """Returns the names of ignored fields and tools."""
    names = [name for name in _WITHOUT_EFFECT if getattr(request, name, None) not in (None, {}, "", "auto")]
    return [*names, *ignored_tools(request)]


def ignored_tools(request: CountTokensRequest) -> list[str]:
    """Returns the names of skipped tools: server tools, and tools without a schema."""
    return [
        ignored_tool(index, tool.type or "") for index, tool in enumerate(request.tools or ()) if not _is_function(tool)
    ]


def turn_of(request: MessagesRequest) -> ChatTurn:
    """Returns the request's turn. Raises InvalidRequest that names the field."""
    messages = chat_messages(request.system, request.messages)
    _check_servers(request)
    _check_thinking(request)
    for index, stop in enumerate(request.stop_sequences or ()):
        if not stop.strip():
            field = f"stop_sequences.{index}"
            raise InvalidRequest(f"{field}: each stop sequence must contain non-whitespace", field=field)
    if request.top_p == 0:
        raise InvalidRequest("top_p must be above 0", field="top_p")
    return ChatTurn(
        messages=messages,
        fields=_generation_fields(request),
        max_tokens=request.max_tokens,
        tools=_tool_use(request),
        variables=_variables(request),
        continues_last=continues_last(request.messages),
        reasoning_budget=request.thinking.budget_tokens if isinstance(request.thinking, ThinkingEnabled) else None,
    )


def counted_turn(request: CountTokensRequest) -> ChatTurn:
    """Returns a turn for counting its prompt. Raises InvalidRequest that names the field."""
    return ChatTurn(
        messages=chat_messages(request.system, request.messages),
        fields=GenerationFields(model=request.model),
        max_tokens=None,
        tools=_tool_use(request),
        variables=_variables(request),
        continues_last=continues_last(request.messages),
    )


def _generation_fields(request: MessagesRequest) -> GenerationFields:
    return GenerationFields(
        model=request.model,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=list(request.stop_sequences or ()),
        stream=request.stream,
        priority=request.priority,
        cache_salt=request.cache_salt,
        kv_transfer_params=request.kv_transfer_params,
        ec_transfer_params=request.ec_transfer_params,
        response_format=_response_format(request),
    )


def _response_format(request: MessagesRequest) -> ResponseFormat | None:
    wanted = request.output_config.format if request.output_config is not None else None
    if wanted is None:
        return None
    schema = JsonSchemaFormat(name="answer", schema=wanted.schema, strict=True)
    return ResponseFormat(type="json_schema", json_schema=schema)


def _check_servers(request: CountTokensRequest) -> None:
    if request.mcp_servers:
        raise InvalidRequest("mcp_servers: MCP servers are not supported; leave it out", field="mcp_servers")


def _check_thinking(request: MessagesRequest) -> None:
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        field = "thinking.budget_tokens"
        raise InvalidRequest(
            f"{field} is {thinking.budget_tokens}; it must be less than max_tokens, {request.max_tokens}",
            field=field,
        )


def _variables(request: CountTokensRequest) -> dict[str, Any]:
    """Returns the template's variables, with thinking under the names that templates use."""
    check_variables(request.chat_template_kwargs)
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        thinks = not isinstance(request.thinking, ThinkingDisabled)
        variables = {"enable_thinking": thinks, "thinking": thinks}
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    return {**variables, **(request.chat_template_kwargs or {})}


def _tool_use(request: CountTokensRequest) -> ToolUse:
    choice = request.tool_choice
    tools = tuple(_tool(tool, index) for index, tool in enumerate(request.tools or ()) if _is_function(tool))
    skipped = ignored_tools(request)
    if not tools:
        if isinstance(choice, AnyChoice | ToolChoice):
            why = f"none of the tools is supported: {', '.join(skipped)}" if skipped else "allowed only with tools"
            raise InvalidRequest(f"tool_choice: {why}", field="tool_choice")
        return ToolUse()
    _check_names(tools)
    if choice is None:
        return ToolUse(tools, ToolMode.AUTO)
    if isinstance(choice, NoneChoice):
        return ToolUse(tools, ToolMode.NONE)
    parallel = not choice.disable_parallel_tool_use
    if isinstance(choice, ToolChoice):
        if choice.name not in {tool.name for tool in tools}:
            is_there = choice.name in {tool.name for tool in request.tools or ()}
            why = f"the tool {choice.name!r} is not supported" if is_there else f"there is no tool {choice.name!r}"
            raise InvalidRequest(f"tool_choice.name: {why}", field="tool_choice.name")
        return ToolUse(tools, ToolMode.NAMED, choice.name, parallel)
    return ToolUse(tools, ToolMode.REQUIRED if isinstance(choice, AnyChoice) else ToolMode.AUTO, "", parallel)


def _is_function(tool: MessagesTool) -> bool:
    return tool.type in (None, "custom")


def _tool(tool: MessagesTool, index: int) -> CallableTool:
    where = f"tools.{index}"
    if tool.name is None:
        raise InvalidRequest(f"{where}.name is required", field=f"{where}.name")
    if tool.input_schema is None:
        raise InvalidRequest(f"{where}.input_schema is required", field=f"{where}.input_schema")
    if tool.input_schema.get("type", "object") != "object":
        field = f"{where}.input_schema.type"
        raise InvalidRequest(f"{field} must be 'object'", field=field)
    return CallableTool(tool.name, tool.description, tool.input_schema, bool(tool.strict), index)


def _check_names(tools: Sequence[CallableTool]) -> None:
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            field = f"tools.{tool.place}.name"
            raise InvalidRequest(f"{field}: tool names must be unique; {tool.name!r} occurs twice", field=field)
        names.add(tool.name)
