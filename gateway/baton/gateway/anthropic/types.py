"""Anthropic's request and response bodies. One definition for parsing, encoding and the OpenAPI document.

Null means unset; unknown keys are listed in the response header x-baton-ignored. conversation.py and request.py check
what a schema cannot express.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from baton.gateway.schemas.foreign_fields import CHANGING, NO_EFFECT, REFUSED
from baton.gateway.schemas.requests import Count, CountOrZero, Name, Salt

Fraction = Annotated[float, Meta(ge=0, le=1)]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
CallId = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]+$")]


# Prompts are cached without it.
CacheControl = Annotated[dict[str, Any] | None, NO_EFFECT]


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl = None


class ImageBlock(Struct, kw_only=True, tag_field="type", tag="image"):
    source: dict[str, Any]
    cache_control: CacheControl = None


class DocumentBlock(Struct, kw_only=True, tag_field="type", tag="document"):
    """A document; its source is of type text or content."""

    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl = None


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The model's thinking in an earlier turn."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Thinking that only the service that created it can read."""

    data: str


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call of the model."""

    id: CallId
    # Any name, because a model may have invented it in an earlier response.
    name: Annotated[str, Meta(min_length=1)]
    input: dict[str, Any]
    cache_control: CacheControl = None


class ToolReferenceBlock(Struct, kw_only=True, tag_field="type", tag="tool_reference"):
    """A tool's name as a result."""

    tool_name: str


class ToolResultBlock(Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: CallId
    content: str | list[TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


Block = TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct, kw_only=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(Struct, kw_only=True):
    """A function that the model may call. Tools of other types are skipped and listed in x-baton-ignored."""

    TYPES: ClassVar = (b'"custom"', b"null")  # types for which these keys are known

    name: ToolName | None = None  # required for a function
    type: str | None = None  # custom or null
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl = None


class AutoChoice(Struct, kw_only=True, tag_field="type", tag="auto"):
    """The model decides whether to call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, kw_only=True, tag_field="type", tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class ToolChoice(Struct, kw_only=True, tag_field="type", tag="tool"):
    """The model must call this tool."""

    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoneChoice(Struct, kw_only=True, tag_field="type", tag="none"):
    """The model must not call tools."""


class ThinkingEnabled(Struct, kw_only=True, tag_field="type", tag="enabled"):
    """The model thinks first."""

    budget_tokens: Annotated[int, Meta(ge=1024)]


class ThinkingAdaptive(Struct, kw_only=True, tag_field="type", tag="adaptive"):
    """The model decides whether to think first."""


class ThinkingDisabled(Struct, kw_only=True, tag_field="type", tag="disabled"):
    """The model does not think first, if its template supports that."""


class MessageFormat(Struct, kw_only=True):
    """The form of the output."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """Options of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None


class CountTokensRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: Name
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoneChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Annotated[list[dict[str, Any]] | None, REFUSED] = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the model's chat template
    cache_control: CacheControl = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    CHANGING: ClassVar = CHANGING

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[Name] | None = None
    temperature: Fraction | None = None
    top_p: Fraction | None = None
    top_k: CountOrZero | None = None  # 0: disabled
    metadata: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    service_tier: Annotated[str | None, NO_EFFECT] = None
    container: Annotated[str | dict[str, Any] | None, NO_EFFECT] = None
    context_management: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    inference_geo: Annotated[str | None, NO_EFFECT] = None
    # Fields beyond Anthropic's API.
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower runs earlier
    cache_salt: Salt | None = None  # namespace of the prefix cache: requests with different salts share no cached block
    kv_transfer_params: Annotated[dict[str, Any] | None, REFUSED] = None
    ec_transfer_params: Annotated[dict[str, Any] | None, REFUSED] = None


class ThinkingTokens(Struct):
    """Thinking tokens among the output tokens."""

    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """Token counts. The prompt has input_tokens plus cache_read_input_tokens tokens."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0  # not computed because a worker held their KV
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None
    service_tier: str = "standard"


class Message(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]  # blocks: text, thinking, tool_use
    stop_reason: str | None
    stop_sequence: str | None  # the stop sequence that ended the output
    usage: MessageUsage


class StreamEvent(Struct, kw_only=True):
    """One event of a stream. Its `event:` line has the same type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class ContextManagement(Struct):
    """The effect of context management, which is not applied."""

    original_input_tokens: int


class TokenCount(Struct):
    """The response of count_tokens."""

    input_tokens: int
    context_management: ContextManagement


class AnthropicErrorFields(Struct):
    """The details of an error."""

    type: str
    message: str  # names the invalid field of the request


class AnthropicErrorResponse(Struct):
    """The body of every 4xx and 5xx response of Anthropic's API."""

    error: AnthropicErrorFields
    request_id: str | None
    type: Literal["error"] = "error"
