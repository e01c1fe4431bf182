"""Bodies of stored chat completions. One definition for parsing, encoding and the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from baton.gateway.schemas.answers import ChatCompletion


class StoredChatCompletion(ChatCompletion, kw_only=True):
    """A stored chat completion."""

    metadata: dict[str, str]


class StoredMessage(Struct, kw_only=True, omit_defaults=True):
    """A message of a stored chat's request."""

    id: str
    role: str
    content: str | list[dict[str, Any]] | None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None


class ChatCompletionList(Struct, kw_only=True):
    """GET /v1/chat/completions."""

    object: Literal["list"] = "list"
    data: list[StoredChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessageList(Struct, kw_only=True):
    """GET /v1/chat/completions/{completion_id}/messages."""

    object: Literal["list"] = "list"
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class UpdateChatCompletion(Struct, kw_only=True):
    """POST /v1/chat/completions/{completion_id}."""

    metadata: dict[str, str] | None  # replaces the previous metadata


class DeletedChatCompletion(Struct, kw_only=True):
    """The response to DELETE."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True


class StoredChat(Struct, kw_only=True):
    """The stored record of a chat."""

    completion: dict[str, Any]  # a StoredChatCompletion
    messages: list[StoredMessage]
