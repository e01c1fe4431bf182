"""Bodies of the Conversations API. One definition for parsing, encoding and the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class CreateConversationRequest(Struct, kw_only=True):
    """POST /v1/conversations."""

    items: list[dict[str, Any]] | None = None  # at most 20
    metadata: dict[str, str] | None = None


class UpdateConversationRequest(Struct, kw_only=True):
    """POST /v1/conversations/{conversation_id}."""

    metadata: dict[str, str] | None  # replaces the previous metadata


class AddItemsRequest(Struct, kw_only=True):
    """POST /v1/conversations/{conversation_id}/items."""

    items: list[dict[str, Any]]  # 1 to 20


class Conversation(Struct, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationItem(Struct, kw_only=True):
    """An item. Items have further members by type."""

    id: str
    type: str  # message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning
    status: str | None = None


class DeletedConversation(Struct):
    """The response to DELETE."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class StoredConversation(Struct, kw_only=True):
    """The stored record of a conversation, without its items."""

    conversation: Conversation
    tenant: str
