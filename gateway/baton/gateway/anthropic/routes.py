"""POST /v1/messages and /v1/messages/count_tokens: reads and validates requests."""

from __future__ import annotations

from functools import partial

import msgspec

from baton.gateway.anthropic.answers import MessageDocument, MessageStream
from baton.gateway.anthropic.request import FIELDS, check_version, counted_turn, ignored_of, turn_of
from baton.gateway.anthropic.types import (
    ContextManagement,
    CountTokensRequest,
    Message,
    MessagesRequest,
    StreamEvent,
    TokenCount,
)
from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ServedModel
from baton.gateway.rest.routing import Parameter, Route
from baton.gateway.serving.affinity import PLACING
from baton.gateway.serving.chat import ChatTurn, check_turn, encode_turn, fields_named, generation_of
from baton.gateway.serving.context import ServingContext

VERSION = Parameter("Anthropic-Version", "A date.", {"type": "string", "examples": ["2023-06-01"]}, place="header")
# Anthropic's clients append it to the paths of beta features.
BETA = Parameter("beta", "Accepted and ignored.", {"type": "boolean"})


class Messages:
    """Handles POST /v1/messages."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(MessagesRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        with serving.counting_rejections(), fields_named(FIELDS):
            check_version(exchange.headers)
            request, model, turn = await serving.bodies.run(
                partial(self._read, exchange), exchange.num_body_bytes, exchange.owner
            )
            request_id = serving.admit(exchange, turn.fields, 1)
            token_ids = await encode_turn(model, turn)
            generation = generation_of(serving, exchange, request_id, model, turn, token_ids)
        kind = MessageStream if request.stream else MessageDocument
        answer = kind(exchange, serving.meter(exchange, 1), model.name, len(token_ids), request.max_tokens)
        await answer.run(serving.admitted(exchange, serving.generator, [generation]), [generation])

    def _read(self, exchange: Exchange) -> tuple[MessagesRequest, ServedModel, ChatTurn]:
        request = self._decoder.read(exchange)
        exchange.ignore(ignored_of(request))
        turn = turn_of(request)
        model = self._serving.model(exchange, request.model)
        check_turn(model, turn)
        return request, model, turn


class CountTokens:
    """Handles POST /v1/messages/count_tokens."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(CountTokensRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        with fields_named(FIELDS):
            check_version(exchange.headers)
            model, turn = await self._serving.bodies.run(
                partial(self._read, exchange), exchange.num_body_bytes, exchange.owner
            )
            token_ids = await encode_turn(model, turn)
        count = TokenCount(len(token_ids), ContextManagement(len(token_ids)))
        exchange.respond(200, msgspec.json.encode(count))

    def _read(self, exchange: Exchange) -> tuple[ServedModel, ChatTurn]:
        request = self._decoder.read(exchange)
        exchange.ignore(ignored_of(request))
        turn = counted_turn(request)
        model = self._serving.model(exchange, request.model)
        check_turn(model, turn)
        return model, turn


def anthropic_routes(serving: ServingContext) -> list[Route]:
    """Returns the routes of Anthropic's API."""
    body = (400, 404, 408, 413)
    parameters = (VERSION, BETA)
    return [
        Route(
            "POST",
            "/v1/messages",
            Messages(serving),
            "Answers a conversation, as Anthropic's API does.",
            MessagesRequest,
            Message,
            StreamEvent,
            errors=(*body, 429, 504),
            parameters=(*parameters, *PLACING),
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            CountTokens(serving),
            "Counts a conversation's tokens.",
            CountTokensRequest,
            TokenCount,
            errors=body,
            parameters=parameters,
        ),
    ]
