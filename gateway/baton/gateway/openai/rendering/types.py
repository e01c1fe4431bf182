"""Bodies of the routes that turn generated token ids into answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from baton.gateway.openai.token_generate import TokenGeneration
from baton.gateway.schemas.requests import ChatCompletionRequest, CompletionRequest, CountOrZero


class DerenderChatRequest(Struct, kw_only=True):
    """POST /v1/chat/completions/derender."""

    model: str
    generate_response: TokenGeneration
    prompt_tokens: CountOrZero | None = None  # for the usage; null: those of chat_request, or 0
    # The rendered chat: reasoning and tool calls are parsed as for it. Null: all text is the answer.
    chat_request: ChatCompletionRequest | None = None
    stream: bool | None = None  # true is not supported


class DerenderCompletionRequest(Struct, kw_only=True):
    """POST /v1/completions/derender: one response for each rendered prompt."""

    model: str
    generate_responses: Annotated[list[TokenGeneration], Meta(min_length=1)]
    prompt_tokens: list[CountOrZero] | None = None  # for the usage, one for each response
    completion_request: CompletionRequest | None = None
    stream: bool | None = None  # true is not supported
