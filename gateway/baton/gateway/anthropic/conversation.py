"""Converts Anthropic's messages for chat templates. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from baton.gateway.anthropic.types import (
    Block,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from baton.rpc.errors import InvalidRequest

ChatMessages = list[dict[str, Any]]

_SHOWN_IDS = 8  # in an error


def chat_messages(system: str | list[TextBlock] | None, messages: Sequence[InputMessage]) -> ChatMessages:
    """Returns the chat. Raises InvalidRequest that names the message or block."""
    if not messages:
        raise InvalidRequest("messages: at least one message is required", field="messages")
    _check_calls(messages)
    chat: ChatMessages = []
    text = system if isinstance(system, str) else "\n".join(block.text for block in system or ())
    if text:
        chat.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        chat += _converted(message, f"messages.{index}")
    return chat


def continues_last(messages: Sequence[InputMessage]) -> bool:
    """Returns whether the output continues the last message. Raises InvalidRequest if it cannot."""
    last = messages[-1]
    if last.role != "assistant":
        return False
    where = f"messages.{len(messages) - 1}"
    text = last.content if isinstance(last.content, str) else _last_text(last.content, where)
    if not text.strip():
        raise InvalidRequest(f"{where}: the final assistant message must have text to continue", field=where)
    if text != text.rstrip():
        raise InvalidRequest(f"{where}: final assistant content cannot end with trailing whitespace", field=where)
    return True


def _last_text(blocks: Sequence[Block], where: str) -> str:
    last = blocks[-1] if blocks else None
    if not isinstance(last, TextBlock):
        raise InvalidRequest(f"{where}: the final assistant message must end with text", field=where)
    return last.text


def _converted(message: InputMessage, where: str) -> ChatMessages:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, f"{where}.content")]
    return _user(message.role, message.content, f"{where}.content")


def _assistant(blocks: Iterable[Block], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):  # only the service that created it can read it
            raise _misplaced(block, "assistant", f"{where}.{index}")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: Iterable[Block], where: str) -> ChatMessages:
    chat: ChatMessages = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}.{index}"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ImageBlock | DocumentBlock):
            texts.append(_text_of(block, place))
        elif isinstance(block, ToolResultBlock) and role == "user":
            chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result_text(block, place)})
        else:
            raise _misplaced(block, role, place)
    if texts or not chat:
        chat.append({"role": role, "content": "\n".join(texts)})
    return chat


def _result_text(result: ToolResultBlock, where: str) -> str:
    content = result.content
    if not isinstance(content, list):
        return content or ""
    return "\n".join(_text_of(block, f"{where}.content.{index}") for index, block in enumerate(content))


def _text_of(block: TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock, where: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ToolReferenceBlock):
        return block.tool_name
    if isinstance(block, ImageBlock):
        raise InvalidRequest(f"{where}: images are not supported by this model", field=where)
    return _document_text(block, f"{where}.source")


def _document_text(document: DocumentBlock, where: str) -> str:
    source = document.source
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        text = source["data"]
    elif source.get("type") == "content" and isinstance(source.get("content"), str):
        text = source["content"]
    else:
        shown = source.get("type")
        raise InvalidRequest(f"{where}: a document of type {shown!r} is not supported; only text is", field=where)
    return "\n".join(part for part in (document.title, document.context, text) if part)


def _check_calls(messages: Sequence[InputMessage]) -> None:
    """Raises InvalidRequest unless every call is followed by its result, and every result follows its call."""
    open_ids: dict[str, None] = {}  # in their order
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        blocks = message.content if isinstance(message.content, list) else []
        answered = dict.fromkeys(block.tool_use_id for block in blocks if isinstance(block, ToolResultBlock))
        for call_id in answered:
            if call_id not in open_ids:
                raise InvalidRequest(
                    f"{where}: unexpected tool_use_id in a tool_result block: {call_id}; each tool_result must have a "
                    "tool_use block of that id in the previous message",
                    field=where,
                )
        missing = [call_id for call_id in open_ids if call_id not in answered]
        if missing:
            raise _unanswered(missing, f"messages.{index - 1}")
        open_ids = dict.fromkeys(block.id for block in blocks if isinstance(block, ToolUseBlock))
    if open_ids:
        raise _unanswered([*open_ids], f"messages.{len(messages) - 1}")


def _unanswered(call_ids: Sequence[str], where: str) -> InvalidRequest:
    shown, more = ", ".join(call_ids[:_SHOWN_IDS]), len(call_ids) - _SHOWN_IDS
    return InvalidRequest(
        f"{where}: tool_use ids were found without tool_result blocks immediately after: {shown}"
        f"{f' and {more} more' if more > 0 else ''}",
        field=where,
    )


def _misplaced(block: Block, role: str, where: str) -> InvalidRequest:
    kind = type(block).__struct_config__.tag
    return InvalidRequest(f"{where}: a {kind} block is not allowed in a message of role {role}", field=where)
