"""Stored chat completions by tenant and id. Knows nothing of HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from baton.gateway.core import Delta
from baton.gateway.openai.chat_answer import ChatDocument
from baton.gateway.openai.stored_chats.types import StoredChat, StoredMessage
from baton.gateway.schemas.answers import Usage
from baton.gateway.schemas.requests import ChatMessage
from baton.gateway.storage.store import RecordStore
from baton.rpc.errors import NotFound, ServiceError

_log = logging.getLogger(__name__)


class ChatStore:
    """Stores chats per tenant, because clients choose the ids."""

    def __init__(self, records: RecordStore, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._records = records
        self._spawn = spawn
        self._decoder = msgspec.json.Decoder(StoredChat)

    def recorder(
        self, tenant: str, document: ChatDocument, messages: Sequence[ChatMessage], metadata: dict[str, str] | None
    ) -> ChatRecorder:
        """Returns a recorder that stores what `document` collects."""

        def store(usage: Usage, then: Callable[[], None]) -> None:
            completion = msgspec.to_builtins(document.document(usage))
            completion["metadata"] = metadata or {}
            kept = [_message(message, f"{completion['id']}-{index}") for index, message in enumerate(messages)]
            self._spawn(self._store_then(tenant, StoredChat(completion=completion, messages=kept), then))

        return ChatRecorder(document, store)

    async def get(self, tenant: str, completion_id: str) -> StoredChat:
        """Returns a chat. Raises NotFound, Unavailable."""
        found = await self._load(_name(tenant, completion_id))
        if found is None:
            raise NotFound(f"Chat completion with id '{completion_id}' not found.", field="completion_id")
        return found

    async def update(self, tenant: str, completion_id: str, metadata: dict[str, str]) -> StoredChat:
        """Replaces a chat's metadata. Raises NotFound, Unavailable."""
        chat = await self.get(tenant, completion_id)
        chat.completion["metadata"] = metadata
        await self._records.save(_name(tenant, completion_id), msgspec.json.encode(chat))
        return chat

    async def delete(self, tenant: str, completion_id: str) -> None:
        """Deletes a chat. Raises NotFound, Unavailable."""
        name = _name(tenant, completion_id)
        await self._records.delist(_group(tenant), name)
        if not await self._records.delete(name):
            raise NotFound(f"Chat completion with id '{completion_id}' not found.", field="completion_id")

    async def ids(self, tenant: str) -> list[str]:
        """Returns the ids of a tenant's chats, oldest first; some may have expired. Raises Unavailable."""
        prefix = _name(tenant, "")
        return [name.removeprefix(prefix) for name in await self._records.listed(_group(tenant))]

    async def find(self, tenant: str, completion_id: str) -> StoredChat | None:
        """Returns a chat, or None if it has expired. Raises Unavailable."""
        return await self._load(_name(tenant, completion_id))

    async def _store_then(self, tenant: str, chat: StoredChat, then: Callable[[], None]) -> None:
        name = _name(tenant, chat.completion["id"])
        try:
            await self._records.save(name, msgspec.json.encode(chat))
            await self._records.enlist(_group(tenant), name)
        except ServiceError as error:
            _log.warning("cannot store chat completion %s: %s", chat.completion["id"], error.message)
        finally:
            then()

    async def _load(self, name: str) -> StoredChat | None:
        record = await self._records.load(name)
        if record is None:
            return None
        try:
            return self._decoder.decode(record)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            _log.warning("cannot decode the record of %s: %s", name, error)
            return None


class ChatRecorder:
    """Implements AnswerRecorder with a document that is only stored."""

    def __init__(self, document: ChatDocument, store: Callable[[Usage, Callable[[], None]], None]) -> None:
        self.collect: Callable[[int, Delta], None] = document.collect
        self.store = store


def _group(tenant: str) -> str:
    return f"chat:{tenant}"


def _name(tenant: str, completion_id: str) -> str:
    """Returns a name that differs between tenants for any ids."""
    return f"chat:{len(tenant)}:{tenant}:{completion_id}"


def _message(message: ChatMessage, message_id: str) -> StoredMessage:
    return StoredMessage(
        id=message_id,
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        function_call=message.function_call,
    )
