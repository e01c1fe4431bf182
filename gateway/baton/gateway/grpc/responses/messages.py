"""Converts REST's responses, items and events to messages of the public gRPC API. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import orjson

from baton.gateway.responses.tools import ToolName, arguments_of
from baton.gateway.responses.types import Response
from baton.v1 import response_pb2 as pb

# Events whose content no other event repeats.
_DELTAS: Mapping[str, str] = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "arguments",
}
_ITEMS: Mapping[str, str] = {
    "response.output_item.added": "item_added",
    "response.output_item.done": "item_done",
}
_STATUSES: Mapping[str, pb.ResponseStatus.ValueType] = {
    name.removeprefix("RESPONSE_STATUS_").lower(): value for name, value in pb.ResponseStatus.items()
}


def response_of(response: Response) -> pb.ModelResponse:
    return _response(msgspec.to_builtins(response))


def event_of(event: str | bytes) -> pb.ResponseEvent | None:
    """Converts an event of REST's streams. Returns None for an event whose content other events repeat."""
    data = orjson.loads((event.encode() if isinstance(event, str) else event).partition(b"\ndata: ")[2])
    name, number = data["type"], data["sequence_number"]
    if "response" in data:
        return pb.ResponseEvent(sequence_number=number, response=_response(data["response"]))
    if field := _DELTAS.get(name):
        delta = pb.TextDelta(output_index=data["output_index"], text=data["delta"])
        delta.logprobs.extend(_logprobs(data.get("logprobs") or ()))
        return pb.ResponseEvent(sequence_number=number, **{field: delta})  # type: ignore[arg-type]
    if field := _ITEMS.get(name):
        item = pb.ItemEvent(output_index=data["output_index"], item=item_of(data["item"], True))
        return pb.ResponseEvent(sequence_number=number, **{field: item})  # type: ignore[arg-type]
    return None


def item_of(item: Mapping[str, Any], with_logprobs: bool = False) -> pb.ResponseItem:
    """Converts an item of a conversation. Items of MCP servers have only their id and status.

    Only output has log-probabilities; those in a client's input are not validated.
    """
    message = pb.ResponseItem(id=item["id"], status=_status(item.get("status")))
    match item["type"]:
        case "message":
            message.message.role = item["role"]
            message.message.text = _joined(item["content"])
            if with_logprobs:
                for part in item["content"]:
                    message.message.logprobs.extend(_logprobs(part.get("logprobs") or ()))
        case "reasoning":
            message.reasoning.text = _joined(item.get("content") or item.get("summary") or "")
        case "function_call":
            name = ToolName(item["name"], item.get("namespace") or "").flat
            call = pb.ItemFunctionCall(call_id=item["call_id"], name=name, arguments=item["arguments"])
            message.function_call.CopyFrom(call)
        case "custom_tool_call":
            arguments = arguments_of(item["input"])
            call = pb.ItemFunctionCall(call_id=item["call_id"], name=item["name"], arguments=arguments)
            message.function_call.CopyFrom(call)
        case "function_call_output" | "custom_tool_call_output":
            output = pb.ItemFunctionOutput(call_id=item["call_id"], output=_joined(item["output"]))
            message.function_output.CopyFrom(output)
    return message


def _response(response: Mapping[str, Any]) -> pb.ModelResponse:
    message = pb.ModelResponse(
        id=response["id"],
        status=_status(response["status"]),
        model=response["model"],
        created_at_seconds=response["created_at"],
        completed_at_seconds=response.get("completed_at") or 0,
        background=response["background"],
        stored=response["store"],
        output=[item_of(item, True) for item in response["output"]],
        previous_response_id=response.get("previous_response_id") or "",
        instructions=response.get("instructions") or "",
        conversation_id=(response.get("conversation") or {}).get("id", ""),
        metadata=response["metadata"],
    )
    if usage := response.get("usage"):
        message.usage.input_tokens = usage["input_tokens"]
        message.usage.output_tokens = usage["output_tokens"]
        message.usage.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
        message.usage.reasoning_tokens = usage["output_tokens_details"]["reasoning_tokens"]
    if error := response.get("error"):
        code = pb.ResponseErrorCode.Value(f"RESPONSE_ERROR_CODE_{error['code'].upper()}")
        message.error.CopyFrom(pb.ResponseError(code=code, message=error["message"]))
    return message


def _status(name: object) -> pb.ResponseStatus.ValueType:
    """Returns an item's status. Items given by clients may have any value."""
    return (
        _STATUSES.get(name, pb.RESPONSE_STATUS_UNSPECIFIED) if isinstance(name, str) else pb.RESPONSE_STATUS_UNSPECIFIED
    )


def _joined(content: str | Iterable[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


def _logprobs(entries: Iterable[Mapping[str, Any]]) -> list[pb.TextLogprob]:
    return [
        pb.TextLogprob(
            token=entry["token"],
            logprob=entry["logprob"],
            utf8=bytes(entry["bytes"] or ()),
            top=_logprobs(entry.get("top_logprobs") or ()),
        )
        for entry in entries
    ]
