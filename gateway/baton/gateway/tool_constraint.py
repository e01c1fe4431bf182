"""What workers hold outputs to so that tools are called as a request demands, and what cannot be had of it."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from baton.gateway.parsing.constraint import constraint_of, strict_tags_of
from baton.gateway.parsing.formats import TOOL_FORMATS
from baton.gateway.parsing.output_format import OutputFormat
from baton.gateway.parsing.tool import ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

# Between JSON's tokens. Arguments are read by programs: blank lines would only cost tokens.
_SPACE = "[ ]"


def check_tools(use: ToolUse, output_format: OutputFormat, model: str, is_special: Callable[[str], bool]) -> None:
    """Raises InvalidRequest for tools that a model of this format cannot be given, or cannot be held to.

    `is_special` tells whether a text is a special token, which no grammar of text has a place for.
    """
    if not use.active:
        return
    tools, reasoning = output_format.tools, output_format.reasoning
    if use.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
        if reasoning is not None and not reasoning.close_tag:
            raise InvalidRequest(
                f"tool_choice: {model} writes its calls among its reasoning, and cannot be held to one; use auto.",
                field="tool_choice",
            )
        return
    if tools is None:
        raise InvalidRequest(
            f"tools: the chat template of {model} has no tool format that is known, so its calls cannot be read. Start "
            f"the gateway with --tool-call-parser, one of {', '.join(TOOL_FORMATS)}, and with --chat-template where the "
            "model's own does not show tools.",
            field="tools",
        )
    strict = next((index for index, tool in enumerate(use.tools) if tool.strict), None)
    if strict is not None and (tools.strict is None or is_special(tools.strict.trigger)):
        place = use.tools[strict].place
        field = f"tools.{strict if place is None else place}.function.strict"
        raise InvalidRequest(
            f"{field}: {model} cannot be held to a schema where it is free to call or not; leave strict out, or set "
            "tool_choice to required.",
            field=field,
        )


def tool_constraint(use: ToolUse, output_format: OutputFormat) -> types_pb2.Constraint | None:
    """The constraint behind the reasoning; None where outputs are free. Raises InvalidRequest."""
    schema = constraint_of(use)
    if schema is not None:
        lenient = not any(tool.strict for tool in use.tools)
        text = orjson.dumps(schema).decode()
        return types_pb2.Constraint(json_schema=text, lenient=lenient, whitespace_pattern=_SPACE)
    markup = output_format.tools.strict if output_format.tools is not None else None
    tag = strict_tags_of(use, markup) if markup is not None else None
    if tag is None:
        return None
    return types_pb2.Constraint(structural_tag=orjson.dumps(tag).decode(), whitespace_pattern=_SPACE)
