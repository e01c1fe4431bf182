"""Validates OpenAI's fields beyond JSON types and converts them to Baton's. Pure functions; knows no model and no
HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from baton.gateway.errors.http import ContextTooLong
from baton.gateway.models.prompts.call_arguments import check_arguments, read_arguments
from baton.gateway.models.prompts.context_length import context_too_long
from baton.gateway.models.sampling import check_count
from baton.gateway.schemas.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationFields,
    RepetitionDetection,
    ResponseFormat,
)
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

DEFAULT_COMPLETION_TOKENS = 16

MAX_ITEMS = 16 << 10  # messages, parts, tool calls and tools of one chat; a template takes 15 us per message

_UINT64 = 2**64 - 1
_MAX_BIAS = 100.0
_MAX_VARIABLES = 256
_MAX_STOP_STRINGS = 1024  # the generator has its own, lower limit
_MAX_BAD_WORDS = 16 << 10
_MAX_BIASES = 256 << 10
_MAX_METADATA = 16
_MAX_METADATA_NAME = 64  # characters
_MAX_METADATA_VALUE = 512

# Known fields that this release does not support. Neutral values are accepted.
_UNSERVED = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs")
# Fields that change sampling, which beam search does not use.
_DRAWS = (
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "repetition_detection",
    "thinking_token_budget",
    "best_of",
)
_UNSERVED_IN_CHAT = (
    "audio",
    "return_assistant_tokens_mask",
    "web_search_options",
)
# Neutral values besides null, false and [].
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "logit_bias": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "best_of": (1,),
    "thinking_token_budget": (-1,),
    "response_format": (ResponseFormat(type="text"),),
    "repetition_detection": (RepetitionDetection(),),
}
# Messages of these roles are complete; continuing one would put words into another role's mouth.
_COMPLETE_ROLES = ("system", "developer", "user", "tool", "function")
_UNSERVED_IN_COMPLETIONS = ("suffix", "prompt_embeds")

Prompt = str | list[int]


def check_chat(request: ChatCompletionRequest, max_choices: int, max_logprobs: int) -> None:
    """Raises InvalidRequest for a chat that cannot be served."""
    check_fields(request, max_choices)
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
        _check_logprobs("top_logprobs", request.top_logprobs, max_logprobs)
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


def check_for_model(request: GenerationFields, info: types_pb2.ModelInfo) -> None:
    """Raises InvalidRequest for lists longer than the vocabulary, before they are converted."""
    for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
        check_count(name, len(getattr(request, name) or ()), info.vocab_size)


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


def check_template(template: str | None, trusted: bool) -> None:
    """Raises InvalidRequest for a request's own chat template unless the operator trusts them."""
    if template is not None and not trusted:
        raise InvalidRequest(
            "chat_template is allowed only if the gateway runs with --trust-request-chat-template",
            field="chat_template",
        )


def check_variables(variables: Mapping[str, Any] | None) -> None:
    """Raises InvalidRequest for too many template variables."""
    if variables is not None and len(variables) > _MAX_VARIABLES:
        raise InvalidRequest(
            f"chat_template_kwargs has {len(variables)} keys; at most {_MAX_VARIABLES} are allowed",
            field="chat_template_kwargs",
        )


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises InvalidRequest for metadata beyond OpenAI's limits."""
    if len(metadata or ()) > _MAX_METADATA:
        message = f"metadata has {len(metadata or ())} keys; at most {_MAX_METADATA} are allowed"
        raise InvalidRequest(message, field="metadata")
    for name, value in (metadata or {}).items():
        if len(name) > _MAX_METADATA_NAME or len(value) > _MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"metadata: the key {name[:_MAX_METADATA_NAME]!r} or its value is too long; at most "
                f"{_MAX_METADATA_NAME} and {_MAX_METADATA_VALUE} characters are allowed",
                field="metadata",
            )


def check_completion(request: CompletionRequest, max_choices: int, max_logprobs: int, max_prompts: int) -> None:
    """Raises InvalidRequest for a completion that cannot be served."""
    check_fields(request, max_choices)
    refuse_unserved(request, _UNSERVED_IN_COMPLETIONS)
    if request.logprobs is not None:
        _check_logprobs("logprobs", request.logprobs, max_logprobs)
    check_logprob_token_ids(request, request.logprobs, "logprobs")
    _check_best_of(request, max_choices)
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("max_tokens is 0; give at least 1, or set echo", field="max_tokens")
    _check_num_prompts(request.prompt, max_prompts)
    prompts_of(request)


def _check_num_prompts(prompt: object, max_prompts: int) -> None:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and len(prompt) > max_prompts:
        raise InvalidRequest(f"prompt has {len(prompt)} prompts; at most {max_prompts} are allowed", field="prompt")


def prompts_of(request: CompletionRequest) -> list[Prompt]:
    """Returns the list of prompts. Raises InvalidRequest for mixed forms."""
    prompt = request.prompt
    if prompt is None:
        raise InvalidRequest("prompt is required", field="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty; give at least one text or token", field="prompt")
    kind = type(prompt[0])
    if set(map(type, prompt)) != {kind}:
        index = next(index for index, item in enumerate(prompt) if type(item) is not kind)
        raise InvalidRequest(
            f"prompt.{index} has another type than prompt.0; give texts, token ids, or lists of token ids",
            field=f"prompt.{index}",
        )
    return [prompt] if kind is int else prompt  # type: ignore[list-item, return-value]


def sampling_of(request: GenerationFields, logprobs: int | None) -> types_pb2.SamplingParams:
    """Returns the sampling parameters; fields that the client left out stay unset."""
    bias = request.logit_bias or {}
    top_k = request.top_k
    seed = request.seed
    return types_pb2.SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if top_k is None else max(0, top_k),
        min_p=request.min_p,
        seed=None if seed is None else seed & _UINT64,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias_token_ids=bias.keys(),
        logit_bias_values=bias.values(),
        logprobs=logprobs,
        allowed_token_ids=request.allowed_token_ids,
        prompt_logprobs=request.prompt_logprobs,
        bad_words=request.bad_words,
        logprob_token_ids=request.logprob_token_ids,
    )


def truncated(token_ids: list[int], request: GenerationFields, max_model_len: int) -> list[int]:
    """Returns the prompt truncated to truncate_prompt_tokens; -1 leaves room for one output token."""
    most = request.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        most = max_model_len - 1
    if not 1 <= most < max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {most}; give -1, or 1 to {max_model_len - 1}",
            field="truncate_prompt_tokens",
        )
    return token_ids[:most] if request.truncation_side == "right" else token_ids[-most:]


def stop_of(request: GenerationFields, max_tokens: int | None) -> types_pb2.StopConditions:
    """Returns the stop conditions."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    return types_pb2.StopConditions(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        stop=stop,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        repetition_detection=None if not request.repetition_detection else _detection_of(request.repetition_detection),
    )


def _detection_of(wanted: RepetitionDetection) -> types_pb2.RepetitionDetection:
    return types_pb2.RepetitionDetection(
        min_pattern_size=wanted.min_pattern_size,
        max_pattern_size=wanted.max_pattern_size,
        min_count=wanted.min_count,
    )


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


def check_context(num_prompt_tokens: int, max_model_len: int, field: str) -> None:
    """Raises ContextTooLong if the context has no room for an output token."""
    if num_prompt_tokens >= max_model_len:
        raise context_too_long(num_prompt_tokens, max_model_len, field)


def check_fields(request: GenerationFields, max_choices: int) -> None:
    """Raises InvalidRequest for fields that no kind of generation supports."""
    if request.n is not None and request.n > max_choices:
        raise InvalidRequest(f"n is {request.n}; at most {max_choices} choices are allowed", field="n")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is allowed only if stream is true", field="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs is not allowed if stream is true", field="prompt_logprobs")
    _check_beams(request)
    _check_lengths(request)
    for token_id, value in (request.logit_bias or {}).items():
        if not 0 <= token_id < 2**31:
            raise InvalidRequest(f"logit_bias: {token_id} is not a token id", field="logit_bias")
        if not -_MAX_BIAS <= value <= _MAX_BIAS:
            message = f"logit_bias of token {token_id} is {value:g}; it must be from -100 to 100"
            raise InvalidRequest(message, field="logit_bias")
    refuse_unserved(request, _UNSERVED)


def _check_lengths(request: GenerationFields) -> None:
    """Raises InvalidRequest for lists that are too long, before they are converted."""
    stop = request.stop if isinstance(request.stop, list) else ()
    lengths = (
        ("stop", len(stop), _MAX_STOP_STRINGS, "strings"),
        ("bad_words", len(request.bad_words or ()), _MAX_BAD_WORDS, "texts"),
        ("logit_bias", len(request.logit_bias or ()), _MAX_BIASES, "tokens"),
    )
    for name, length, most, what in lengths:
        if length > most:
            raise InvalidRequest(f"{name} has {length} {what}; at most {most} are allowed", field=name)


def _check_beams(request: GenerationFields) -> None:
    if not request.use_beam_search:
        if request.length_penalty not in (None, 1):
            raise InvalidRequest("length_penalty is allowed only with use_beam_search", field="length_penalty")
        return
    for name in ("stream", "logprobs", "prompt_logprobs", "response_format", "structured_outputs", "tools", *_DRAWS):
        value = getattr(request, name, None)
        if value is not None and value is not False and value != [] and value not in _NEUTRAL.get(name, ()):
            raise InvalidRequest(f"{name} is not allowed with use_beam_search", field=name)


def refuse_unserved(request: msgspec.Struct, names: Sequence[str]) -> None:
    """Raises InvalidRequest for known fields that this release does not support."""
    for name in names:
        value = getattr(request, name)
        if value is not None and value is not False and value not in ("", [], {}):
            raise InvalidRequest(f"{name} is not supported by this release; leave it out", field=name)


def check_logprob_token_ids(request: GenerationFields, num_top: int | None, name: str) -> None:
    """Raises InvalidRequest for named alternatives that cannot be returned. `num_top` is the value of the field `name`,
    or None.
    """
    token_ids = request.logprob_token_ids
    if not token_ids:
        return
    field = "logprob_token_ids"
    if num_top is None and not (isinstance(request, ChatCompletionRequest) and request.logprobs):
        raise InvalidRequest(f"{field} needs logprobs", field=field)
    if num_top and num_top != len(token_ids):
        message = f"{name} is {num_top}; with {field} it must equal their number, {len(token_ids)}, or be left out"
        raise InvalidRequest(message, field=name)


def _check_best_of(request: CompletionRequest, max_choices: int) -> None:
    best_of, n = request.best_of, request.n or 1
    if best_of is None:
        return
    if not n <= best_of <= max_choices:
        raise InvalidRequest(f"best_of is {best_of}; it must be from n, {n}, to {max_choices}", field="best_of")
    if best_of > n and request.stream:
        raise InvalidRequest("best_of above n is not allowed if stream is true", field="best_of")


def _check_logprobs(name: str, value: int, most: int) -> None:
    if value > most:
        raise InvalidRequest(f"{name} is {value}; at most {most} is allowed", field=name)


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
