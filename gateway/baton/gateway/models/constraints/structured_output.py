"""Converts the constraint fields of OpenAI and vLLM to the contract's Constraint.

Checks only sizes and forms here; workers compile constraints and reject those they do not support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from baton.gateway.bodies.json_values import checked_json
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.output_format import OutputFormat
from baton.gateway.parsing.tool import ToolMode, ToolUse
from baton.gateway.schemas.requests import GenerationFields, ResponseFormat, StructuredOutputs
from baton.rpc.errors import InvalidRequest, ServiceError
from baton.v1 import types_pb2

MAX_BYTES = 256 * 1024  # sum over all texts
MAX_CHOICES = 4096

_PROMPT_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RequestedConstraint:
    """A constraint and the request's field that it came from."""

    constraint: types_pb2.Constraint
    field: str


def constraint_of(request: GenerationFields, use: ToolUse | None = None) -> RequestedConstraint | None:
    """Returns the constraint of the request's fields, or None if there is none or tools must be called.

    Raises InvalidRequest.
    """
    requested = _of_fields(request)
    if requested is None or use is None or use.mode not in (ToolMode.NAMED, ToolMode.REQUIRED):
        return requested
    if use.mode is ToolMode.NAMED and request.structured_outputs is not None:
        raise InvalidRequest(
            "structured_outputs is not allowed if tool_choice names a function", field="structured_outputs"
        )
    return None


def unless_tools_called(requested: RequestedConstraint, use: ToolUse) -> RequestedConstraint | None:
    """Returns the constraint, or None if tools must be called instead."""
    return None if use.mode in (ToolMode.NAMED, ToolMode.REQUIRED) else requested


def check_constraint(constraint: types_pb2.Constraint, field: str = "constraint") -> None:
    """Raises InvalidRequest for constraints that every worker would reject, as far as the check is cheap."""
    form = constraint.WhichOneof("form")
    if form is None:
        raise InvalidRequest(f"{field} is empty; set one of its fields", field=field)
    texts = constraint.choices.texts if form == "choices" else [getattr(constraint, form)]
    sizes = [len(text.encode()) for text in texts if isinstance(text, str)]
    _check_size(sum(sizes), field)
    if form == "choices" and not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequest(f"{field} has {len(texts)} texts; give 1 to {MAX_CHOICES}", field=field)
    if 0 in sizes:
        raise InvalidRequest(f"{field} must not be empty", field=field)


def with_reasoning(
    constraint: types_pb2.Constraint, formats: OutputFormat, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
) -> types_pb2.Constraint:
    """Returns the constraint, delayed until the end of reasoning for a model that may reason first."""
    if constraint.reasoning_end_token_ids:
        return constraint
    start, end = reasoning_tokens(formats, tokenizer, prompt_token_ids)
    # Otherwise the model would start an unrequested reasoning to avoid an unlikely constraint.
    unasked = start is not None and formats.reasoning is not None and formats.reasoning.prompted
    if not end or unasked:
        return constraint
    delayed = types_pb2.Constraint(reasoning_end_token_ids=end, reasoning_start_token_id=start)
    delayed.MergeFrom(constraint)
    return delayed


def name_field(error: ServiceError, field: str) -> None:
    """Renames the contract's field in a worker's error to the client's field."""
    inner, _, _ = error.field.partition(".")
    if field and inner == "constraint":
        error.message = error.message.replace(error.field, field, 1)
        error.field = field


def reasoning_tokens(
    formats: OutputFormat, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
) -> tuple[int | None, list[int]]:
    """Returns the token that may open the reasoning (None if it is already open) and those that end it (empty without
    reasoning).
    """
    if formats.tools is not None and formats.tools.has_reasoning:
        return None, tokenizer.encode(formats.tools.answer_mark, add_special_tokens=False)
    reasoning = formats.reasoning
    if reasoning is None:
        return None, []
    if not reasoning.close_tag:
        return None, tokenizer.encode(reasoning.answer_mark, add_special_tokens=False)
    end = tokenizer.encode(reasoning.close_tag, add_special_tokens=False)
    prompt_end = tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:])
    if reasoning.is_open(prompt_end):
        return None, end
    start = tokenizer.encode(reasoning.open_tag, add_special_tokens=False)
    # A prompt that closed the reasoning disables it, and an opening of several tokens looks like an answer.
    if prompt_end.rstrip().endswith(reasoning.close_tag) or len(start) != 1:
        return None, []
    return start[0], end


def _of_fields(request: GenerationFields) -> RequestedConstraint | None:
    of_format = None if request.response_format is None else _of_response_format(request.response_format)
    of_outputs = None if request.structured_outputs is None else _of_structured_outputs(request.structured_outputs)
    if of_format is not None and of_outputs is not None:
        raise InvalidRequest(
            "response_format and structured_outputs exclude each other; set one", field="structured_outputs"
        )
    return of_format or of_outputs


def _of_response_format(wanted: ResponseFormat) -> RequestedConstraint | None:
    field = "response_format"
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return RequestedConstraint(types_pb2.Constraint(json_object=types_pb2.Constraint.JsonObject()), field)
    if wanted.type == "structural_tag":
        fields = ("format", "structures", "triggers")
        tag = {name: value for name in fields if (value := getattr(wanted, name)) is not None}
        text = checked_json({"type": "structural_tag", **tag}, field)
        return _checked(RequestedConstraint(types_pb2.Constraint(structural_tag=text), field))
    described = wanted.json_schema
    if described is None:
        raise InvalidRequest(
            "response_format.json_schema is required if response_format.type is json_schema",
            field="response_format.json_schema",
        )
    field = "response_format.json_schema.schema"
    if described.schema is None:
        raise InvalidRequest(f"{field} is required", field=field)
    # Without `strict`, OpenAI accepts any schema and follows it as far as possible.
    constraint = types_pb2.Constraint(json_schema=checked_json(described.schema, field), lenient=not described.strict)
    return _checked(RequestedConstraint(constraint, field))


def _of_structured_outputs(wanted: StructuredOutputs) -> RequestedConstraint:
    names = ("json", "regex", "choice", "grammar", "structural_tag")
    given = [name for name in names if getattr(wanted, name) is not None]
    given += ["json_object"] if wanted.json_object else []
    if len(given) != 1:
        shown = ", ".join(given) if given else "none of them"
        raise InvalidRequest(
            f"structured_outputs must have exactly one of {', '.join(names)} and json_object; it has {shown}",
            field="structured_outputs",
        )
    field = f"structured_outputs.{given[0]}"
    constraint = types_pb2.Constraint(
        no_whitespace=bool(wanted.disable_any_whitespace),
        no_additional_properties=bool(wanted.disable_additional_properties),
        whitespace_pattern=wanted.whitespace_pattern or "",
    )
    if wanted.choice is not None:
        constraint.choices.SetInParent()
        constraint.choices.texts.extend(wanted.choice)
    elif wanted.json is not None:
        constraint.json_schema = _text_or_dumped(wanted.json, field)
    elif wanted.structural_tag is not None:
        constraint.structural_tag = _text_or_dumped(wanted.structural_tag, field)
    elif wanted.regex is not None:
        constraint.regex = wanted.regex
    elif wanted.grammar is not None:
        constraint.grammar = wanted.grammar
    else:
        constraint.json_object.SetInParent()
    return _checked(RequestedConstraint(constraint, field))


def _checked(requested: RequestedConstraint) -> RequestedConstraint:
    check_constraint(requested.constraint, requested.field)
    return requested


def _check_size(num_bytes: int, field: str) -> None:
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(f"{field} has {num_bytes} bytes; at most {MAX_BYTES} are allowed", field=field)


def _text_or_dumped(value: Any, field: str) -> str:
    if not isinstance(value, str):
        return checked_json(value, field)
    _check_size(len(value), field)
    try:
        return checked_json(orjson.loads(value), field)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from None
