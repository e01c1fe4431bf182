"""Converts the fields of the Responses API to Baton's. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.gateway.bodies.json_values import check_json
from baton.gateway.fields.adopted import adopt
from baton.gateway.fields.neutral import drop_neutral
from baton.gateway.fields.validation import check_metadata, check_variables
from baton.gateway.models.sampling import SamplingDefaults
from baton.gateway.responses.items import Item, chat_messages, ignored_items
from baton.gateway.responses.tools import ServedTools, served_tools, tool_use
from baton.gateway.responses.types import ConversationReference, ReasoningOptions, Response, ResponsesRequest
from baton.gateway.schemas.requests import GenerationFields, JsonSchemaFormat, ResponseFormat
from baton.gateway.serving.chat import ChatTurn
from baton.rpc.errors import InvalidRequest

# Maps the generator's field names to those of this API.
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
# Fields of items that never occur, because their tools are not supported.
_WITHOUT_ITEMS = (
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
# Fields whose values are returned with the response.
_KEPT = ("user", "safety_identifier", "prompt_cache_key")
_REDACTED = "<redacted>"
_SHARED = tuple(name for name in GenerationFields.__struct_fields__ if name in ResponsesRequest.__struct_fields__)


def ignored_of(request: ResponsesRequest) -> list[str]:
    """Converts other servers' fields in place. Returns the names of all ignored fields. Raises InvalidRequest."""
    ignored = adopt(request, "max_output_tokens", _KEPT)
    ignored += [
        f"include[{index}] ({name})" for index, name in enumerate(request.include or ()) if name in _WITHOUT_ITEMS
    ]
    if request.reasoning is not None and request.reasoning.summary is not None:
        ignored.append("reasoning.summary")
    if request.text is not None and request.text.verbosity is not None:
        ignored.append("text.verbosity")
    return [*ignored, *ignored_items(request.input), *served_tools(request.tools).ignored]


def check_request(request: ResponsesRequest, max_logprobs: int) -> None:
    """Raises InvalidRequest for unsupported or contradictory fields."""
    for name in ("prompt", "previous_input_messages", "enable_response_messages"):
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported by this release; leave it out", field=name)
    if request.previous_response_id and conversation_of(request):
        raise InvalidRequest(
            "conversation and previous_response_id exclude each other; set one", field="previous_response_id"
        )
    if request.background and request.store is False:
        raise InvalidRequest("background needs store to be true", field="background")
    if request.stream_options and not request.stream:
        raise InvalidRequest("stream_options is allowed only if stream is true", field="stream_options")
    for index, name in enumerate(request.include or ()):
        if name not in (*_INCLUDABLE, *_WITHOUT_ITEMS):
            field = f"include.{index}"
            raise InvalidRequest(f"{field} is {name!r}; give one of {', '.join(_INCLUDABLE)}", field=field)
    if request.top_logprobs is not None and request.top_logprobs > max_logprobs:
        raise InvalidRequest(
            f"top_logprobs is {request.top_logprobs}; at most {max_logprobs} is allowed", field="top_logprobs"
        )
    # These values are returned with the response.
    for name in ("tools", "tool_choice", "text"):
        check_json(msgspec.to_builtins(getattr(request, name)), name)
    check_metadata(request.metadata)
    check_variables(request.chat_template_kwargs)


def conversation_of(request: ResponsesRequest) -> str:
    """Returns the id of the response's conversation, or an empty text. Raises InvalidRequest."""
    given = request.conversation
    if isinstance(given, dict):
        given = given.get("id")
        if not isinstance(given, str) or not given:
            raise InvalidRequest("conversation.id is required", field="conversation.id")
    return given or ""


def turn_of(request: ResponsesRequest, items: Sequence[Item], served: ServedTools) -> ChatTurn:
    """Returns the request's turn over the conversation's items. Raises InvalidRequest."""
    fields = GenerationFields(**{name: getattr(request, name) for name in _SHARED if name not in _OTHERWISE})
    drop_neutral(fields)
    fields.response_format = _response_format(request)
    wants_logprobs = WITH_LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning is not None and request.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning.effort)
    return ChatTurn(
        messages=chat_messages(request.instructions, items),
        fields=fields,
        max_tokens=request.max_output_tokens,
        logprobs=request.top_logprobs or 0 if wants_logprobs else None,
        tools=tool_use(served, request.tool_choice, request.parallel_tool_calls is not False),
        variables=variables,
        include_reasoning=request.include_reasoning is not False,
        reasoning_budget=request.thinking_token_budget,
        must_limit_reasoning=True,
    )


# Fields with another form or meaning than in GenerationFields: these streams are read again by response id.
_OTHERWISE = ("stream", "stream_options")


def new_response(request: ResponsesRequest, response_id: str, model: str, defaults: SamplingDefaults) -> Response:
    """Returns a new response without output."""
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
        previous_response_id=request.previous_response_id or None,
        conversation=ConversationReference(conversation_of(request)) if request.conversation else None,
        reasoning=request.reasoning or ReasoningOptions(),
        store=request.store is not False,
        temperature=defaults.values["temperature"] if request.temperature is None else request.temperature,
        text={**text, "format": text.get("format") or {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=without_secrets(request.tools),
        top_logprobs=request.top_logprobs or 0,
        top_p=defaults.values["top_p"] if request.top_p is None else request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        metadata=request.metadata or {},
    )


def without_secrets(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools as a response shows them: without what MCP servers know their clients by."""
    return [_without_secrets(tool) if tool.get("type") == "mcp" else tool for tool in tools or ()]


def _without_secrets(tool: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in tool.items() if name != "authorization"}
    if isinstance(tool.get("headers"), Mapping):
        shown["headers"] = dict.fromkeys(tool["headers"], _REDACTED)
    return shown


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
        message = f"text.format.type is {wanted.type!r}; give text, json_object or json_schema"
        raise InvalidRequest(message, field="text.format.type")
    return ResponseFormat(type=wanted.type)  # type: ignore[arg-type]
