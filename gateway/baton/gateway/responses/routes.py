"""POST, GET, DELETE and cancel of /v1/responses: the requests' way in."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import parse_qs

import msgspec

from baton.gateway.error_body import ContextTooLong
from baton.gateway.front_desk import FrontDesk
from baton.gateway.http_exchange import Exchange
from baton.gateway.request_body import BodyDecoder
from baton.gateway.responses.followers import DocumentFollower, StreamFollower
from baton.gateway.responses.items import Item, input_items, new_item_id
from baton.gateway.responses.output import OutputItems
from baton.gateway.responses.running import RunningResponse
from baton.gateway.responses.shelf import ResponseShelf
from baton.gateway.responses.turns import FIELDS, check_request, new_response, turn_of
from baton.gateway.responses.types import (
    DeletedResponse,
    ItemList,
    Response,
    ResponsesRequest,
    ResponseStreamEvent,
    StoredResponse,
)
from baton.gateway.routes import Parameter, Route
from baton.gateway.served_model import ServedModel
from baton.gateway.sse import CONTENT_TYPE
from baton.gateway.turn import Turn, encode_turn, fields_named, generation_of
from baton.rpc.errors import InvalidRequest, NotFound

PATH = "/v1/responses"

_FINAL = ("completed", "incomplete", "failed", "cancelled")
_MAX_PAGE = 100
_DEFAULT_PAGE = 20

_STREAM = Parameter("stream", "The events of a response of the background, from its beginning.", {"type": "boolean"})
_STARTING_AFTER = Parameter(
    "starting_after",
    "The sequence number before the first event.",
    {"type": "integer", "minimum": -1, "maximum": 2**31},
)
_LIMIT = Parameter(
    "limit", "Items of one page.", {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE, "default": _DEFAULT_PAGE}
)
_ORDER = Parameter("order", "By time.", {"enum": ["asc", "desc"], "default": "desc"})
_AFTER = Parameter("after", "The id of the item before the page. Empty: none.", {"type": "string"})


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that can run."""

    request: ResponsesRequest
    model: ServedModel
    turn: Turn
    token_ids: list[int]
    items: Sequence[Item]
    context: Sequence[Item]


class Responses:
    """The handlers."""

    def __init__(self, desk: FrontDesk, shelf: ResponseShelf) -> None:
        self._desk = desk
        self._shelf = shelf
        self._decoder = BodyDecoder(ResponsesRequest)

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/responses."""
        desk = self._desk
        with desk.refusals_counted():
            request = self._decoder.decode(exchange.body, exchange.headers)
            check_request(request, desk.config.max_logprobs)
            if request.request_id:
                exchange.request_id = request.request_id
            ticket = desk.admission.admit(exchange.request_id, 1)
            try:
                with fields_named(FIELDS):
                    prepared = await self._prepare(exchange, request)
                running = self._running(exchange, prepared, ticket.end)
                await self._start(exchange, running, prepared, ticket.request_id)
            except BaseException:
                ticket.end()
                raise

    async def get(self, exchange: Exchange) -> None:
        """GET /v1/responses/{response_id}."""
        query = parse_qs(exchange.query)
        response_id = _id_of(exchange)
        stored = await self._own(exchange, response_id, "response_id")
        if query.get("stream", ["false"])[-1].lower() not in ("true", "1"):
            exchange.respond(200, msgspec.json.encode(stored.response))
            return
        first = _number(query, "starting_after", -1, -1, 2**31) + 1
        running = self._shelf.running(response_id)
        if running is not None and not running.num_forgotten:
            running.follow(StreamFollower(exchange, running, first))
        elif stored.events is not None:
            exchange.stream(CONTENT_TYPE)
            exchange.end("".join(stored.events[first:]).encode())
        elif stored.response.status in _FINAL:
            raise InvalidRequest(
                "stream: only responses that were created with background and stream can be streamed again.",
                field="stream",
            )
        else:
            raise InvalidRequest(
                "stream: another gateway makes this response; ask for it without stream.", field="stream"
            )

    async def delete(self, exchange: Exchange) -> None:
        """DELETE /v1/responses/{response_id}."""
        response_id = _id_of(exchange)
        await self._own(exchange, response_id, "response_id")
        await self._shelf.delete(response_id)
        exchange.respond(200, msgspec.json.encode(DeletedResponse(response_id)))

    async def cancel(self, exchange: Exchange) -> None:
        """POST /v1/responses/{response_id}/cancel."""
        response_id = _id_of(exchange)
        stored = await self._own(exchange, response_id, "response_id")
        if not stored.response.background:
            raise InvalidRequest("Only responses that are made in the background can be cancelled.", field="background")
        stored = await self._shelf.cancel(response_id)
        exchange.respond(200, msgspec.json.encode(stored.response))

    async def list_input(self, exchange: Exchange) -> None:
        """GET /v1/responses/{response_id}/input_items."""
        query = parse_qs(exchange.query)
        stored = await self._own(exchange, _id_of(exchange), "response_id")
        exchange.respond(200, msgspec.json.encode(_page(stored, query)))

    async def _own(self, exchange: Exchange, response_id: str, field: str) -> StoredResponse:
        """A response of the client's tenant; those of others are as if they were not there. Raises NotFound."""
        stored = await self._shelf.get(response_id, field)
        if stored.tenant != exchange.identity.tenant.name:
            raise NotFound(f"Response with id '{response_id}' not found.", field=field)
        return stored

    async def _prepare(self, exchange: Exchange, request: ResponsesRequest) -> _Prepared:
        model = self._desk.model(exchange, request.model)
        items: Sequence[Item] = input_items(request.input)
        context: Sequence[Item] = ()
        if request.previous_response_id is not None:
            previous = await self._own(exchange, request.previous_response_id, "previous_response_id")
            context = _context_after(previous)
        turn = turn_of(request, context, items)
        kept = [*context, *items]
        while True:
            try:
                token_ids = await encode_turn(model, turn)
                return _Prepared(request, model, turn, token_ids, items, context)
            except ContextTooLong:
                kept = _without_oldest(kept)
                if request.truncation != "auto" or not kept:
                    raise
            turn = replace(turn, messages=turn_of(request, (), kept).messages)

    def _running(self, exchange: Exchange, prepared: _Prepared, end_ticket: Callable[[], None]) -> RunningResponse:
        request, turn = prepared.request, prepared.turn
        response_id = f"resp_{uuid.uuid4().hex}"
        shelf = self._shelf

        async def settle(running: RunningResponse) -> None:
            end_ticket()
            unwanted = running.over
            if running.response.store and not unwanted and (running.response.background or running.error is None):
                with_events = running.response.background and bool(request.stream)
                await shelf.keep(running, prepared.items, prepared.context, with_events)

        running = RunningResponse(
            new_response(request, response_id, prepared.model.name, prepared.model.defaults),
            OutputItems(new_item_id, turn.logprobs),
            self._desk.meter(exchange, 1),
            settle,
            shelf.spawn,
        )
        running.tenant = exchange.identity.tenant.name
        return running

    async def _start(self, exchange: Exchange, running: RunningResponse, prepared: _Prepared, request_id: str) -> None:
        desk, request = self._desk, prepared.request
        with fields_named(FIELDS):
            generation = generation_of(desk, exchange, request_id, prepared.model, prepared.turn, prepared.token_ids)
        if request.background:
            await self._shelf.begin(running, prepared.items, prepared.context)
            if request.stream:
                running.follow(StreamFollower(exchange, running))
        else:
            running.follow((StreamFollower if request.stream else DocumentFollower)(exchange, running))
        try:
            generator = desk.admitted(exchange, desk.generator, [generation])
            running.generation = await generator.start(generation, running)
        except Exception as error:
            running.fail(error)
            if request.background and not request.stream:
                exchange.fail(error)
            return
        if running.ended:
            running.generation.abort()
        if request.background and not request.stream:
            exchange.respond(200, msgspec.json.encode(running.response))


def responses_routes(desk: FrontDesk, shelf: ResponseShelf) -> list[Route]:
    """The Responses API's part of the route table."""
    handlers = Responses(desk, shelf)
    one = f"{PATH}/{{response_id}}"
    errors = (400, 404, 503)
    return [
        Route(
            "POST",
            PATH,
            handlers.create,
            "Answers a conversation, and keeps the response.",
            ResponsesRequest,
            Response,
            ResponseStreamEvent,
            errors=(400, 404, 408, 413, 429, 500, 503, 504),
        ),
        Route(
            "GET",
            one,
            handlers.get,
            "A response.",
            response=Response,
            chunk=ResponseStreamEvent,
            errors=errors,
            parameters=(_STREAM, _STARTING_AFTER),
        ),
        Route("DELETE", one, handlers.delete, "Forgets a response.", response=DeletedResponse, errors=errors),
        Route("POST", f"{one}/cancel", handlers.cancel, "Ends a response.", response=Response, errors=errors),
        Route(
            "GET",
            f"{one}/input_items",
            handlers.list_input,
            "A response's input.",
            response=ItemList,
            errors=errors,
            parameters=(_LIMIT, _ORDER, _AFTER),
        ),
    ]


def _id_of(exchange: Exchange) -> str:
    return exchange.path.removeprefix(f"{PATH}/").partition("/")[0]


def _context_after(stored: StoredResponse) -> Sequence[Item]:
    if stored.response.status not in ("completed", "incomplete"):
        message = f"previous_response_id: that response is {stored.response.status}; it must be complete."
        raise InvalidRequest(message, field="previous_response_id")
    return [*stored.context, *stored.input, *stored.response.output]


def _without_oldest(items: Sequence[Item]) -> list[Item]:
    """Drops an eighth from the front, and what makes no sense without it; empty where nothing would be left."""
    left = list(items[max(1, len(items) // 8) :])
    while left and left[0]["type"] == "function_call_output":
        del left[0]
    return left


def _page(stored: StoredResponse, query: dict[str, list[str]]) -> ItemList:
    limit = _number(query, "limit", _DEFAULT_PAGE, 1, _MAX_PAGE)
    order = query.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order!r}; it must be asc or desc.", field="order")
    items = [*stored.context, *stored.input]
    if order == "desc":
        items.reverse()
    after = query.get("after", [""])[-1]
    ids = [item["id"] for item in items]
    if after:
        if after not in ids:
            raise InvalidRequest(f"after is {after!r}, which is no item of this response.", field="after")
        items = items[ids.index(after) + 1 :]
    data = items[:limit]
    return ItemList(
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=len(items) > limit,
    )


def _number(query: dict[str, list[str]], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name, [str(default)])[-1]
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {text!r}; it must be a number from {low} to {high}.", field=name)
    return value
