"""Every REST route of the gateway."""

from __future__ import annotations

from collections.abc import Callable

from baton.gateway.access.identity import Scope
from baton.gateway.anthropic.routes import anthropic_routes
from baton.gateway.batches.batch_routes import routes_without_store
from baton.gateway.batches.batching import Batching
from baton.gateway.console.routes import console_routes
from baton.gateway.openai.batched_chat import batched_chat_routes
from baton.gateway.openai.chat import ChatCompletions
from baton.gateway.openai.completions import Completions
from baton.gateway.openai.rendering.routes import rendering_routes
from baton.gateway.openai.stored_chats.routes import stored_chat_routes
from baton.gateway.openai.stored_chats.store import ChatStore
from baton.gateway.openai.token_generate import token_routes
from baton.gateway.playground.routes import playground_routes
from baton.gateway.pooling.routes import pooling_routes
from baton.gateway.responses.conversation_routes import conversation_routes
from baton.gateway.responses.routes import responses_routes
from baton.gateway.responses.service import ResponseService
from baton.gateway.responses.store import ResponseStore
from baton.gateway.rest.resumption import Resumable
from baton.gateway.rest.routing import Route
from baton.gateway.routers.fleet_control import FleetControl
from baton.gateway.schemas import answers
from baton.gateway.schemas import requests as types
from baton.gateway.serving.affinity import PLACING
from baton.gateway.serving.context import ServingContext
from baton.gateway.serving.resolved_routes import resolved_routes
from baton.gateway.system.aborts import abort_routes
from baton.gateway.system.adapters import adapter_routes
from baton.gateway.system.admin import admin_routes
from baton.gateway.system.invocations import invocation_routes
from baton.gateway.system.models import model_routes
from baton.gateway.system.openapi import openapi_document
from baton.gateway.system.plugin_routes import plugin_routes
from baton.gateway.system.routes import Status, Tokens, description_routes
from baton.gateway.system.server_info import server_info_routes
from baton.gateway.system.tokenizer_info import tokenizer_info_routes
from baton.plugins.plugins import NO_PLUGINS, Plugins

_BODY = (400, 404, 408, 413)
_GENERATION = (*_BODY, 429, 500, 503, 504)


def rest_routes(
    serving: ServingContext,
    store: ResponseStore,
    missing: Callable[[], list[str]],
    fleet: FleetControl | None = None,
    batching: Batching | None = None,
    plugins: Plugins = NO_PLUGINS,
) -> list[Route]:
    """Returns all routes. `missing` describes what the gateway still needs before it can serve.

    `fleet` is what the admin routes operate on; without it there are none. Without `batching`, the routes of files and
    batches say so. `plugins` may add routes.
    """
    config = serving.config
    api = [*model_routes(serving.catalog), *token_routes(serving), *abort_routes(serving)]
    if not config.tokens_only:
        api += _text_routes(serving, store)
    api = resolved_routes(api, serving)
    if not config.tokens_only:
        strict = config.strict_fields
        api += batching.routes(api, serving.bodies, strict) if batching is not None else routes_without_store()
    api += invocation_routes(serving, api)
    system = [
        *_system_routes(serving, missing),
        *server_info_routes(serving),
        *(tokenizer_info_routes(serving.catalog) if config.enable_tokenizer_info_endpoint else ()),
        *(admin_routes(serving, fleet) if fleet is not None else ()),
        *(adapter_routes(serving, fleet) if fleet is not None else ()),
    ]
    routes = [*api, *system]
    if not config.no_docs:
        routes += description_routes(lambda: openapi_document(described))
    described = list(routes)
    routes += [*playground_routes(not (config.no_playground or config.tokens_only)), *console_routes(serving, fleet)]
    added = plugin_routes(plugins, serving, routes)
    described += added
    return [*routes, *added]


def _text_routes(serving: ServingContext, store: ResponseStore) -> list[Route]:
    strict = serving.config.strict_fields
    service = ResponseService(serving, store)
    chats = ChatStore(store.records, store.spawn)
    return [
        *_api_routes(serving, chats),
        *_tokenization_routes(serving),
        *batched_chat_routes(serving),
        *rendering_routes(serving),
        *stored_chat_routes(chats, serving.catalog.primary_name, serving.bodies, strict),
        *responses_routes(service, strict),
        *conversation_routes(service.conversations, serving.bodies, strict),
        *pooling_routes(serving),
        *anthropic_routes(serving),
    ]


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
            parameters=PLACING,
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
            parameters=PLACING,
        ),
    ]


def _tokenization_routes(serving: ServingContext) -> list[Route]:
    config = serving.config
    tokens = Tokens(
        serving.catalog, serving.bodies, trust_templates=config.trust_request_chat_template, strict=config.strict_fields
    )
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
    ]


def _system_routes(serving: ServingContext, missing: Callable[[], list[str]]) -> list[Route]:
    status = Status(serving.metrics, missing, lambda: serving.admission.in_use)
    return [
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
