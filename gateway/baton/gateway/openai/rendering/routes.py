"""The routes that turn texts into token ids and back, for routers and trainers that own the step between."""

from __future__ import annotations

from msgspec import Struct

from baton.gateway.openai.rendering.derender import DerenderChat, DerenderCompletion
from baton.gateway.openai.rendering.render import RenderChat, RenderCompletion
from baton.gateway.openai.rendering.types import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderedChatChunk,
    DerenderedCompletionChunk,
    RenderChatRequest,
)
from baton.gateway.openai.token_generate import TokenGenerateRequest
from baton.gateway.rest.routing import Handler, Route
from baton.gateway.schemas import answers
from baton.gateway.schemas.requests import CompletionRequest
from baton.gateway.serving.context import ServingContext

_ERRORS = (400, 404, 408, 413, 503)
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"


def rendering_routes(serving: ServingContext) -> list[Route]:
    """Returns the routes that render requests, and those that turn tokens into answers."""
    of_chat = "Returns the body of /inference/v1/generate that a chat stands for."
    of_text = "Returns a body of /inference/v1/generate for each prompt, as a list."
    to_chat = "Turns generated token ids into a chat's answer or, with stream, one event into a chunk."
    to_text = "Turns generated token ids into a completion or, with stream, one event into a chunk."
    return [
        _route(f"{_CHAT}/render", RenderChat(serving), of_chat, RenderChatRequest, TokenGenerateRequest),
        _route(f"{_COMPLETION}/render", RenderCompletion(serving), of_text, CompletionRequest, None),
        _route(
            f"{_CHAT}/derender",
            DerenderChat(serving),
            to_chat,
            DerenderChatRequest,
            answers.ChatCompletion,
            DerenderedChatChunk,
        ),
        _route(
            f"{_COMPLETION}/derender",
            DerenderCompletion(serving),
            to_text,
            DerenderCompletionRequest,
            answers.Completion,
            DerenderedCompletionChunk,
        ),
    ]


def _route(
    path: str,
    handler: Handler,
    summary: str,
    request: type[Struct],
    response: type[Struct] | None,
    other: type[Struct] | None = None,
) -> Route:
    return Route("POST", path, handler, summary, request, response, errors=_ERRORS, other_response=other)
