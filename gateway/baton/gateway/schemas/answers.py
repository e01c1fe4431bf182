"""OpenAI's and vLLM's response bodies. One definition for encoding and the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int  # not computed because a worker held their KV


class CompletionTokensDetails(Struct):
    """Details of the output's tokens."""

    reasoning_tokens: int = 0  # 0 if no parser identifies reasoning


class Usage(Struct):
    """Token counts of a request, summed over its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)


class RequestMetrics(Struct, kw_only=True):
    """The times of a request, if the gateway gives them. Null without enough tokens."""

    time_to_first_token_ms: float | None
    generation_time_ms: float  # from the first token to the last
    queue_time_ms: float  # in a worker, before the request was computed
    mean_itl_ms: float | None
    tokens_per_second: float | None  # of all choices, from the first token to the last


class TopLogprob(Struct):
    """A candidate token at a position with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """An output token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry per token."""

    content: list[TokenLogprob]
    refusal: list[TokenLogprob] | None = None


class CalledFunction(Struct):
    """The called function."""

    name: str
    arguments: str  # JSON text as the model wrote it; may be invalid


class ToolCall(Struct, kw_only=True):
    """A tool call for the client to execute."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatAnswer(Struct):
    """The assistant's message."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    annotations: list[dict[str, Any]] = msgspec.field(default_factory=list)
    reasoning: str | UnsetType = UNSET  # the model's reasoning before the answer
    reasoning_content: str | UnsetType = UNSET  # the same under its older name
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET  # replaces tool_calls if the request has functions


class PromptLogprob(Struct):
    """A token at a position of a prompt."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str


# One entry per token, by token id as text; None for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(Struct, kw_only=True):
    """One choice."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None  # the matching stop string or stop token id
    token_ids: list[int] | UnsetType = UNSET  # if requested


class ChatCompletion(Struct, kw_only=True):
    """The complete response to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None = None
    system_fingerprint: str | None
    usage: Usage
    # Only if requested.
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    assistant_tokens_mask: list[int] | UnsetType = UNSET  # of the prompt: 1 for each token of the assistant
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class FunctionDelta(Struct, omit_defaults=True):
    """New output of a function call."""

    name: str | None = None  # in a call's first delta
    arguments: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    """New output of a tool call."""

    index: int
    id: str | None = None  # in a call's first delta
    type: Literal["function"] | None = None  # in a call's first delta
    function: FunctionDelta | None = None


class ChatDelta(Struct, omit_defaults=True):
    """New output of a choice."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChatChunkChoice(Struct, kw_only=True):
    """A piece of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET  # if requested


class ChatCompletionChunk(Struct, kw_only=True):
    """One event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | UnsetType = UNSET  # beside the usage
    # If requested, in the first chunk.
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    assistant_tokens_mask: list[int] | UnsetType = UNSET  # of the prompt: 1 for each token of the assistant


class CompletionLogprobs(Struct):
    """Columns with one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """One choice, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    # Only if requested.
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """The response to a text completion, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | UnsetType = UNSET


class ModelPermission(Struct, kw_only=True):
    """What clients may do with a model, in OpenAI's older form."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct, kw_only=True):
    """A model under one of its names; `root` is the first name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str
    parent: str | None = None
    permission: list[ModelPermission]
    max_model_len: int | None
    tool_call_parser: str  # "none": tool calls stay text
    reasoning_parser: str
    # What the model does, its main task first: generate; or embed, classify, token_embed, token_classify. Empty: no
    # worker has reported yet.
    tasks: list[str]


class ModelList(Struct):
    """GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(Struct, kw_only=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    assistant_tokens_mask: list[int] | UnsetType = UNSET  # 1 for each token of the assistant, if asked for


class DetokenizeResponse(Struct):
    """The text of tokens."""

    prompt: str


class Version(Struct):
    """GET /version."""

    version: str


class ServerLoad(Struct):
    """GET /load."""

    server_load: int  # number of running generations


class Readiness(Struct):
    """GET /ready."""

    ready: bool
    missing: list[str]  # descriptions


class ErrorFields(Struct):
    """The details of an error."""

    message: str
    type: str
    param: str | None  # the invalid field of the request
    code: str | None


class ErrorResponse(Struct):
    """The body of every 4xx and 5xx response."""

    error: ErrorFields
