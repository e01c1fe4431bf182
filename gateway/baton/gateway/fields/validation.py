"""Validates the fields of all generations beyond their JSON types. Pure functions; knows no model and no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.gateway.models.prompts.context_length import context_too_long
from baton.gateway.models.sampling import check_count
from baton.gateway.schemas.requests import (
    ChatCompletionRequest,
    GenerationFields,
    RepetitionDetection,
    ResponseFormat,
)
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_MAX_BIAS = 100.0
_MAX_VARIABLES = 256
_MAX_STOP_STRINGS = 1024  # the generator has its own, lower limit
_MAX_BAD_WORDS = 16 << 10
_MAX_BIASES = 256 << 10
_MAX_METADATA = 16
_MAX_METADATA_NAME = 64  # characters
_MAX_METADATA_VALUE = 512
_ALL = 2**31 - 1  # a limit of alternatives that allows the whole vocabulary
_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")

# Known fields that this release does not support. Neutral values are accepted.
_UNSERVED = ("kv_transfer_params", "ec_transfer_params")
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
    "vllm_xargs",
)
# Neutral values besides null, false and [].
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "logit_bias": ({},),
    "vllm_xargs": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "best_of": (1,),
    "thinking_token_budget": (-1,),
    "response_format": (ResponseFormat(type="text"),),
    "repetition_detection": (RepetitionDetection(),),
}


def check_for_model(request: GenerationFields, info: types_pb2.ModelInfo) -> None:
    """Raises InvalidRequest for lists longer than the vocabulary, before they are converted."""
    for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
        check_count(name, len(getattr(request, name) or ()), info.vocab_size)


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


def check_context(num_prompt_tokens: int, max_model_len: int, field: str) -> None:
    """Raises ContextTooLong if the context has no room for an output token."""
    if num_prompt_tokens >= max_model_len:
        raise context_too_long(num_prompt_tokens, max_model_len, field)


def check_fields(request: GenerationFields, max_choices: int, most_logprobs: int = 0) -> None:
    """Raises InvalidRequest for fields that no kind of generation supports."""
    if request.n is not None and request.n > max_choices:
        raise InvalidRequest(f"n is {request.n}; at most {max_choices} choices are allowed", field="n")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is allowed only if stream is true", field="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs is not allowed if stream is true", field="prompt_logprobs")
    if request.prompt_logprobs == -1:
        check_logprobs("prompt_logprobs", -1, most_logprobs)
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


def expand_logprobs(request: GenerationFields, vocab_size: int) -> None:
    """Replaces -1 by the size of the vocabulary, in place."""
    for name in _LOGPROBS:
        if getattr(request, name, None) == -1:
            setattr(request, name, vocab_size)


def check_logprob_token_ids(request: GenerationFields, num_top: int | None, name: str) -> None:
    """Raises InvalidRequest for named alternatives that cannot be returned.

    `num_top` is the value of the field `name`, or None.
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


def check_logprobs(name: str, value: int, most: int) -> None:
    """Raises InvalidRequest for more alternatives than are allowed. -1 asks for the whole vocabulary."""
    if value == -1 and most < _ALL:
        raise InvalidRequest(
            f"{name} is -1, the whole vocabulary; at most {most} is allowed (the gateway's --max-logprobs)", field=name
        )
    if value > most:
        raise InvalidRequest(f"{name} is {value}; at most {most} is allowed", field=name)
