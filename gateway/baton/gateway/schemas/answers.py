"""OpenAI's and vLLM's answers. One definition for encoding and the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Of the prompt's tokens."""

    cached_tokens: int  # not computed, because a worker held their KV


class CompletionTokensDetails(Struct):
    """Of the output's tokens."""

    reasoning_tokens: int = 0  # 0 where no parser tells them


class Usage(Struct):
    """Token counts of a request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)


class TopLogprob(Struct):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """An output token's log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: list[TokenLogprob] | None = None


class CalledFunction(Struct):
    """What is called."""

    name: str
    arguments: str  # JSON text, as the model wrote it: it may be broken


class ToolCall(Struct, kw_only=True):
    """A call that the client is to make."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatAnswer(Struct):
    """The assistant's message."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    annotations: list[dict[str, Any]] = msgspec.field(default_factory=list)
    reasoning: str | UnsetType = UNSET  # what the model thought before it answered
    reasoning_content: str | UnsetType = UNSET  # the same, by its older name
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET  # instead, where the request has functions


class PromptLogprob(Struct):
    """One token at one place of a prompt."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str


# One entry a token, by token id as text; none for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(Struct, kw_only=True):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None  # the stop string or stop token id that matched
    token_ids: list[int] | UnsetType = UNSET  # where asked for


class ChatCompletion(Struct, kw_only=True):
    """The answer to a chat, whole."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None = None
    system_fingerprint: str | None
    usage: Usage
    # Only where asked for.
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct, omit_defaults=True):
    """What is new of a called function."""

    name: str | None = None  # in a call's first delta
    arguments: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    """What is new of a call."""

    index: int
    id: str | None = None  # in a call's first delta
    type: Literal["function"] | None = None  # in a call's first delta
    function: FunctionDelta | None = None


class ChatDelta(Struct, omit_defaults=True):
    """What is new of a choice."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChatChunkChoice(Struct, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET  # where asked for


class ChatCompletionChunk(Struct, kw_only=True):
    """One event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    # Where asked for, in the first chunk.
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """Columns, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """One continuation, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    # Only where asked for.
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """The answer to a text completion; in a stream, one event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(Struct, kw_only=True):
    """A model that can be asked for, by one of its names; `root` is the first of them."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str
    parent: str | None = None
    permission: list[dict[str, str]] = msgspec.field(default_factory=list)  # none: clients expect the list
    max_model_len: int | None


class ModelList(Struct):
    """GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(Struct, kw_only=True):
    """A prompt's tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(Struct):
    """The tokens' text."""

    prompt: str


class Version(Struct):
    """GET /version."""

    version: str


class ServerLoad(Struct):
    """GET /load."""

    server_load: int  # generations in flight


class Readiness(Struct):
    """GET /ready."""

    ready: bool
    missing: list[str]  # in words


class ErrorFields(Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None  # the request's field that is wrong
    code: str | None


class ErrorResponse(Struct):
    """The body of every 4xx and 5xx answer."""

    error: ErrorFields
