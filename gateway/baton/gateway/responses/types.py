"""OpenAI's bodies of the Responses API. One definition for parsing, encoding and the OpenAPI document.

Null means unset; unknown keys are listed in the response header x-baton-ignored. items.py and request.py check what a
schema cannot express.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from baton.gateway.responses.known_keys import KnownItem, KnownTool
from baton.gateway.schemas.foreign_fields import REFUSED, ForeignFields, SessionName
from baton.gateway.schemas.requests import (
    Count,
    CountOrZero,
    ExtraArguments,
    Name,
    Penalty,
    PrintableId,
    RepetitionDetection,
    Salt,
    StructuredOutputs,
    TokenId,
)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(Struct, kw_only=True):
    """How much the model reasons."""

    effort: Effort | None = None
    summary: str | None = None  # reasoning is returned in full; there are no summaries


class TextFormat(Struct, kw_only=True):
    """The form of the text."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(ForeignFields, kw_only=True):
    """POST /v1/responses."""

    OBJECTS: ClassVar = {"input": KnownItem, "tools": KnownTool}

    input: str | list[dict[str, Any]]  # a text or a list of items
    model: str | None = None  # null: the only served model
    instructions: str | None = None
    max_output_tokens: Count | None = None  # null: up to the context's length
    max_tool_calls: Count | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None  # an id or an object with it; excludes previous_response_id
    background: bool | None = None
    store: bool | None = None  # null: true
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: CountOrZero | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    # function, custom, namespaces of functions, and mcp where servers are allowed; others are skipped and listed in
    # x-baton-ignored.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # null: true
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    prompt: Annotated[dict[str, Any] | None, REFUSED] = None
    service_tier: str | None = None
    user: SessionName | None = None
    safety_identifier: str | None = None
    prompt_cache_key: SessionName | None = None
    # Fields beyond OpenAI's API.
    include_reasoning: bool | None = None  # null: true
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[Name] | None = None  # empty texts are ignored
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: CountOrZero | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Salt | None = None
    request_id: PrintableId | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[Name], Meta(max_length=1024)] | None = None  # texts that the output must not contain
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: no limit
    kv_transfer_params: Annotated[dict[str, Any] | None, REFUSED] = None
    ec_transfer_params: Annotated[dict[str, Any] | None, REFUSED] = None
    vllm_xargs: ExtraArguments | None = None  # arguments of the workers' logits processors (plugins), by name
    previous_input_messages: Annotated[list[dict[str, Any]] | None, REFUSED] = None
    enable_response_messages: Annotated[bool | None, REFUSED] = None


class InputTokensDetails(Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """Details of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: str


class ConversationReference(Struct):
    """The conversation of a response."""

    id: str


class Response(Struct, kw_only=True):
    """A response: the request's fields and the output."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]  # items: reasoning, message, function_call
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationReference | None = None
    reasoning: ReasoningOptions
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    metadata: dict[str, str]


class ResponseStreamEvent(Struct, kw_only=True):
    """One event of a stream. Its `event:` line has the same type."""

    type: str
    sequence_number: int


class DeletedResponse(Struct):
    """The response to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Struct, kw_only=True):
    """A list of items of a response's input or of a conversation."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredResponse(Struct, kw_only=True):
    """The stored record of a response."""

    response: Response
    input: list[dict[str, Any]]  # the request's own items
    context: list[dict[str, Any]]  # earlier items, from previous responses
    events: list[str] | None = None  # the whole stream, if it can be streamed again
    tenant: str = ""  # the owner
    session: str = ""  # name of the session that the response belongs to; empty: stored by an earlier version
