"""Every REST route of the gateway."""

from __future__ import annotations

from collections.abc import Callable

from baton.gateway.access.identity import Scope
from baton.gateway.anthropic.routes import anthropic_routes
from baton.gateway.batches.batch_routes import routes_without_store
from baton.gateway.batches.batching import Batching
from baton.gateway.console.routes import console_routes
from baton.gateway.openai.chat import ChatCompletions
from baton.gateway.openai.completions import Completions
from baton.gateway.openai.stored_chats.routes import stored_chat_routes
from baton.gateway.openai.stored_chats.store import ChatStore
from baton.gateway.openai.token_generate import token_routes
from baton.gateway.playground.routes import playground_routes
from baton.gateway.responses.conversation_routes import conversation_routes
from baton.gateway.responses.routes import responses_routes
from baton.gateway.responses.service import ResponseService
from baton.gateway.responses.store import ResponseStore
from baton.gateway.rest.resumption import Resumable
from baton.gateway.rest.routing import Route
from baton.gateway.routers.fleet_control import FleetControl
from baton.gateway.schemas import answers
from baton.gateway.schemas import requests as types
from baton.gateway.serving.context import ServingContext
from baton.gateway.system.admin import admin_routes
from baton.gateway.system.models import model_routes
from baton.gateway.system.openapi import ApiDescription, openapi_document
from baton.gateway.system.routes import Description, Status, Tokens

_BODY = (400, 404, 408, 413)
_GENERATION = (*_BODY, 429, 500, 503, 504)


def rest_routes(
    serving: ServingContext,
    store: ResponseStore,
    missing: Callable[[], list[str]],
    fleet: FleetControl | None = None,
    batching: Batching | None = None,
) -> list[Route]:
    """Returns all routes. `missing` describes what the gateway still needs before it can serve.

    `fleet` is what the admin routes operate on; without it there are none. Without `batching`, the routes of files and
    batches say so.
    """
    service = ResponseService(serving, store)
    responses = responses_routes(service, serving.config.strict_fields)
    chats = ChatStore(store.records, store.spawn)
    api = [
        *_api_routes(serving, chats),
        *model_routes(serving.catalog),
        *stored_chat_routes(chats, serving.catalog.primary_name, serving.bodies, serving.config.strict_fields),
        *token_routes(serving),
        *responses,
        *conversation_routes(service.conversations, serving.bodies, serving.config.strict_fields),
        *anthropic_routes(serving),
    ]
    strict = serving.config.strict_fields
    api += batching.routes(api, serving.bodies, strict) if batching is not None else routes_without_store()
    system = [*_system_routes(serving, missing), *(admin_routes(serving, fleet) if fleet is not None else ())]
    description = Description(lambda: openapi_document(routes))
    routes = [
        *api,
        *system,
        Route("GET", "/openapi.json", description.openapi, "This document.", response=ApiDescription, scope=None),
        Route("GET", "/docs", description.docs, "This API as a page for people.", content_type="text/html", scope=None),
    ]
    return [*routes, *playground_routes(not serving.config.no_playground), *console_routes(serving, fleet)]


def _api_routes(serving: ServingContext, chats: ChatStore) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/chat/completions",
            Resumable(ChatCompletions(serving, chats), serving.streams),
            "Answers a chat.",
            types.ChatCompletionRequest,
            answers.ChatCompletion,
            answers.ChatCompletionChunk,
            errors=_GENERATION,
        ),
        Route(
            "POST",
            "/v1/completions",
            Resumable(Completions(serving), serving.streams),
            "Continues texts.",
            types.CompletionRequest,
            answers.Completion,
            answers.Completion,
            errors=_GENERATION,
        ),
    ]


def _system_routes(serving: ServingContext, missing: Callable[[], list[str]]) -> list[Route]:
    config = serving.config
    tokens = Tokens(
        serving.catalog, serving.bodies, trust_templates=config.trust_request_chat_template, strict=config.strict_fields
    )
    status = Status(serving.metrics, missing, lambda: serving.admission.in_use)
    return [
        Route(
            "POST",
            "/tokenize",
            tokens.tokenize,
            "Tokenizes a text or a chat.",
            types.TokenizeRequest,
            answers.TokenizeResponse,
            errors=(*_BODY, 503),
        ),
        Route(
            "POST",
            "/detokenize",
            tokens.detokenize,
            "Turns token ids into text.",
            types.DetokenizeRequest,
            answers.DetokenizeResponse,
            errors=_BODY,
        ),
        Route("GET", "/health", status.health, "Returns 200 while the process is alive.", public=True, any_host=True),
        Route("GET", "/ping", status.health, "As /health.", public=True, any_host=True),
        Route("POST", "/ping", status.health, "As /health.", public=True, any_host=True),
        Route(
            "GET",
            "/load",
            status.load,
            "Returns the number of running generations.",
            response=answers.ServerLoad,
            scope=Scope.METRICS,
        ),
        Route(
            "GET",
            "/ready",
            status.ready,
            "Returns whether the gateway can serve a model.",
            response=answers.Readiness,
            errors=(503,),
            public=True,
            any_host=True,
        ),
        Route("GET", "/version", status.version, "Baton's version.", response=answers.Version, scope=None),
        Route(
            "GET", "/metrics", status.metrics, "Metrics for Prometheus.", content_type="text/plain", scope=Scope.METRICS
        ),
    ]
