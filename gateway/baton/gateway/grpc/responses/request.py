"""Converts CreateResponseRequest to REST's request, so that both are validated and served alike. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.gateway.bodies.decoder import wrong_field
from baton.gateway.fields.extra_args import xargs_of
from baton.gateway.grpc.chat import json_object, variables_of
from baton.gateway.models.constraints.structured_output import RequestedConstraint, check_constraint
from baton.gateway.responses.request import WITH_LOGPROBS
from baton.gateway.responses.types import ResponsesRequest
from baton.gateway.serving.chat import rename_field
from baton.rpc.errors import InvalidRequest, ServiceError
from baton.v1 import inference_pb2, response_pb2, types_pb2

# Maps REST's field names to gRPC's.
_NAMES: Mapping[str, str] = {
    **{
        name: f"sampling.{name}"
        for name in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
        if not name.startswith("logit_bias")
    },
    **{name: f"stop.{name}" for name in types_pb2.StopConditions.DESCRIPTOR.fields_by_name},
    "logit_bias": "sampling.logit_bias_token_ids",
    "vllm_xargs": "sampling.extra_args",
    "max_output_tokens": "stop.max_tokens",
    "top_logprobs": "sampling.logprobs",
    "chat_template_kwargs": "template_variables",
    "chat.template_variables": "template_variables",
    "chat.reasoning_effort": "reasoning_effort",
    "reasoning.effort": "reasoning_effort",
    "tool_choice.name": "tool_choice.function_name",
    "structured_outputs": "constraint",
    "text.format": "constraint",
    "parallel_tool_calls": "disable_parallel_tool_calls",
    "background": "background",
    "conversation": "conversation_id",
}
# Fields that already have gRPC's names.
_OWN = re.compile(r"(sampling|stop)\.[a-z]")
_ITEM_FIELD = re.compile(r"input\.(\d+)\.(.+)")
_TOOL_FIELD = re.compile(r"(tools\.\d+)\.parameters$")
_REFUSED = ("prompt_logprobs", "logprob_token_ids", "forbidden_sequences", "reasoning_limit")
_MODES: Mapping[int, str | None] = {
    inference_pb2.TOOL_MODE_UNSPECIFIED: None,
    inference_pb2.TOOL_MODE_AUTO: "auto",
    inference_pb2.TOOL_MODE_NONE: "none",
    inference_pb2.TOOL_MODE_REQUIRED: "required",
}


def request_of(request: inference_pb2.CreateResponseRequest) -> ResponsesRequest:
    """Returns the streamed REST request. Raises InvalidRequest with REST's or gRPC's field names; see name_field."""
    fields = {
        "model": request.model or None,
        "input": [given_item(item, f"input.{index}") for index, item in enumerate(request.input)],
        "instructions": request.instructions or None,
        "previous_response_id": request.previous_response_id or None,
        "conversation": request.conversation_id or None,
        "background": request.background,
        "store": not request.do_not_store,
        "stream": True,
        "tools": [_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools)] or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": not request.disable_parallel_tool_calls,
        "chat_template_kwargs": variables_of(request),
        "include_reasoning": not request.omit_reasoning,
        "truncation": "auto" if request.truncate_conversation else "disabled",
        "metadata": dict(request.metadata),
        "priority": request.priority,
        "cache_salt": request.cache_salt or None,
        "request_id": request.request_id or None,
        "skip_special_tokens": not request.keep_special_tokens,
        **_sampling(request.sampling),
        **_stop(request.stop),
    }
    if request.HasField("thinking_token_budget"):
        fields["thinking_token_budget"] = request.thinking_token_budget
    try:
        return msgspec.convert(fields, ResponsesRequest)
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), ResponsesRequest) from None


def requested_constraint(request: inference_pb2.CreateResponseRequest) -> RequestedConstraint | None:
    """Returns the constraint of the request, or None. Raises InvalidRequest."""
    if not request.HasField("constraint"):
        return None
    check_constraint(request.constraint)
    return RequestedConstraint(request.constraint, "constraint")


def name_field(error: ServiceError, request: inference_pb2.CreateResponseRequest) -> None:
    """Renames the error's field to the one in this request."""
    field = error.field
    if _OWN.match(field):
        return
    if found := _ITEM_FIELD.fullmatch(field):
        name_item_field(error, "input", request.input, int(found[1]), found[2])
    elif found := _TOOL_FIELD.fullmatch(field):
        rename_field(error, {field: f"{found[1]}.parameters_schema"})
    else:
        rename_field(error, _NAMES)


def name_item_field(
    error: ServiceError, where: str, items: Sequence[response_pb2.ResponseItem], index: int, rest: str
) -> None:
    """Renames a field of an item from REST's name `rest` to the one in ResponseItem."""
    kind = items[index].WhichOneof("item") if index < len(items) else None
    name = "text" if rest.startswith(("content", "summary")) else rest
    place = f"{where}.{index}"
    named = f"{place}.id" if rest == "id" else f"{place}.{kind}.{name}" if kind else f"{place}.item"
    rename_field(error, {error.field: named})


def given_item(item: response_pb2.ResponseItem, where: str) -> dict[str, Any]:
    """Converts an item to REST's form. Raises InvalidRequest."""
    kind = item.WhichOneof("item")
    named = {"id": item.id} if item.id else {}
    match kind:
        case "message":
            message = item.message
            part = "output_text" if message.role == "assistant" else "input_text"
            content = [{"type": part, "text": message.text}]
            return {"type": "message", **named, "role": message.role, "content": content}
        case "reasoning":
            content = [{"type": "reasoning_text", "text": item.reasoning.text}]
            return {"type": "reasoning", **named, "summary": [], "content": content}
        case "function_call":
            call = item.function_call
            arguments = call.arguments or "{}"
            fields = {"call_id": call.call_id, "name": call.name, "arguments": arguments}
            return {"type": "function_call", **named, **fields}
        case "function_output":
            output = item.function_output
            return {"type": "function_call_output", **named, "call_id": output.call_id, "output": output.output}
        case _:
            raise InvalidRequest(
                f"{where}.item is missing; give message, reasoning, function_call or function_output", field=where
            )


def _tool(tool: inference_pb2.Tool, where: str) -> dict[str, Any]:
    field = f"{where}.parameters_schema"
    schema = json_object(tool.parameters_schema, field) if tool.parameters_schema else None
    described = {"description": tool.description} if tool.description else {}
    return {"type": "function", "name": tool.name, **described, "parameters": schema, "strict": tool.strict}


def _tool_choice(choice: inference_pb2.ToolChoice) -> str | dict[str, Any] | None:
    if choice.HasField("function_name"):
        return {"type": "function", "name": choice.function_name}
    if choice.mode not in _MODES:
        raise InvalidRequest(f"tool_choice.mode {choice.mode} is unknown", field="tool_choice.mode")
    return _MODES[choice.mode]


def _sampling(sampling: types_pb2.SamplingParams) -> dict[str, Any]:
    given: dict[str, Any] = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    for name in _REFUSED:
        if name in given:
            raise InvalidRequest(
                f"sampling.{name} is not supported for responses; leave it out", field=f"sampling.{name}"
            )
    token_ids, values = given.pop("logit_bias_token_ids", ()), given.pop("logit_bias_values", ())
    if len(token_ids) != len(values):
        field = "sampling.logit_bias_values"
        raise InvalidRequest(f"{field} has {len(values)} values for {len(token_ids)} tokens", field=field)
    lists = ("allowed_token_ids", "bad_words")
    fields: dict[str, Any] = {name: list(value) if name in lists else value for name, value in given.items()}
    if "extra_args" in fields:
        fields["vllm_xargs"] = xargs_of(fields.pop("extra_args"))
    if token_ids:
        fields["logit_bias"] = dict(zip(token_ids, values, strict=True))
    if sampling.HasField("seed"):  # REST's seeds are signed
        fields["seed"] = sampling.seed - 2**64 if sampling.seed >= 2**63 else sampling.seed
    if "logprobs" in fields:
        fields["top_logprobs"] = fields.pop("logprobs")
        fields["include"] = [WITH_LOGPROBS]
    return fields


def _stop(stop: types_pb2.StopConditions) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "min_tokens": stop.min_tokens,
        "stop_token_ids": list(stop.stop_token_ids) or None,
        "ignore_eos": stop.ignore_eos,
        "stop": list(stop.stop) or None,
        "include_stop_str_in_output": stop.include_stop_str_in_output,
    }
    if stop.HasField("max_tokens"):
        fields["max_output_tokens"] = stop.max_tokens
    if stop.HasField("repetition_detection"):
        wanted = stop.repetition_detection
        names = ("min_pattern_size", "max_pattern_size", "min_count")
        fields["repetition_detection"] = {name: getattr(wanted, name) for name in names}
    return fields
