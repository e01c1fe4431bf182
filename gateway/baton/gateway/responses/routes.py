"""POST, GET, DELETE and cancel of /v1/responses: reads and validates requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from urllib.parse import parse_qs

import msgspec

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.http.exchange import Exchange
from baton.gateway.responses.followers import DocumentFollower, StreamFollower
from baton.gateway.responses.items import Item
from baton.gateway.responses.pages import DEFAULT_PAGE, MAX_PAGE, page_of
from baton.gateway.responses.running import RunningResponse
from baton.gateway.responses.service import ResponseService
from baton.gateway.responses.types import (
    DeletedResponse,
    ItemList,
    Response,
    ResponsesRequest,
    ResponseStreamEvent,
)
from baton.gateway.rest.routing import INCLUDE, Parameter, Route
from baton.gateway.rest.sse import CONTENT_TYPE
from baton.gateway.serving.affinity import PLACING
from baton.rpc.errors import InvalidRequest

PATH = "/v1/responses"

_STREAM = Parameter("stream", "Streams the events of a background response from its beginning.", {"type": "boolean"})
_STARTING_AFTER = Parameter(
    "starting_after",
    "The sequence number before the first event to send.",
    {"type": "integer", "minimum": -1, "maximum": 2**31},
)
_LIMIT = Parameter(
    "limit", "Items per page.", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE}
)
_ORDER = Parameter("order", "Order by time.", {"enum": ["asc", "desc"], "default": "desc"})
_AFTER = Parameter("after", "The id of the item before the page. Empty: the first page.", {"type": "string"})
_INCLUDE_OBFUSCATION = Parameter("include_obfuscation", "Accepted and ignored.", {"type": "boolean"}, ignored=True)
PAGE = (_LIMIT, _ORDER, _AFTER, INCLUDE)
_IDS = "resp_[^/]+"


class Responses:
    """Handles the routes of responses."""

    def __init__(self, service: ResponseService, strict: bool) -> None:
        self._service = service
        self._decoder = BodyDecoder(ResponsesRequest, strict, service.bodies.reader)

    async def create(self, exchange: Exchange) -> None:
        """Handles POST /v1/responses."""
        with self._service.counting_rejections():
            request = await self._service.bodies.run(
                partial(self._read, exchange), exchange.num_body_bytes, exchange.owner
            )
        begun = await self._service.begin(exchange, request)
        running = begun.running
        waits = not request.background or request.stream
        if waits:
            running.follow((StreamFollower if request.stream else DocumentFollower)(exchange, running))
        await self._service.start(exchange, begun)
        if waits:
            return
        if running.error is not None:
            exchange.fail(running.error)
        else:
            exchange.respond(200, msgspec.json.encode(running.response))

    def _read(self, exchange: Exchange) -> ResponsesRequest:
        request = self._decoder.read(exchange)
        exchange.ignore(self._service.ignored_of(request))
        return request

    async def get(self, exchange: Exchange) -> None:
        """Handles GET /v1/responses/{response_id}."""
        query = parse_qs(exchange.query)
        stored = await self._service.find(exchange.identity, _id_of(exchange))
        if query.get("stream", ["false"])[-1].lower() not in ("true", "1"):
            exchange.respond(200, msgspec.json.encode(stored.response))
            return
        first = _number(query, "starting_after", -1, -1, 2**31) + 1
        source = self._service.events_of(stored, "stream")
        if isinstance(source, RunningResponse):
            source.follow(StreamFollower(exchange, source, first))
        else:
            exchange.stream(CONTENT_TYPE)
            exchange.end("".join(source[first:]).encode())

    async def delete(self, exchange: Exchange) -> None:
        """Handles DELETE /v1/responses/{response_id}."""
        response_id = _id_of(exchange)
        await self._service.delete(exchange.identity, response_id)
        exchange.respond(200, msgspec.json.encode(DeletedResponse(response_id)))

    async def cancel(self, exchange: Exchange) -> None:
        """Handles POST /v1/responses/{response_id}/cancel."""
        stored = await self._service.cancel(exchange.identity, _id_of(exchange))
        exchange.respond(200, msgspec.json.encode(stored.response))

    async def list_input(self, exchange: Exchange) -> None:
        """Handles GET /v1/responses/{response_id}/input_items."""
        query = parse_qs(exchange.query)
        stored = await self._service.find(exchange.identity, _id_of(exchange))
        exchange.respond(200, msgspec.json.encode(page_asked([*stored.context, *stored.input], query)))


def page_asked(items: Sequence[Item], query: dict[str, list[str]]) -> ItemList:
    """Returns the page of items that the query requests. Raises InvalidRequest."""
    limit = _number(query, "limit", DEFAULT_PAGE, 1, MAX_PAGE)
    return page_of(items, limit, query.get("order", ["desc"])[-1], query.get("after", [""])[-1])


def responses_routes(service: ResponseService, strict: bool = False) -> list[Route]:
    """Returns the routes of the Responses API."""
    handlers = Responses(service, strict)
    one = f"{PATH}/{{response_id}}"
    errors = (400, 404, 503)
    return [
        Route(
            "POST",
            PATH,
            handlers.create,
            "Answers a conversation and stores the response.",
            ResponsesRequest,
            Response,
            ResponseStreamEvent,
            errors=(400, 404, 408, 413, 424, 429, 500, 503, 504),
            parameters=PLACING,
        ),
        Route(
            "GET",
            one,
            handlers.get,
            "Returns a response.",
            response=Response,
            chunk=ResponseStreamEvent,
            errors=errors,
            parameters=(_STREAM, _STARTING_AFTER, INCLUDE, _INCLUDE_OBFUSCATION),
            ids=_IDS,
        ),
        Route("DELETE", one, handlers.delete, "Deletes a response.", response=DeletedResponse, errors=errors, ids=_IDS),
        Route(
            "POST",
            f"{one}/cancel",
            handlers.cancel,
            "Cancels a background response.",
            response=Response,
            errors=errors,
            ids=_IDS,
        ),
        Route(
            "GET",
            f"{one}/input_items",
            handlers.list_input,
            "Lists a response's input items.",
            response=ItemList,
            errors=errors,
            parameters=PAGE,
            ids=_IDS,
        ),
    ]


def _id_of(exchange: Exchange) -> str:
    return exchange.path.removeprefix(f"{PATH}/").partition("/")[0]


def _number(query: dict[str, list[str]], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name, [str(default)])[-1]
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {text!r}; it must be a number from {low} to {high}", field=name)
    return value
