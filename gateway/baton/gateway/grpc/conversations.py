"""Conversations in the public gRPC API, shared with REST."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.gateway.access.identity import Identity
from baton.gateway.fields.validation import check_metadata
from baton.gateway.grpc.responses.calls import page_asked
from baton.gateway.grpc.responses.messages import item_of
from baton.gateway.grpc.responses.request import given_item, name_item_field
from baton.gateway.responses.conversations.checks import checked_items
from baton.gateway.responses.conversations.store import ConversationStore
from baton.gateway.responses.conversations.types import Conversation
from baton.gateway.responses.items import Item
from baton.rpc.errors import InvalidRequest, ServiceError
from baton.rpc.server.server import Context
from baton.v1 import conversation_pb2 as pb
from baton.v1 import response_pb2

_ITEM = re.compile(r"items\.(\d+)\.(.+)")


class ConversationMethods:
    """The methods of InferenceService for conversations."""

    @abstractmethod
    def _identity(self, context: Context) -> Identity:
        """Returns the client of the call. Raises Unauthenticated, PermissionDenied."""

    @property
    @abstractmethod
    def _conversations(self) -> ConversationStore:
        """Returns the store of conversations."""

    async def CreateConversation(  # noqa: N802
        self, request: pb.CreateConversationRequest, context: Context
    ) -> pb.CreateConversationResponse:
        tenant, metadata = self._tenant(context), dict(request.metadata)
        check_metadata(metadata)
        items = _items_of(request.items) if request.items else []
        conversation = await self._conversations.create(tenant, metadata, items)
        return pb.CreateConversationResponse(conversation=_message_of(conversation))

    async def GetConversation(  # noqa: N802
        self, request: pb.GetConversationRequest, context: Context
    ) -> pb.GetConversationResponse:
        conversation = await self._conversations.get(self._tenant(context), _named(request.conversation_id))
        return pb.GetConversationResponse(conversation=_message_of(conversation))

    async def UpdateConversation(  # noqa: N802
        self, request: pb.UpdateConversationRequest, context: Context
    ) -> pb.UpdateConversationResponse:
        tenant, metadata = self._tenant(context), dict(request.metadata)
        check_metadata(metadata)
        conversation = await self._conversations.update(tenant, _named(request.conversation_id), metadata)
        return pb.UpdateConversationResponse(conversation=_message_of(conversation))

    async def DeleteConversation(  # noqa: N802
        self, request: pb.DeleteConversationRequest, context: Context
    ) -> pb.DeleteConversationResponse:
        await self._conversations.delete(self._tenant(context), _named(request.conversation_id))
        return pb.DeleteConversationResponse()

    async def AddConversationItems(  # noqa: N802
        self, request: pb.AddConversationItemsRequest, context: Context
    ) -> pb.AddConversationItemsResponse:
        tenant, name = self._tenant(context), _named(request.conversation_id)
        with _items_named(request.items):
            kept = await self._conversations.add(tenant, name, _items_of(request.items))
        return pb.AddConversationItemsResponse(items=[item_of(item) for item in kept])

    async def ListConversationItems(  # noqa: N802
        self, request: pb.ListConversationItemsRequest, context: Context
    ) -> pb.ListConversationItemsResponse:
        items = await self._conversations.items(self._tenant(context), _named(request.conversation_id))
        page = page_asked(items, request.limit, request.order, request.after)
        return pb.ListConversationItemsResponse(items=[item_of(item) for item in page.data], has_more=page.has_more)

    async def GetConversationItem(  # noqa: N802
        self, request: pb.GetConversationItemRequest, context: Context
    ) -> pb.GetConversationItemResponse:
        tenant, name = self._tenant(context), _named(request.conversation_id)
        item = await self._conversations.item(tenant, name, _named(request.item_id, "item_id"))
        return pb.GetConversationItemResponse(item=item_of(item, True))

    async def DeleteConversationItem(  # noqa: N802
        self, request: pb.DeleteConversationItemRequest, context: Context
    ) -> pb.DeleteConversationItemResponse:
        tenant, name = self._tenant(context), _named(request.conversation_id)
        conversation = await self._conversations.remove(tenant, name, _named(request.item_id, "item_id"))
        return pb.DeleteConversationItemResponse(conversation=_message_of(conversation))

    def _tenant(self, context: Context) -> str:
        return self._identity(context).tenant.name


def _items_of(items: Sequence[response_pb2.ResponseItem]) -> list[Item]:
    with _items_named(items):
        return checked_items([given_item(item, f"items.{index}") for index, item in enumerate(items)])


@contextmanager
def _items_named(items: Sequence[response_pb2.ResponseItem]) -> Iterator[None]:
    """Makes errors name the fields of ResponseItem."""
    try:
        yield
    except ServiceError as error:
        if found := _ITEM.fullmatch(error.field):
            name_item_field(error, "items", items, int(found[1]), found[2])
        raise


def _named(given: str, field: str = "conversation_id") -> str:
    if not given:
        raise InvalidRequest(f"{field} is missing", field=field)
    return given


def _message_of(conversation: Conversation) -> pb.Conversation:
    return pb.Conversation(
        id=conversation.id, created_at_seconds=conversation.created_at, metadata=conversation.metadata
    )
