"""Conversations by tenant and id. Knows nothing of HTTP or gRPC.

Items are appended atomically. Two concurrent responses of one conversation both read it as it was when they began; each
appends its input and output as one block when it ends, so blocks are ordered by their ends and never interleave.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence

import msgspec

from baton.gateway.responses.conversations.types import Conversation, StoredConversation
from baton.gateway.responses.items import Item
from baton.gateway.storage.store import RecordStore
from baton.rpc.errors import InvalidRequest, NotFound, ServiceError

_log = logging.getLogger(__name__)

MAX_ITEMS_OF_REQUEST = 20
MAX_BYTES = 16 << 20  # of a conversation that accepts more items

_items = msgspec.json.Decoder(Item)


class ConversationStore:
    """Stores conversations in the record store, each until its time to live after the last change."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self._decoder = msgspec.json.Decoder(StoredConversation)

    async def create(self, tenant: str, metadata: dict[str, str], items: Sequence[Item]) -> Conversation:
        """Creates a conversation. Raises InvalidRequest, Unavailable."""
        _check_ids(items, set())
        conversation = Conversation(id=f"conv_{uuid.uuid4().hex}", created_at=int(time.time()), metadata=metadata)
        await self._save(tenant, conversation)
        if items:
            await self._records.append(_name(conversation.id), _encoded([_normal(item) for item in items]))
        return conversation

    async def get(self, tenant: str, conversation_id: str, field: str = "conversation_id") -> Conversation:
        """Returns a conversation of the tenant.

        Raises NotFound, Unavailable. `field` is the request's field with the id.
        """
        record = await self._records.load(_name(conversation_id))
        try:
            stored = None if record is None else self._decoder.decode(record)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            _log.warning("cannot decode the record of %s: %s", conversation_id, error)
            stored = None
        if stored is None or stored.tenant != tenant:
            raise NotFound(f"Conversation with id '{conversation_id[:80]}' not found.", field=field)
        return stored.conversation

    async def update(self, tenant: str, conversation_id: str, metadata: dict[str, str]) -> Conversation:
        """Replaces a conversation's metadata. Raises NotFound, Unavailable."""
        conversation = await self.get(tenant, conversation_id)
        conversation.metadata = metadata
        await self._save(tenant, conversation)
        await self._records.append(_name(conversation_id), ())  # renews its items too
        return conversation

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Deletes a conversation and its items. Raises NotFound, Unavailable."""
        await self.get(tenant, conversation_id)
        await self._records.delete(_name(conversation_id))

    async def items(
        self, tenant: str, conversation_id: str, field: str = "conversation_id", *, for_more: bool = False
    ) -> list[Item]:
        """Returns the items, oldest first.

        Raises NotFound, Unavailable, or InvalidRequest if it is full (`for_more`).
        """
        await self.get(tenant, conversation_id, field)
        pieces = await self._records.pieces(_name(conversation_id))
        if for_more and sum(map(len, pieces)) >= MAX_BYTES:
            raise InvalidRequest(
                f"the conversation {conversation_id} has reached {MAX_BYTES} bytes; delete items or create another one",
                field=field,
            )
        return [_items.decode(piece) for piece in pieces]

    async def add(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        """Appends items and returns them as stored. Raises NotFound, InvalidRequest, Unavailable."""
        taken = {item["id"] for item in await self.items(tenant, conversation_id, for_more=True)}
        _check_ids(items, taken)
        kept = [_normal(item) for item in items]
        if not await self._records.append(_name(conversation_id), _encoded(kept)):
            raise NotFound(f"Conversation with id '{conversation_id[:80]}' not found.", field="conversation_id")
        return kept

    async def extend(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> None:
        """Appends a response's items. Only logs a failure, because the response itself is complete."""
        try:
            await self.get(tenant, conversation_id)
            await self._records.append(_name(conversation_id), _encoded([_normal(item) for item in items]))
        except ServiceError as error:
            _log.warning("cannot add a response to the conversation %s: %s", conversation_id, error.message)

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> Item:
        """Returns one item. Raises NotFound, Unavailable."""
        for item in await self.items(tenant, conversation_id):
            if item["id"] == item_id:
                return item
        raise NotFound(f"Item with id '{item_id[:80]}' not found in this conversation.", field="item_id")

    async def remove(self, tenant: str, conversation_id: str, item_id: str) -> Conversation:
        """Deletes one item. Raises NotFound, Unavailable."""
        conversation = await self.get(tenant, conversation_id)
        item = await self.item(tenant, conversation_id, item_id)
        await self._records.remove(_name(conversation_id), _encoded([item])[0])
        return conversation

    async def _save(self, tenant: str, conversation: Conversation) -> None:
        stored = StoredConversation(conversation=conversation, tenant=tenant)
        await self._records.save(_name(conversation.id), msgspec.json.encode(stored))


def _name(conversation_id: str) -> str:
    return f"conversation:{conversation_id}"


def _check_ids(items: Sequence[Item], taken: set[str]) -> None:
    """Raises InvalidRequest for an id that another item already has."""
    for index, item in enumerate(items):
        if item["id"] in taken:
            field = f"items.{index}.id"
            raise InvalidRequest(f"{field} is {item['id'][:80]!r}, which another item already has", field=field)
        taken.add(item["id"])


def _encoded(items: Sequence[Item]) -> list[bytes]:
    return [msgspec.json.encode(item) for item in items]


def _normal(item: Item) -> Item:
    """Returns an item in the form of lists: content in parts, with a status."""
    content = item.get("content")
    if item["type"] == "message" and isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        item = {**item, "content": [{"type": kind, "text": content}]}
    return item if item.get("status") or item["type"] == "reasoning" else {**item, "status": "completed"}
