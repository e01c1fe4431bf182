"""From the Responses API's fields to Baton's. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.gateway.openai_types import GenerationFields, JsonSchemaFormat, ResponseFormat
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.gateway.responses.items import Item, chat_messages
from baton.gateway.responses.types import ReasoningOptions, Response, ResponsesRequest
from baton.gateway.sampling_defaults import SamplingDefaults
from baton.gateway.tool_request import only
from baton.gateway.turn import Turn
from baton.gateway.validation import check_metadata, check_variables
from baton.rpc.errors import InvalidRequest

# The generation side's names for what this API calls otherwise.
FIELDS: Mapping[str, str] = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
WITH_LOGPROBS = "message.output_text.logprobs"

_INCLUDABLE = (WITH_LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url")
_SHARED = tuple(name for name in GenerationFields.__struct_fields__ if name in ResponsesRequest.__struct_fields__)


def check_request(request: ResponsesRequest, max_logprobs: int) -> None:
    """Raises InvalidRequest for a request that cannot be served as asked."""
    for name in ("prompt", "conversation", "previous_input_messages", "enable_response_messages"):
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not served by this release; leave it out.", field=name)
    if request.background and request.store is False:
        raise InvalidRequest("background needs store to be true.", field="background")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true.", field="stream_options")
    for index, name in enumerate(request.include or ()):
        if name not in _INCLUDABLE:
            field = f"include.{index}"
            raise InvalidRequest(f"{field} is {name!r}; it must be one of {', '.join(_INCLUDABLE)}.", field=field)
    if request.top_logprobs is not None and request.top_logprobs > max_logprobs:
        raise InvalidRequest(
            f"top_logprobs is {request.top_logprobs}; at most {max_logprobs} is allowed.", field="top_logprobs"
        )
    check_metadata(request.metadata)
    check_variables(request.chat_template_kwargs)


def turn_of(request: ResponsesRequest, context: Sequence[Item], items: Sequence[Item]) -> Turn:
    """The request's turn, after the items of the responses that it follows. Raises InvalidRequest."""
    fields = GenerationFields(**{name: getattr(request, name) for name in _SHARED if name not in _OTHERWISE})
    fields.response_format = _response_format(request)
    wants_logprobs = WITH_LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning is not None and request.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning.effort)
    return Turn(
        messages=chat_messages(request.instructions, [*context, *items]),
        fields=fields,
        max_tokens=request.max_output_tokens,
        logprobs=request.top_logprobs or 0 if wants_logprobs else None,
        tools=_tool_use(request),
        variables=variables,
        include_reasoning=request.include_reasoning is not False,
        reasoning_budget=request.thinking_token_budget,
        must_limit_reasoning=True,
    )


# Of the same name as in GenerationFields, and of another form or meaning: these streams are read again by their ids.
_OTHERWISE = ("stream", "stream_options")


def new_response(request: ResponsesRequest, response_id: str, model: str, defaults: SamplingDefaults) -> Response:
    """The response before anything came of it."""
    text = msgspec.to_builtins(request.text) if request.text is not None else {}
    return Response(
        id=response_id,
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning or ReasoningOptions(),
        store=request.store is not False,
        temperature=defaults.values["temperature"] if request.temperature is None else request.temperature,
        text={**text, "format": text.get("format") or {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=defaults.values["top_p"] if request.top_p is None else request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        metadata=request.metadata or {},
    )


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None:
        return None
    if wanted.type == "json_schema":
        schema = JsonSchemaFormat(
            name=wanted.name or "answer", description=wanted.description, schema=wanted.schema, strict=wanted.strict
        )
        return ResponseFormat(type="json_schema", json_schema=schema)
    if wanted.type not in ("text", "json_object"):
        message = f"text.format.type is {wanted.type!r}; it must be text, json_object or json_schema."
        raise InvalidRequest(message, field="text.format.type")
    return ResponseFormat(type=wanted.type)  # type: ignore[arg-type]


def _tool_use(request: ResponsesRequest) -> ToolUse:
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice is only allowed when tools are given.", field="tool_choice")
        return ToolUse()
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools))
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice, tools, parallel)
    if isinstance(choice, dict):
        return ToolUse(tools, ToolMode.NAMED, _chosen(choice, tools), parallel)
    try:
        return ToolUse(tools, ToolMode(choice or "auto"), "", parallel)
    except ValueError:
        message = f"tool_choice is {choice!r}; it must be auto, none, required or a function."
        raise InvalidRequest(message, field="tool_choice") from None


def _allowed(choice: Mapping[str, Any], tools: Sequence[Tool], parallel: bool) -> ToolUse:
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        field = "tool_choice.mode"
        raise InvalidRequest(f"{field} is {mode!r}; it must be auto or required.", field=field)
    if not isinstance(allowed, list) or not allowed:
        field = "tool_choice.tools"
        raise InvalidRequest(f"{field} must be a list of functions, at least one.", field=field)
    names = [str(tool.get("name")) if isinstance(tool, dict) else "" for tool in allowed]
    return ToolUse(only(tools, names, "tool_choice"), ToolMode(mode), parallel=parallel)


def _chosen(choice: Mapping[str, Any], tools: Sequence[Tool]) -> str:
    if choice.get("type") != "function":
        message = f"tool_choice.type is {choice.get('type')!r}; only function and allowed_tools can be served."
        raise InvalidRequest(message, field="tool_choice.type")
    name = choice.get("name")
    for tool in tools:
        if tool.name == name:
            return tool.name
    raise InvalidRequest(f"tool_choice.name is {name!r}, which is none of the tools.", field="tool_choice.name")


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") != "function":
        shown = tool.get("type")
        message = f"{where}.type is {shown!r}; only function can be served."
        raise InvalidRequest(message, field=f"{where}.type")
    name, description, parameters = tool.get("name"), tool.get("description"), tool.get("parameters")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.name is required.", field=f"{where}.name")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.description must be a string.", field=f"{where}.description")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}.parameters must be an object.", field=f"{where}.parameters")
    return Tool(name, description, parameters, bool(tool.get("strict")))
