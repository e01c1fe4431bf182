"""GET, POST and DELETE of /v1/chat/completions: chats that were sent with `store`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import parse_qs, unquote

import msgspec

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.fields.validation import check_metadata
from baton.gateway.http.exchange import Exchange
from baton.gateway.openai.stored_chats.store import ChatStore
from baton.gateway.openai.stored_chats.types import (
    ChatCompletionList,
    DeletedChatCompletion,
    StoredChat,
    StoredChatCompletion,
    StoredMessageList,
    UpdateChatCompletion,
)
from baton.gateway.rest.routing import Parameter, Route
from baton.rpc.errors import InvalidRequest

PATH = "/v1/chat/completions"

_MAX_PAGE = 100
_DEFAULT_PAGE = 20
_LIMIT = Parameter(
    "limit", "Entries per page.", {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE, "default": _DEFAULT_PAGE}
)
_ORDER = Parameter("order", "Order by time.", {"enum": ["asc", "desc"], "default": "asc"})
_AFTER = Parameter("after", "The id of the entry before the page. Empty: the first page.", {"type": "string"})
_MODEL = Parameter("model", "Only chats of this model. Empty: all models.", {"type": "string"})
_METADATA = Parameter(
    "metadata",
    "Only chats with this metadata: metadata[KEY]=VALUE.",
    {"type": "object"},
    style="deepObject",
    nested=True,
)
_IDS = "chatcmpl-.+"


class StoredChats:
    """Handles the routes of stored chats."""

    def __init__(self, store: ChatStore, primary_name: Callable[[str], str], bodies: BodyThread, strict: bool) -> None:
        self._store = store
        self._bodies = bodies
        self._primary_name = primary_name
        self._decoder = BodyDecoder(UpdateChatCompletion, strict, bodies.reader)

    async def list(self, exchange: Exchange) -> None:
        """Handles GET /v1/chat/completions."""
        query = parse_qs(exchange.query)
        limit, tenant = _limit(query), exchange.identity.tenant.name
        ids = _in_order(await self._store.ids(tenant), query)
        found: list[dict[str, object]] = []
        for completion_id in ids:
            chat = await self._store.find(tenant, completion_id)
            if chat is not None and _is_asked(chat, query, self._primary_name(query.get("model", [""])[-1])):
                found.append(chat.completion)
            if len(found) > limit:
                break
        page = found[:limit]
        answer = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(found) > limit,
        }
        exchange.respond(200, msgspec.json.encode(answer))

    async def get(self, exchange: Exchange) -> None:
        """Handles GET /v1/chat/completions/{completion_id}."""
        chat = await self._store.get(exchange.identity.tenant.name, _id_of(exchange))
        exchange.respond(200, msgspec.json.encode(chat.completion))

    async def messages(self, exchange: Exchange) -> None:
        """Handles GET /v1/chat/completions/{completion_id}/messages."""
        query = parse_qs(exchange.query)
        limit = _limit(query)
        chat = await self._store.get(exchange.identity.tenant.name, _id_of(exchange))
        by_id = {message.id: message for message in chat.messages}
        ids = _in_order(list(by_id), query)
        data = [by_id[message_id] for message_id in ids[:limit]]
        page = StoredMessageList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(ids) > limit,
        )
        exchange.respond(200, msgspec.json.encode(page))

    async def update(self, exchange: Exchange) -> None:
        """Handles POST /v1/chat/completions/{completion_id}."""
        request = await self._bodies.run(partial(self._decoder.read, exchange), exchange.num_body_bytes, exchange.owner)
        metadata = request.metadata or {}
        check_metadata(metadata)
        chat = await self._store.update(exchange.identity.tenant.name, _id_of(exchange), metadata)
        exchange.respond(200, msgspec.json.encode(chat.completion))

    async def delete(self, exchange: Exchange) -> None:
        """Handles DELETE /v1/chat/completions/{completion_id}."""
        completion_id = _id_of(exchange)
        await self._store.delete(exchange.identity.tenant.name, completion_id)
        exchange.respond(200, msgspec.json.encode(DeletedChatCompletion(id=completion_id)))


def stored_chat_routes(
    store: ChatStore, primary_name: Callable[[str], str], bodies: BodyThread, strict: bool = False
) -> list[Route]:
    """Returns the routes. `primary_name` maps any name of a model to its first name."""
    handlers = StoredChats(store, primary_name, bodies, strict)
    one = f"{PATH}/{{completion_id}}"
    errors = (400, 404, 503)
    return [
        Route(
            "GET",
            PATH,
            handlers.list,
            "Lists the stored chats.",
            response=ChatCompletionList,
            errors=(400, 503),
            parameters=(_LIMIT, _ORDER, _AFTER, _MODEL, _METADATA),
        ),
        Route(
            "GET", one, handlers.get, "Returns a stored chat.", response=StoredChatCompletion, errors=errors, ids=_IDS
        ),
        Route(
            "POST",
            one,
            handlers.update,
            "Replaces a stored chat's metadata.",
            UpdateChatCompletion,
            StoredChatCompletion,
            errors=(*errors, 408, 413),
            ids=_IDS,
        ),
        Route(
            "DELETE",
            one,
            handlers.delete,
            "Deletes a stored chat.",
            response=DeletedChatCompletion,
            errors=errors,
            ids=_IDS,
        ),
        Route(
            "GET",
            f"{one}/messages",
            handlers.messages,
            "Lists the messages of a stored chat's request.",
            response=StoredMessageList,
            errors=errors,
            parameters=(_LIMIT, _ORDER, _AFTER),
            ids=_IDS,
        ),
    ]


def _id_of(exchange: Exchange) -> str:
    return unquote(exchange.path.removeprefix(f"{PATH}/").removesuffix("/messages"))


def _limit(query: Mapping[str, list[str]]) -> int:
    text = query.get("limit", [str(_DEFAULT_PAGE)])[-1]
    if not text.isascii() or not text.isdigit() or len(text) > 3 or not 1 <= int(text) <= _MAX_PAGE:
        raise InvalidRequest(f"limit is {text!r}; it must be a number from 1 to {_MAX_PAGE}", field="limit")
    return int(text)


def _in_order(ids: list[str], query: Mapping[str, list[str]]) -> list[str]:
    """Returns the ids after `after`. Raises InvalidRequest."""
    order, after = query.get("order", ["asc"])[-1], query.get("after", [""])[-1]
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order!r}; give asc or desc", field="order")
    ordered = ids[::-1] if order == "desc" else ids
    if not after:
        return ordered
    if after not in ordered:
        raise InvalidRequest(f"after is {after!r}, which is not in the list", field="after")
    return ordered[ordered.index(after) + 1 :]


def _is_asked(chat: StoredChat, query: Mapping[str, list[str]], model: str) -> bool:
    completion = chat.completion
    wanted = {name[9:-1]: values[-1] for name, values in query.items() if name.startswith("metadata[")}
    return model in ("", completion["model"]) and wanted.items() <= completion["metadata"].items()
