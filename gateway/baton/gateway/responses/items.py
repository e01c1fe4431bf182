"""The items of a conversation: validates them and converts them for chat templates. Pure functions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from baton.gateway.bodies.decoder import wrong_field
from baton.gateway.models.prompts.call_arguments import check_arguments, read_arguments
from baton.gateway.responses.tools import INPUT, ToolName
from baton.rpc.errors import InvalidRequest

Item = dict[str, Any]

MCP_LIST, APPROVAL_REQUEST, APPROVAL_RESPONSE = "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"
_DENIED = "The user did not approve this call."


class MessageItem(Struct, kw_only=True):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class FunctionCallItem(Struct, kw_only=True):
    """A tool call of the model."""

    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class FunctionOutputItem(Struct, kw_only=True):
    """The result of a tool call."""

    call_id: str
    output: str | list[dict[str, Any]]


class CustomCallItem(Struct, kw_only=True):
    """A call of a custom tool."""

    call_id: str
    name: str
    input: str


class McpErrorPart(Struct, kw_only=True):
    """A part of an error's content: a text, or what is not shown to the model."""

    text: str | None = None
    refusal: str | None = None


class McpError(Struct, kw_only=True):
    """Why a call failed: the server's content, or a message."""

    type: str | None = None
    message: str | None = None
    content: list[McpErrorPart] | None = None


class McpCallItem(Struct, kw_only=True):
    """A call that the gateway ran on an MCP server, with its result."""

    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: str | McpError | None = None


class McpListItem(Struct, kw_only=True):
    """The tools of an MCP server."""

    server_label: str
    tools: list[dict[str, Any]]


class ApprovalRequestItem(Struct, kw_only=True):
    """A call that waits for the client's approval."""

    id: str
    server_label: str
    name: str
    arguments: str


class ApprovalResponseItem(Struct, kw_only=True):
    """The client's decision."""

    approval_request_id: str
    approve: bool
    reason: str | None = None


class ReasoningItem(Struct, kw_only=True):
    """The model's reasoning."""

    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None


_KINDS: Mapping[str, type[Struct]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": FunctionOutputItem,
    "mcp_call": McpCallItem,
    MCP_LIST: McpListItem,
    APPROVAL_REQUEST: ApprovalRequestItem,
    APPROVAL_RESPONSE: ApprovalResponseItem,
    "reasoning": ReasoningItem,
}
_ID_BYTES = 16
_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "mcp_call": "mcp",
    MCP_LIST: "mcpl",
    APPROVAL_REQUEST: "mcpr",
    APPROVAL_RESPONSE: "mcpa",
    "reasoning": "rs",
}
# Items of unsupported tools, which clients of other servers may send.
_TOOLS = ("web_search", "file_search", "code_interpreter", "computer", "image_generation", "local_shell", "shell")
_SKIPPED = frozenset(
    f"{tool}_{what}" for tool in (*_TOOLS, "apply_patch", "tool_search") for what in ("call", "call_output", "output")
)
_WITH_ARGUMENTS = ("function_call", "mcp_call", APPROVAL_REQUEST)
OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def new_item_id(kind: str) -> str:
    """Returns a new id for an item of this type."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(_ID_BYTES)}"


def input_items(given: str | Sequence[Item], field: str = "input") -> list[Item]:
    """Validates the request's items and gives each an id. Raises InvalidRequest that names the item."""
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "id": new_item_id("message"), "role": "user", "content": content}]
    if not given:
        raise InvalidRequest(f"{field} is empty; give at least one item", field=field)
    ids = secrets.token_hex(_ID_BYTES * len(given))  # one system call, not one per item
    items = [
        _checked(item, f"{field}.{index}", ids[2 * _ID_BYTES * index : 2 * _ID_BYTES * (index + 1)])
        for index, item in enumerate(given)
        if not _is_skipped(item)
    ]
    if not items:
        raise InvalidRequest(f"{field} has no supported item", field=field)
    return items


def ignored_items(given: str | Sequence[Item], field: str = "input") -> list[str]:
    """Returns the names of the items that `input_items` skips."""
    if isinstance(given, str):
        return []
    return [f"{field}[{index}] ({item['type']})" for index, item in enumerate(given) if _is_skipped(item)]


def _is_skipped(item: Item) -> bool:
    kind = item.get("type")
    return isinstance(kind, str) and kind in _SKIPPED


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the items as chat messages. Consecutive items of the assistant become one message."""
    check_arguments((item["arguments"] for item in items if item["type"] in _WITH_ARGUMENTS), "input")
    requests = {item["id"]: item for item in items if item["type"] == APPROVAL_REQUEST}
    chat: list[dict[str, Any]] = []
    if instructions:
        chat.append({"role": "system", "content": instructions})
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            chat.append({"role": item["role"], "content": _joined(item["content"])})
        elif kind in OUTPUTS:
            chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": _joined(item["output"])})
        elif kind == "mcp_call":
            _add_answered_call(chat, item, mcp_output(item))
        elif kind == APPROVAL_RESPONSE:
            # An approved call follows as an item of its own.
            request = requests.get(item["approval_request_id"])
            if request is not None and not item["approve"]:
                _add_answered_call(chat, request, f"{_DENIED} {item.get('reason') or ''}".strip())
        elif kind not in (MCP_LIST, APPROVAL_REQUEST):
            _add_to_assistant(_open_assistant(chat, kind), item)
    return [_joined_pieces(message) if message["role"] == "assistant" else message for message in chat]


def mcp_output(item: Item) -> str:
    """Returns what the model is shown of a call's result."""
    error = item.get("error")
    if not error:
        return item.get("output") or ""
    if isinstance(error, str):
        return f"Error: {error}"
    if error.get("type") == "mcp_tool_execution_error":
        return f"Error: {_joined(error.get('content') or ())}"
    return f"Error: {error.get('message') or error.get('type')}"


def _checked(item: Item, where: str, new_id: str) -> Item:
    kind = item.get("type", "message")
    struct = _KINDS.get(kind) if isinstance(kind, str) else None
    if struct is None:
        allowed = ", ".join(_KINDS)
        raise InvalidRequest(f"{where}.type is {kind!r}; give one of {allowed}", field=f"{where}.type")
    try:
        checked = msgspec.convert(item, struct)
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), struct, where) from None
    for name in ("content", "output", "summary"):
        parts = getattr(checked, name, None)
        if isinstance(parts, list):
            _check_parts(parts, f"{where}.{name}", kind)
    item_id = item.get("id")
    return {**item, "type": kind, "id": item_id if isinstance(item_id, str) else f"{_PREFIXES[kind]}_{new_id}"}


def _check_parts(parts: Sequence[Item], where: str, kind: str) -> None:
    allowed = ("reasoning_text", "summary_text") if kind == "reasoning" else _TEXT_PARTS
    for index, part in enumerate(parts):
        name = part.get("type")
        if name not in allowed:
            raise InvalidRequest(
                f"{where}.{index}.type is {name!r}; give one of {', '.join(allowed)}",
                field=f"{where}.{index}.type",
            )
        key = "refusal" if name == "refusal" else "text"
        if not isinstance(part.get(key), str):
            raise InvalidRequest(f"{where}.{index}.{key} must be a string", field=f"{where}.{index}.{key}")


def _open_assistant(chat: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Returns the assistant's message to extend; reasoning after other content starts a new one.

    Its texts are lists of pieces until all items are read, since adding to a text copies it.
    """
    last = chat[-1] if chat else {}
    goes_on = last.get("role") == "assistant"
    if goes_on and kind == "reasoning" and (last["content"] or "tool_calls" in last):
        goes_on = False
    if not goes_on:
        last = {"role": "assistant", "content": []}
        chat.append(last)
    return last


def _add_to_assistant(message: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        message["content"] += filter(None, [_joined(item["content"])])
    elif item["type"] == "reasoning":
        text = _joined(item.get("content") or item.get("summary") or [])
        pieces = message.setdefault("reasoning", [])
        if pieces == [""]:
            pieces.clear()
        pieces.append(text)
    else:
        name = ToolName(item["name"], item.get("namespace") or "").flat
        arguments = {INPUT: item["input"]} if item["type"] == "custom_tool_call" else read_arguments(item["arguments"])
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _add_answered_call(chat: list[dict[str, Any]], item: Item, output: str) -> None:
    """Adds a call and its result."""
    call_id = item.get("call_id") or item["id"]
    name = ToolName(item["name"], server=item["server_label"]).flat
    function = {"name": name, "arguments": read_arguments(item["arguments"])}
    call = {"id": call_id, "type": "function", "function": function}
    _open_assistant(chat, "mcp_call").setdefault("tool_calls", []).append(call)
    chat.append({"role": "tool", "tool_call_id": call_id, "content": output})


def _joined_pieces(message: dict[str, Any]) -> dict[str, Any]:
    joined = {**message, "content": "".join(message["content"])}
    return joined if "reasoning" not in message else {**joined, "reasoning": "\n".join(message["reasoning"])}


def _joined(content: str | Sequence[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)
