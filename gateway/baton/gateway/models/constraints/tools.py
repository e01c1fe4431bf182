"""Constraints for the tool calls that a request demands, and the checks for what a model cannot do."""

from __future__ import annotations

from dataclasses import replace

import orjson

from baton.gateway.bodies.json_values import check_json
from baton.gateway.models.constraints.added_tokens import AddedId, with_special_tokens
from baton.gateway.models.constraints.form_size import check_form_size
from baton.gateway.parsing.grammar.forms import Form
from baton.gateway.parsing.grammar.schema_reader import Inexpressible
from baton.gateway.parsing.grammar.tool_schemas import constraint_of
from baton.gateway.parsing.output_format import OutputFormat, ToolFormat
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

# White space between JSON tokens. Programs read the arguments, so blank lines would only cost tokens.
_SPACE = "[ ]"
_FORCED = (ToolMode.REQUIRED, ToolMode.NAMED)


def check_tools(use: ToolUse, output_format: OutputFormat, model: str) -> None:
    """Raises InvalidRequest for tools that a model of this format does not support."""
    if not use.active:
        return
    _check_parameters(use)
    tools, reasoning = output_format.tools, output_format.reasoning
    if use.mode in _FORCED:
        if not _has_forced_form(output_format) and reasoning is not None and not reasoning.close_tag:
            raise InvalidRequest(
                f"tool_choice: {model} writes its calls among its reasoning, so that a call is enforced only with the "
                f"tool parser of the same format: start the gateway with --tool-call-parser "
                f"{output_format.reasoning_choice.name}, or use auto",
                field="tool_choice",
            )
        return
    if tools is None:
        raise InvalidRequest(
            f"tools: the chat template of {model} has no known tool format, so its calls cannot be parsed. "
            f"Start the gateway with --tool-call-parser, one of {', '.join(TOOL_FORMATS)}, and with --chat-template "
            "if the model's own template does not render tools",
            field="tools",
        )
    for index, tool in enumerate(use.tools):
        if tool.strict:
            _check_strict(tool, index, tools, model)


def _check_parameters(use: ToolUse) -> None:
    """Raises InvalidRequest for a schema that is too large for a prompt or a constraint."""
    for index, tool in enumerate(use.tools):
        if tool.parameters is not None:
            check_json(tool.parameters, f"{_field(tool, index)}.parameters")


def _field(tool: Tool, index: int) -> str:
    return f"tools.{index if tool.place is None else tool.place}.function"


def _check_strict(tool: Tool, index: int, tools: ToolFormat, model: str) -> None:
    field = _field(tool, index)
    advice = "leave strict out, or set tool_choice to required"
    if tools.syntax is None and tools.output_form is None:
        raise InvalidRequest(
            f"{field}.strict: {model} cannot enforce a schema with tool_choice auto, because its parser does "
            f"not define how calls are written; {advice}",
            field=f"{field}.strict",
        )
    if tools.syntax is None:
        return
    try:
        check_form_size(tools.syntax.within_text((tool,)), f"{field}.parameters")
    except Inexpressible as error:
        raise InvalidRequest(
            f"{field}.parameters: the call format of {model} cannot express {error}; {advice}",
            field=f"{field}.parameters",
        ) from None


def is_strict(use: ToolUse) -> bool:
    """Returns whether optional calls must follow a schema."""
    return use.mode is ToolMode.AUTO and any(tool.strict for tool in use.tools)


def holds_whole_output(use: ToolUse, output_format: OutputFormat) -> bool:
    """Returns whether the constraint of calls also covers the reasoning."""
    if use.mode in _FORCED:
        return _has_forced_form(output_format)
    return is_strict(use) and output_format.tools is not None and output_format.tools.output_form is not None


def _has_forced_form(output_format: OutputFormat) -> bool:
    return output_format.tools is not None and output_format.tools.forced_form is not None


def tool_constraint(use: ToolUse, output_format: OutputFormat, added_id: AddedId) -> types_pb2.Constraint | None:
    """Returns the constraint that follows the reasoning, or None if the output is free. Raises InvalidRequest."""
    tools = output_format.tools
    form = None if tools is None else _form(use, tools)
    if tools is None or form is None:
        return _schema_constraint(use)
    lacking = [text for text in tools.special_tokens if added_id(text) is None]
    if tools.output_form is not None and lacking:
        raise InvalidRequest(
            f"tools: calls are enforced with special tokens that the model's tokenizer lacks: {', '.join(lacking)}",
            field="tools",
        )
    check_form_size(form, "tools")
    form = with_special_tokens(form, tools.special_tokens, added_id)
    tag = {"type": "structural_tag", "format": form}
    return types_pb2.Constraint(
        structural_tag=orjson.dumps(tag).decode(), lenient=_is_lenient(use), whitespace_pattern=_SPACE
    )


def _schema_constraint(use: ToolUse) -> types_pb2.Constraint | None:
    schema = constraint_of(use)
    if schema is None:
        return None
    text = orjson.dumps(schema).decode()
    return types_pb2.Constraint(json_schema=text, lenient=_is_lenient(use), whitespace_pattern=_SPACE)


def _is_lenient(use: ToolUse) -> bool:
    return not any(tool.strict for tool in use.tools)


def _form(use: ToolUse, tools: ToolFormat) -> Form | None:
    """Returns the form of the output in the model's own format, or None if it has none."""
    if use.mode in _FORCED and tools.forced_form is not None:
        # The arguments of calls that are demanded follow their schemas, strict or not.
        called = [replace(tool, strict=True) for tool in use.tools if use.name in ("", tool.name)]
        return tools.forced_form(called, use.parallel and use.mode is ToolMode.REQUIRED)
    if not is_strict(use):
        return None
    if tools.output_form is not None:
        return tools.output_form(use.tools, None)
    return None if tools.syntax is None else tools.syntax.within_text(use.tools)
