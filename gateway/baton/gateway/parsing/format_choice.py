"""Selects the formats of a model's outputs: by the flags, including a plugin's formats, or by its chat template."""

from __future__ import annotations

import runpy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.gateway.parsing.output_format import OutputFormat, ReasoningFormat, ToolFormat
from baton.gateway.parsing.registry import REASONING_FORMATS, TOOL_FORMATS, recognized_reasoning, recognized_tools
from baton.rpc.errors import InvalidRequest

AUTO, NONE = "auto", "none"

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class FormatFlags:
    """The operator's flags for output formats."""

    tools: str = AUTO
    reasoning: str = AUTO
    plugin: str = ""  # path of a Python file with TOOL_FORMATS or REASONING_FORMATS; empty: none


def choose_format(flags: FormatFlags, templates: Iterable[str]) -> OutputFormat:
    """Returns the formats for a model with these chat templates. Raises InvalidRequest that names the flag."""
    plugin = _load_plugin(flags.plugin) if flags.plugin else {}
    tools = {**TOOL_FORMATS, **_formats(plugin, "TOOL_FORMATS", ToolFormat, flags.plugin)}
    reasoning = {**REASONING_FORMATS, **_formats(plugin, "REASONING_FORMATS", ReasoningFormat, flags.plugin)}
    text = "\n".join(templates)
    return OutputFormat(
        _named("tool_call_parser", flags.tools, recognized_tools(text), tools),
        _named("reasoning_parser", flags.reasoning, recognized_reasoning(text), reasoning),
    )


def _named(flag: str, name: str, recognized: str, formats: Mapping[str, F]) -> F | None:
    if name == NONE:
        return None
    if name == AUTO:
        return formats.get(recognized)
    if name not in formats:
        allowed = ", ".join((AUTO, NONE, *formats))
        raise InvalidRequest(f"{flag}: unknown parser {name!r}; give one of {allowed}", field=flag)
    return formats[name]


def _load_plugin(path: str) -> Mapping[str, object]:
    try:
        return runpy.run_path(path)
    except Exception as error:
        raise InvalidRequest(
            f"tool_parser_plugin: cannot load {path}: {type(error).__name__}: {error}", field="tool_parser_plugin"
        ) from error


def _formats(plugin: Mapping[str, object], name: str, kind: type[F], path: str) -> Mapping[str, F]:
    value = plugin.get(name, {})
    if not isinstance(value, Mapping) or not all(isinstance(one, kind) for one in value.values()):
        raise InvalidRequest(
            f"tool_parser_plugin: {name} of {path} must map names to {kind.__name__}", field="tool_parser_plugin"
        )
    return value
