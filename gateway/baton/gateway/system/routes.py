"""Routes that run no generation: tokens, health, metrics and the API's description."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cache, partial
from typing import Any

import msgspec
from msgspec import UNSET

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.fields.chat import check_chat_size, check_continued, check_messages, template_messages
from baton.gateway.fields.tools import tool_of
from baton.gateway.fields.unserved_tools import served_tools
from baton.gateway.fields.validation import check_template, check_variables
from baton.gateway.http.exchange import Exchange
from baton.gateway.metrics.gateway import GatewayMetrics
from baton.gateway.metrics.siblings import Siblings
from baton.gateway.models.served import ModelCatalog, ServedModel
from baton.gateway.rest.routing import Route
from baton.gateway.schemas.answers import DetokenizeResponse, Readiness, ServerLoad, TokenizeResponse, Version
from baton.gateway.schemas.requests import DetokenizeRequest, TokenizeRequest
from baton.gateway.serving.tenancy import allowed_model
from baton.gateway.system.docs_page import DOCS_PAGE
from baton.gateway.system.openapi import ApiDescription
from baton.gateway.version import VERSION
from baton.rpc.errors import InvalidRequest, ServiceError

_MASK = "return_assistant_tokens_mask"
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Tokens:
    """Handles POST /tokenize and /detokenize."""

    def __init__(
        self, catalog: ModelCatalog, bodies: BodyThread, *, trust_templates: bool = False, strict: bool = False
    ) -> None:
        self._catalog = catalog
        self._bodies = bodies
        self._trust_templates = trust_templates
        self._tokenize = BodyDecoder(TokenizeRequest, strict, bodies.reader)
        self._detokenize = BodyDecoder(DetokenizeRequest, strict, bodies.reader)

    async def tokenize(self, exchange: Exchange) -> None:
        """Handles POST /tokenize."""
        request, chat = await self._bodies.run(partial(self._read, exchange), exchange.num_body_bytes, exchange.owner)
        model = allowed_model(self._catalog, exchange.identity, request.model)
        mask: list[int] | None = [] if request.return_assistant_tokens_mask else None
        token_ids = await _encode(model, request, chat, mask)
        names = await model.tokenizer.token_names(token_ids) if request.return_token_strs else None
        response = TokenizeResponse(
            count=len(token_ids),
            max_model_len=model.require_info().max_model_len,
            tokens=token_ids,
            token_strs=names,
            assistant_tokens_mask=UNSET if mask is None else mask,
        )
        exchange.respond(200, msgspec.json.encode(response))

    async def detokenize(self, exchange: Exchange) -> None:
        """Handles POST /detokenize."""
        request, model = await self._bodies.run(
            partial(self._read_ids, exchange), exchange.num_body_bytes, exchange.owner
        )
        try:
            text = await model.tokenizer.decode_async(request.tokens)
        except ServiceError as error:
            error.field = "tokens"
            raise
        exchange.respond(200, msgspec.json.encode(DetokenizeResponse(text)))

    def _read(self, exchange: Exchange) -> tuple[TokenizeRequest, list[dict[str, Any]]]:
        """Returns the request, and its chat in the form that the template expects."""
        request = self._tokenize.read(exchange)
        request.tools, skipped = served_tools(request.tools)
        exchange.ignore(skipped)
        check_template(request.chat_template, self._trust_templates)
        model = allowed_model(self._catalog, exchange.identity, request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if request.messages is None and request.return_assistant_tokens_mask:
            raise InvalidRequest("only chats have an assistant's tokens; give messages", field=_MASK)
        if request.messages is None:
            return request, []
        check_messages(request.messages)
        check_variables(request.chat_template_kwargs)
        check_chat_size(request.messages, model.require_info().max_model_len, len(request.tools or ()))
        if request.continue_final_message:
            check_continued(request.messages[-1].role)
        return request, template_messages(request.messages)

    def _read_ids(self, exchange: Exchange) -> tuple[DetokenizeRequest, ServedModel]:
        request = self._detokenize.read(exchange)
        model = allowed_model(self._catalog, exchange.identity, request.model)
        model.check_token_ids(request.tokens, "tokens")
        return request, model


class Status:
    """Handles GET /health, /ready, /load, /version and /metrics."""

    def __init__(
        self, metrics: GatewayMetrics, missing: Callable[[], list[str]], num_running: Callable[[], int]
    ) -> None:
        self._metrics = metrics
        self._num_running = num_running
        self._missing = missing

    def health(self, exchange: Exchange) -> None:
        """Handles GET /health."""
        exchange.respond(200)

    def ready(self, exchange: Exchange) -> None:
        """Handles GET /ready: responds 503 with what is missing if the gateway cannot serve."""
        missing = self._missing()
        body = msgspec.json.encode(Readiness(ready=not missing, missing=missing))
        exchange.respond(503 if missing else 200, body, headers={"retry-after": "1"} if missing else None)

    def load(self, exchange: Exchange) -> None:
        """Handles GET /load."""
        exchange.respond(200, msgspec.json.encode(ServerLoad(self._num_running())))

    def version(self, exchange: Exchange) -> None:
        """Handles GET /version."""
        exchange.respond(200, msgspec.json.encode(Version(VERSION)))

    def metrics(self, exchange: Exchange) -> Coroutine[None, None, None] | None:
        """Handles GET /metrics, for all processes of this gateway."""
        siblings = self._metrics.siblings
        if siblings is not None:
            return _respond_for_all(exchange, siblings)
        exchange.respond(200, self._metrics.exposition(), _EXPOSITION)
        return None


async def _respond_for_all(exchange: Exchange, siblings: Siblings) -> None:
    exchange.respond(200, await siblings.exposition(), _EXPOSITION)


class Description:
    """Handles GET /openapi.json, /docs and /redoc."""

    def __init__(self, document: Callable[[], bytes]) -> None:
        self._document = cache(document)

    def openapi(self, exchange: Exchange) -> None:
        """Handles GET /openapi.json."""
        exchange.respond(200, self._document())

    def docs(self, exchange: Exchange) -> None:
        """Handles GET /docs."""
        headers = {"content-security-policy": "default-src 'self' 'unsafe-inline'"}
        exchange.respond(200, DOCS_PAGE, "text/html; charset=utf-8", headers=headers)


def description_routes(document: Callable[[], bytes]) -> list[Route]:
    """Returns the routes of the API's description, which is made when it is first asked for."""
    description = Description(document)
    page = "This API as a page for people."
    return [
        Route("GET", "/openapi.json", description.openapi, "This document.", response=ApiDescription, scope=None),
        Route("GET", "/docs", description.docs, page, content_type="text/html", scope=None),
        Route("GET", "/redoc", description.docs, "As /docs.", content_type="text/html", scope=None),
    ]


async def _encode(
    model: ServedModel, request: TokenizeRequest, chat: list[dict[str, Any]], mask: list[int] | None
) -> list[int]:
    if request.prompt is not None:
        add_special_tokens = request.add_special_tokens is not False
        return await model.encode_text(request.prompt, add_special_tokens=add_special_tokens, whole=True)
    continues_last = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt
    return await model.encode_chat(
        chat,
        add_generation_prompt=not continues_last if add_prompt is None else add_prompt,
        continue_final_message=continues_last,
        tools=[tool_of(definition).for_template() for definition in request.tools] if request.tools else None,
        variables=request.chat_template_kwargs,
        template=request.chat_template,
        add_special_tokens=bool(request.add_special_tokens),
        whole=True,
        mask=mask,
    )
