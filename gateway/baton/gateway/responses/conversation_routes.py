"""POST, GET and DELETE of /v1/conversations and their items."""

from __future__ import annotations

from functools import partial
from urllib.parse import parse_qs, unquote

import msgspec

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.fields.validation import check_metadata
from baton.gateway.http.exchange import Exchange
from baton.gateway.responses.conversations.checks import checked_items
from baton.gateway.responses.conversations.store import ConversationStore
from baton.gateway.responses.conversations.types import (
    AddItemsRequest,
    Conversation,
    ConversationItem,
    CreateConversationRequest,
    DeletedConversation,
    UpdateConversationRequest,
)
from baton.gateway.responses.items import Item, ignored_items
from baton.gateway.responses.pages import listed
from baton.gateway.responses.routes import PAGE, page_asked
from baton.gateway.responses.types import ItemList
from baton.gateway.rest.routing import INCLUDE, Route

PATH = "/v1/conversations"

_IDS = "conv_[^/]+"
_ERRORS = (400, 404, 503)
_BODY = (400, 404, 408, 413, 503)


class Conversations:
    """Handles the routes of conversations."""

    def __init__(self, store: ConversationStore, bodies: BodyThread, strict: bool) -> None:
        self._store = store
        self._bodies = bodies
        self._creations = BodyDecoder(CreateConversationRequest, strict, bodies.reader)
        self._updates = BodyDecoder(UpdateConversationRequest, strict, bodies.reader)
        self._additions = BodyDecoder(AddItemsRequest, strict, bodies.reader)

    async def create(self, exchange: Exchange) -> None:
        """Handles POST /v1/conversations."""

        def read() -> tuple[dict[str, str], list[Item]]:
            request = self._creations.read(exchange)
            check_metadata(request.metadata)
            exchange.ignore(ignored_items(request.items or (), "items"))
            return request.metadata or {}, checked_items(request.items) if request.items else []

        metadata, items = await self._bodies.run(read, exchange.num_body_bytes, exchange.owner)
        _respond(exchange, await self._store.create(_tenant(exchange), metadata, items))

    async def get(self, exchange: Exchange) -> None:
        """Handles GET /v1/conversations/{conversation_id}."""
        _respond(exchange, await self._store.get(_tenant(exchange), _ids(exchange)[0]))

    async def update(self, exchange: Exchange) -> None:
        """Handles POST /v1/conversations/{conversation_id}."""
        request = await self._bodies.run(partial(self._updates.read, exchange), exchange.num_body_bytes, exchange.owner)
        metadata = request.metadata or {}
        check_metadata(metadata)
        _respond(exchange, await self._store.update(_tenant(exchange), _ids(exchange)[0], metadata))

    async def delete(self, exchange: Exchange) -> None:
        """Handles DELETE /v1/conversations/{conversation_id}."""
        conversation_id = _ids(exchange)[0]
        await self._store.delete(_tenant(exchange), conversation_id)
        _respond(exchange, DeletedConversation(conversation_id))

    async def list_items(self, exchange: Exchange) -> None:
        """Handles GET /v1/conversations/{conversation_id}/items."""
        items = await self._store.items(_tenant(exchange), _ids(exchange)[0])
        _respond(exchange, page_asked(items, parse_qs(exchange.query)))

    async def add_items(self, exchange: Exchange) -> None:
        """Handles POST /v1/conversations/{conversation_id}/items."""

        def read() -> list[Item]:
            request = self._additions.read(exchange)
            exchange.ignore(ignored_items(request.items, "items"))
            return checked_items(request.items)

        items = await self._bodies.run(read, exchange.num_body_bytes, exchange.owner)
        _respond(exchange, listed(await self._store.add(_tenant(exchange), _ids(exchange)[0], items)))

    async def get_item(self, exchange: Exchange) -> None:
        """Handles GET /v1/conversations/{conversation_id}/items/{item_id}."""
        exchange.respond(200, msgspec.json.encode(await self._store.item(_tenant(exchange), *_ids(exchange))))

    async def delete_item(self, exchange: Exchange) -> None:
        """Handles DELETE /v1/conversations/{conversation_id}/items/{item_id}."""
        _respond(exchange, await self._store.remove(_tenant(exchange), *_ids(exchange)))


def conversation_routes(store: ConversationStore, bodies: BodyThread, strict: bool) -> list[Route]:
    """Returns the routes of conversations."""
    handlers = Conversations(store, bodies, strict)
    one = f"{PATH}/{{conversation_id}}"
    return [
        Route(
            "POST",
            PATH,
            handlers.create,
            "Creates a conversation.",
            CreateConversationRequest,
            Conversation,
            errors=(400, 408, 413, 503),
        ),
        Route("GET", one, handlers.get, "Returns a conversation.", response=Conversation, errors=_ERRORS, ids=_IDS),
        Route(
            "POST",
            one,
            handlers.update,
            "Replaces a conversation's metadata.",
            UpdateConversationRequest,
            Conversation,
            errors=_BODY,
            ids=_IDS,
        ),
        Route(
            "DELETE",
            one,
            handlers.delete,
            "Deletes a conversation.",
            response=DeletedConversation,
            errors=_ERRORS,
            ids=_IDS,
        ),
        *_item_routes(handlers),
    ]


def _item_routes(handlers: Conversations) -> list[Route]:
    path = f"{PATH}/{{conversation_id}}/items"
    item = f"{path}/{{item_id}}"
    return [
        Route(
            "GET",
            path,
            handlers.list_items,
            "Lists a conversation's items.",
            response=ItemList,
            errors=_ERRORS,
            parameters=PAGE,
            ids=_IDS,
        ),
        Route(
            "POST",
            path,
            handlers.add_items,
            "Adds items to a conversation.",
            AddItemsRequest,
            ItemList,
            errors=_BODY,
            parameters=(INCLUDE,),
            ids=_IDS,
        ),
        Route(
            "GET",
            item,
            handlers.get_item,
            "Returns an item.",
            response=ConversationItem,
            errors=_ERRORS,
            parameters=(INCLUDE,),
            ids=_IDS,
        ),
        Route(
            "DELETE", item, handlers.delete_item, "Deletes an item.", response=Conversation, errors=_ERRORS, ids=_IDS
        ),
    ]


def _ids(exchange: Exchange) -> list[str]:
    """Returns the ids in the path: the conversation's, and the item's if there is one."""
    return [unquote(part) for part in exchange.path.removeprefix(f"{PATH}/").split("/")[::2]]


def _tenant(exchange: Exchange) -> str:
    return exchange.identity.tenant.name


def _respond(exchange: Exchange, answer: msgspec.Struct) -> None:
    exchange.respond(200, msgspec.json.encode(answer))
