"""Validates the fields of chats and converts their messages for chat templates. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from baton.gateway.errors.http import ContextTooLong
from baton.gateway.fields.validation import (
    check_fields,
    check_logprob_token_ids,
    check_logprobs,
    check_metadata,
    check_variables,
    refuse_unserved,
)
from baton.gateway.models.prompts.call_arguments import check_arguments, read_arguments
from baton.gateway.schemas.requests import (
    ChatCompletionRequest,
    ChatMessage,
)
from baton.rpc.errors import InvalidRequest

MAX_ITEMS = 16 << 10  # messages, parts, tool calls and tools of one chat; a template takes 15 us per message

_UNSERVED_IN_CHAT = (
    "audio",
    "web_search_options",
)

# Messages of these roles are complete; continuing one would put words into another role's mouth.
_COMPLETE_ROLES = ("system", "developer", "user", "tool", "function")


def check_chat(request: ChatCompletionRequest, max_choices: int, max_logprobs: int) -> None:
    """Raises InvalidRequest for a chat that cannot be served."""
    check_fields(request, max_choices, max_logprobs)
    refuse_unserved(request, _UNSERVED_IN_CHAT)
    for kind in request.modalities or ():
        if kind != "text":
            raise InvalidRequest(f"modalities: {kind!r} is not supported; give text", field="modalities")
    check_messages(request.messages)
    check_variables(request.chat_template_kwargs)
    check_metadata(request.metadata)
    if request.top_logprobs is not None:
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        check_logprobs("top_logprobs", request.top_logprobs, max_logprobs)
    check_logprob_token_ids(request, request.top_logprobs if request.logprobs else None, "top_logprobs")
    if request.best_of is not None and request.best_of != (request.n or 1):
        message = f"best_of is {request.best_of}; chats return all choices, so it must equal n, {request.n or 1}"
        raise InvalidRequest(message, field="best_of")
    if request.max_tokens == 0:
        raise InvalidRequest("max_tokens is 0; give at least 1, or -1 for no limit", field="max_tokens")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true", field="continue_final_message"
        )
    if request.continue_final_message:
        check_continued(request.messages[-1].role)


def check_continued(role: str) -> None:
    """Raises InvalidRequest if the output cannot continue a message of this role."""
    if role in _COMPLETE_ROLES:
        raise InvalidRequest(
            f"continue_final_message needs a last message of role assistant; its role is {role}",
            field="continue_final_message",
        )


def check_chat_size(messages: Sequence[ChatMessage], max_model_len: int, num_tools: int = 0) -> None:
    """Raises ContextTooLong if a chat has more messages, parts, calls and tools than the context has tokens."""
    num_items = len(messages) + num_tools
    for message in messages:
        num_items += len(message.tool_calls or ())
        if isinstance(message.content, list):
            num_items += len(message.content)
    check_item_count(num_items, max_model_len)


def check_item_count(num_items: int, max_model_len: int) -> None:
    """Raises ContextTooLong if a chat has more items than the context has tokens, or than MAX_ITEMS."""
    check_max_items(num_items)
    if num_items > max_model_len:
        raise ContextTooLong(
            f"This model's maximum context length is {max_model_len} tokens. However, your messages have {num_items} "
            "messages, parts, tool calls and tools. Please reduce the length of the messages.",
            field="messages",
        )


def check_max_items(num_items: int) -> None:
    """Raises ContextTooLong if a chat has more than MAX_ITEMS items."""
    if num_items > MAX_ITEMS:
        raise ContextTooLong(
            f"the chat has {num_items} messages, parts, tool calls and tools; at most {MAX_ITEMS} are allowed",
            field="messages",
        )


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequest for messages that no template can render."""
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", field="messages")
    for index, message in enumerate(messages):
        if message.content is None and message.role in ("system", "developer", "user", "tool"):
            field = f"messages.{index}.content"
            raise InvalidRequest(f"{field} is required in a message of role {message.role}", field=field)


def chat_num_logprobs(request: ChatCompletionRequest) -> int | None:
    """Returns the number of alternatives per token, or None without log-probabilities."""
    return (request.top_logprobs or 0) if request.logprobs else None


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Returns the messages for chat templates, with parsed tool call arguments and with functions as tools."""
    check_arguments(_argument_texts(messages), "messages")
    fitted = [msgspec.structs.asdict(message) for message in messages]
    last_call = ""
    for index, message in enumerate(fitted):
        if (call := message.pop("function_call")) is not None:
            parsed = _with_parsed_arguments({"function": call}, f"messages.{index}.function_call", "")
            last_call = f"call_{index}"
            message["tool_calls"] = [{"id": last_call, "type": "function", **parsed}]
        elif message["role"] == "function":
            message["role"], message["tool_call_id"] = "tool", last_call or None
        elif message["tool_calls"]:
            field = f"messages.{index}.tool_calls"
            message["tool_calls"] = [
                _with_parsed_arguments(call, f"{field}.{at}") for at, call in enumerate(message["tool_calls"])
            ]
    return fitted


def _argument_texts(messages: Sequence[ChatMessage]) -> Iterator[str]:
    for message in messages:
        for function in (message.function_call, *(call.get("function") for call in message.tool_calls or ())):
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments


def template_variables(request: ChatCompletionRequest) -> dict[str, Any]:
    """Returns the client's template variables."""
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return variables


def _with_parsed_arguments(call: Mapping[str, Any], field: str, inside: str = ".function") -> dict[str, Any]:
    function, where = call.get("function"), f"{field}{inside}"
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where} must be an object", field=where)
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.name must be a string", field=f"{where}.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    elif not isinstance(arguments, dict):
        where = f"{where}.arguments"
        raise InvalidRequest(f"{where} must be a JSON object in a string", field=where)
    return {**call, "function": {**function, "arguments": arguments}}
