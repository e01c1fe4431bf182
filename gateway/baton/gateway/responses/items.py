"""The items of a conversation: checked as they come in, and as chat templates expect them. Pure functions."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson
from msgspec import Struct

from baton.gateway.request_body import wrong_field
from baton.rpc.errors import InvalidRequest

Item = dict[str, Any]


class MessageItem(Struct, kw_only=True):
    """Something that was said."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class FunctionCallItem(Struct, kw_only=True):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(Struct, kw_only=True):
    """What a call returned."""

    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(Struct, kw_only=True):
    """What the model thought."""

    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None


_KINDS: Mapping[str, type[Struct]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}
_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def new_item_id(kind: str) -> str:
    """A name for an item of this type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def input_items(given: str | Sequence[Item]) -> list[Item]:
    """The request's items, checked, each with an id. Raises InvalidRequest that names the item."""
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "id": new_item_id("message"), "role": "user", "content": content}]
    if not given:
        raise InvalidRequest("input is empty; it must have at least one item.", field="input")
    return [_checked(item, f"input.{index}") for index, item in enumerate(given)]


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """The chat that these items are. What the assistant did in a row is one message."""
    chat: list[dict[str, Any]] = []
    if instructions:
        chat.append({"role": "system", "content": instructions})
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            chat.append({"role": item["role"], "content": _joined(item["content"])})
        elif kind == "function_call_output":
            chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": _joined(item["output"])})
        else:
            _add_to_assistant(_open_assistant(chat, kind), item)
    return chat


def _checked(item: Item, where: str) -> Item:
    kind = item.get("type", "message")
    struct = _KINDS.get(kind) if isinstance(kind, str) else None
    if struct is None:
        allowed = ", ".join(_KINDS)
        raise InvalidRequest(f"{where}.type is {kind!r}; it must be one of {allowed}.", field=f"{where}.type")
    try:
        checked = msgspec.convert(item, struct)
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), where) from None
    for name in ("content", "output", "summary"):
        parts = getattr(checked, name, None)
        if isinstance(parts, list):
            _check_parts(parts, f"{where}.{name}", kind)
    if isinstance(checked, FunctionCallItem):
        _check_arguments(checked.arguments, f"{where}.arguments")
    item_id = item.get("id")
    return {**item, "type": kind, "id": item_id if isinstance(item_id, str) else new_item_id(kind)}


def _check_parts(parts: Sequence[Item], where: str, kind: str) -> None:
    allowed = ("reasoning_text", "summary_text") if kind == "reasoning" else _TEXT_PARTS
    for index, part in enumerate(parts):
        name = part.get("type")
        if name not in allowed:
            raise InvalidRequest(
                f"{where}.{index}.type is {name!r}; only {', '.join(allowed)} can be served.",
                field=f"{where}.{index}.type",
            )
        key = "refusal" if name == "refusal" else "text"
        if not isinstance(part.get(key), str):
            raise InvalidRequest(f"{where}.{index}.{key} must be a string.", field=f"{where}.{index}.{key}")


def _check_arguments(arguments: str, where: str) -> None:
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be a JSON object in a string.", field=where)


def _open_assistant(chat: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The assistant's message that goes on; reasoning opens a new one after anything but reasoning."""
    last = chat[-1] if chat else {}
    goes_on = last.get("role") == "assistant"
    if goes_on and kind == "reasoning" and (last["content"] or "tool_calls" in last):
        goes_on = False
    if not goes_on:
        last = {"role": "assistant", "content": ""}
        chat.append(last)
    return last


def _add_to_assistant(message: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        message["content"] += _joined(item["content"])
    elif item["type"] == "reasoning":
        text = _joined(item.get("content") or item.get("summary") or [])
        message["reasoning"] = f"{message['reasoning']}\n{text}" if message.get("reasoning") else text
    else:
        function = {"name": item["name"], "arguments": orjson.loads(item["arguments"] or "{}")}
        message.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _joined(content: str | Sequence[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)
