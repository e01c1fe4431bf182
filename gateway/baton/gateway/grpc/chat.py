"""Chats of the public gRPC API: converts them for templates, tools and output parsers. Makes no calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from baton.gateway.bodies.json_size import check_json_size
from baton.gateway.fields.chat import check_continued, check_item_count
from baton.gateway.fields.validation import check_variables
from baton.gateway.models.prompts.call_arguments import check_arguments, read_arguments
from baton.gateway.models.served import ServedModel
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest
from baton.v1 import inference_pb2

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_MODES: Mapping[int, ToolMode] = {
    inference_pb2.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO,
    inference_pb2.TOOL_MODE_AUTO: ToolMode.AUTO,
    inference_pb2.TOOL_MODE_NONE: ToolMode.NONE,
    inference_pb2.TOOL_MODE_REQUIRED: ToolMode.REQUIRED,
}


@dataclass(frozen=True, slots=True)
class Chat:
    """A validated chat."""

    messages: list[dict[str, Any]]  # in the form that templates expect
    use: ToolUse
    variables: dict[str, Any]
    continues_last: bool  # whether the output continues the last message
    include_reasoning: bool
    documents: list[dict[str, str]] | None
    template: str | None  # replaces the model's own
    opens_answer: bool
    add_special_tokens: bool


def chat_of(prompt: inference_pb2.ChatPrompt, max_items: int) -> Chat:
    """Validates and converts a chat.

    Raises InvalidRequest, ContextTooLong with the field names of the public messages.
    """
    num_calls = sum(len(message.tool_calls) for message in prompt.messages)
    check_item_count(len(prompt.messages) + len(prompt.tools) + num_calls + len(prompt.documents), max_items)
    if prompt.continue_final_message and prompt.messages:
        check_continued(prompt.messages[-1].role)
    return Chat(
        messages=_messages(prompt.messages),
        use=_tool_use(prompt),
        variables=variables_of(prompt),
        continues_last=prompt.continue_final_message,
        include_reasoning=not prompt.omit_reasoning,
        documents=_documents(prompt),
        template=prompt.chat_template or None,
        opens_answer=not prompt.continue_final_message and not prompt.omit_generation_prompt,
        add_special_tokens=prompt.add_special_tokens,
    )


async def encode_chat(model: ServedModel, chat: Chat, whole: bool = False) -> list[int]:
    """Returns the prompt's token ids. `whole` allows more than the context. Raises InvalidRequest, ContextTooLong."""
    model.check_tools(chat.use)
    return await model.encode_chat(
        chat.messages,
        add_generation_prompt=chat.opens_answer,
        continue_final_message=chat.continues_last,
        tools=[tool.for_template() for tool in chat.use.tools] if chat.use.active else None,
        documents=chat.documents,
        variables=chat.variables,
        add_special_tokens=chat.add_special_tokens,
        template=chat.template,
        whole=whole,
    )


def _messages(messages: Sequence[inference_pb2.ChatMessage]) -> list[dict[str, Any]]:
    check_arguments((call.arguments for message in messages for call in message.tool_calls), "chat.messages")
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        field = f"chat.messages.{index}"
        if not message.role:
            raise InvalidRequest(f"message {index} has no role", field=f"{field}.role")
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        for name in ("name", "tool_call_id", "reasoning"):
            if value := getattr(message, name):
                entry[name] = value
        if message.tool_calls:
            entry["content"] = message.content or None
            entry["tool_calls"] = [
                _call(call, f"{field}.tool_calls.{at}") for at, call in enumerate(message.tool_calls)
            ]
        result.append(entry)
    return result


def _call(call: inference_pb2.ToolCall, field: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidRequest(f"{field} has no name", field=f"{field}.name")
    function = {"name": call.name, "arguments": read_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _tool_use(prompt: inference_pb2.ChatPrompt) -> ToolUse:
    tools = tuple(_tool(tool, f"chat.tools.{index}") for index, tool in enumerate(prompt.tools))
    choice = prompt.tool_choice
    name = choice.function_name
    mode = ToolMode.NAMED if choice.HasField("function_name") else _MODES.get(choice.mode)
    if mode is None:
        raise InvalidRequest(f"tool_choice.mode {choice.mode} is unknown", field="chat.tool_choice.mode")
    if not tools:
        if mode in (ToolMode.NAMED, ToolMode.REQUIRED):
            raise InvalidRequest("tool_choice needs tools", field="chat.tool_choice")
        return ToolUse()
    if mode is ToolMode.NAMED and all(tool.name != name for tool in tools):
        raise InvalidRequest(f"the function {name!r} is not in tools", field="chat.tool_choice.function_name")
    return ToolUse(tools, mode, name, parallel=not prompt.disable_parallel_tool_calls)


def _tool(tool: inference_pb2.Tool, field: str) -> Tool:
    if _TOOL_NAME.fullmatch(tool.name) is None:
        raise InvalidRequest(
            f"{field}.name {tool.name!r} is not allowed; give 1 to 256 letters, digits and any of _ . : / -",
            field=f"{field}.name",
        )
    schema = json_object(tool.parameters_schema, f"{field}.parameters_schema") if tool.parameters_schema else None
    return Tool(tool.name, tool.description or None, schema, tool.strict)


def json_object(text: str, field: str) -> dict[str, Any]:
    """Parses a JSON object. Raises InvalidRequest."""
    data = text.encode()
    check_json_size(data, field)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON object, not {type(value).__name__}", field=field)
    return value


def variables_of(prompt: inference_pb2.ChatPrompt | inference_pb2.CreateResponseRequest) -> dict[str, Any]:
    """Returns the template's variables. Raises InvalidRequest."""
    variables = {name: _plain(value) for name, value in prompt.template_variables.items()}
    check_variables(variables)
    if prompt.reasoning_effort:
        if prompt.reasoning_effort not in inference_pb2.ReasoningEffort.values():
            raise InvalidRequest(
                f"reasoning_effort {prompt.reasoning_effort} is unknown", field="chat.reasoning_effort"
            )
        word = inference_pb2.ReasoningEffort.Name(prompt.reasoning_effort).removeprefix("REASONING_EFFORT_").lower()
        variables.setdefault("reasoning_effort", word)
    return variables


def _plain(value: inference_pb2.TemplateValue) -> Any:
    """Converts a value to plain Python. Protobuf limits the nesting to 100 levels."""
    match value.WhichOneof("value"):
        case None:
            return None
        case "list":
            return [_plain(each) for each in value.list.values]
        case "entries":
            return {name: _plain(each) for name, each in value.entries.values.items()}
        case kind:
            return getattr(value, kind)


def _documents(prompt: inference_pb2.ChatPrompt) -> list[dict[str, str]] | None:
    """Returns the documents in the form that templates expect, or None without documents."""
    documents = [
        {"title": document.title, "text": document.text} if document.title else {"text": document.text}
        for document in prompt.documents
    ]
    return documents or None
