"""POST /abort_requests: ends running requests of the client's tenant by their ids."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.http.exchange import Exchange
from baton.gateway.rest.routing import Route
from baton.gateway.schemas.requests import PrintableId
from baton.gateway.serving.context import ServingContext
from baton.gateway.serving.running_requests import MOST_IDS


class AbortRequest(Struct, kw_only=True):
    """POST /abort_requests. Ids that do not run here are ignored."""

    request_ids: Annotated[list[PrintableId], Meta(max_length=MOST_IDS)]  # X-Request-Id, request_id, or an answer's id


class AbortAnswer(Struct):
    """How many requests were ended."""

    num_aborted: int


def abort_routes(serving: ServingContext) -> list[Route]:
    """Returns the route."""
    decoder = BodyDecoder(AbortRequest, serving.config.strict_fields, serving.bodies.reader)

    def handle(exchange: Exchange) -> None:
        request = decoder.read(exchange)
        num_aborted = serving.running.cancel(exchange.identity.tenant.name, request.request_ids)
        exchange.respond(200, msgspec.json.encode(AbortAnswer(num_aborted)))

    summary = "Ends running requests of the same tenant: their choices get the finish reason abort."
    return [
        Route("POST", "/abort_requests", handle, summary, AbortRequest, AbortAnswer, errors=(400, 408, 413)),
    ]
