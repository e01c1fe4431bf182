"""Bodies of the routes that turn texts into token ids, and generated token ids into answers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton.gateway.openai.token_generate import TokenGeneration
from baton.gateway.schemas.answers import ChatCompletionChunk, Completion
from baton.gateway.schemas.requests import ChatCompletionRequest, CompletionRequest, CountOrZero, TokenId


class RenderChatRequest(ChatCompletionRequest, kw_only=True):
    """POST /v1/chat/completions/render: a chat."""


class DerenderState(Struct, kw_only=True):
    """What a client keeps between two events of one choice's stream, as it was returned."""

    output_token_ids: list[TokenId] = msgspec.field(default_factory=list)  # so far
    role_sent: bool = False
    created: CountOrZero = 0  # Unix seconds of the first chunk


class DerenderChatRequest(Struct, kw_only=True):
    """POST /v1/chat/completions/derender: a response or, with `stream`, one event of it."""

    model: str
    generate_response: TokenGeneration | None = None  # required without stream
    generate_chunk: TokenGeneration | None = None  # required with stream
    stream_state: DerenderState | None = None  # of the chunk before; null: it is the first
    prompt_tokens: CountOrZero | None = None  # for the usage; null: those of chat_request, or 0
    prompt_token_ids: list[TokenId] | None = None  # null: chat_request is rendered again
    # The rendered chat: reasoning and tool calls are parsed as for it. Null: all text is the answer.
    chat_request: RenderChatRequest | None = None
    stream: bool | None = None


class DerenderCompletionRequest(Struct, kw_only=True):
    """POST /v1/completions/derender: one response for each rendered prompt or, with `stream`, one event."""

    model: str
    generate_responses: Annotated[list[TokenGeneration], Meta(min_length=1)] | None = None  # required without stream
    generate_chunk: TokenGeneration | None = None  # required with stream
    stream_state: DerenderState | None = None  # of the chunk before; null: it is the first
    prompt_tokens: list[CountOrZero] | CountOrZero | None = None  # for the usage: of each response, or of the event
    completion_request: CompletionRequest | None = None
    stream: bool | None = None


class DerenderedChatChunk(Struct, kw_only=True):
    """The response to one event."""

    chunk: ChatCompletionChunk
    stream_state: DerenderState  # for the next event


class DerenderedCompletionChunk(Struct, kw_only=True):
    """The response to one event."""

    chunk: Completion
    stream_state: DerenderState  # for the next event
