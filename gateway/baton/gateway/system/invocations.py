"""POST /invocations: SageMaker's route, which takes the bodies of others and tells them apart by their fields."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from baton.gateway.http.exchange import Exchange
from baton.gateway.rest.routing import Handler, Route
from baton.gateway.serving.affinity import PLACING
from baton.gateway.serving.context import ServingContext
from baton.rpc.errors import InvalidRequest

# The route of a body by the first of these fields that it has; of several routes the first that is served.
_ROUTES: Mapping[str, Sequence[str]] = {
    "messages": ("/v1/chat/completions",),
    "prompt": ("/v1/completions",),
    "token_ids": ("/inference/v1/generate",),
    "documents": ("/rerank",),
    "text_1": ("/score",),
    "input": ("/v1/embeddings", "/v1/responses"),
}


class Invocation(Struct, kw_only=True):
    """The body of another route: of chats (messages), completions (prompt), token ids (token_ids), and so on."""

    messages: Any = None
    prompt: Any = None
    token_ids: Any = None
    input: Any = None


class InvocationAnswer(Struct):
    """The answer of the route that the body belongs to."""


def invocation_routes(serving: ServingContext, routes: Sequence[Route]) -> list[Route]:
    """Returns the route. `routes` are those that it may call."""
    handlers = {route.path: route.handler for route in routes if route.method == "POST"}
    served = {
        field: handlers[next(path for path in paths if path in handlers)]
        for field, paths in _ROUTES.items()
        if any(path in handlers for path in paths)
    }

    async def handle(exchange: Exchange) -> None:
        read = partial(_handler_of, exchange, served)
        handler = await serving.bodies.run(read, exchange.num_body_bytes, exchange.owner)
        work: Coroutine[None, None, None] | None = handler(exchange)
        if work is not None:
            await work

    return [
        Route(
            "POST",
            "/invocations",
            handle,
            "As the route that the body belongs to, by its fields.",
            Invocation,
            InvocationAnswer,
            InvocationAnswer,
            errors=(400, 404, 408, 413, 429, 500, 503, 504),
            parameters=PLACING,
        )
    ]


def _handler_of(exchange: Exchange, served: Mapping[str, Handler]) -> Handler:
    try:
        body = msgspec.json.decode(b"".join(exchange.pieces), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a JSON object: {error}") from None
    for field, handler in served.items():
        if field in body:
            return handler
    raise InvalidRequest(f"the body belongs to no route; give one of the fields {', '.join(served)}")
