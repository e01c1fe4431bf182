"""POST /v1/token_counts: the number of tokens of each of several texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.http.exchange import Exchange
from baton.gateway.rest.routing import Route
from baton.gateway.serving.context import ServingContext


class TokenCountsRequest(msgspec.Struct, kw_only=True):
    """A body of POST /v1/token_counts."""

    texts: list[str]
    model: str | None = None


class TokenCounts(msgspec.Struct):
    """The response: one count for each text."""

    counts: list[int]


class CountTokens:
    """Handles POST /v1/token_counts."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(TokenCountsRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        read = partial(self._decoder.read, exchange)
        request = await self._serving.bodies.run(read, exchange.num_body_bytes, exchange.owner)
        model = self._serving.model(exchange, request.model)
        counts = [len(await model.encode_text(text, add_special_tokens=False, whole=True)) for text in request.texts]
        exchange.respond(200, msgspec.json.encode(TokenCounts(counts)))


def routes(serving: ServingContext) -> Sequence[Route]:
    """Returns the routes of this plugin."""
    return [
        Route(
            "POST",
            "/v1/token_counts",
            CountTokens(serving),
            "Counts the tokens of several texts.",
            TokenCountsRequest,
            TokenCounts,
            errors=(400, 404, 408, 413),
        )
    ]
