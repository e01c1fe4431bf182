"""Selects the formats of a model's outputs: by the flags, including a plugin's formats, or by what is recognized."""

from __future__ import annotations

import difflib
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.gateway.parsing.output_format import Choice, OutputFormat, ReasoningFormat, ToolFormat
from baton.gateway.parsing.reasoning_registry import REASONING_FORMATS
from baton.gateway.parsing.recognition import Recognized, Traits, recognized_reasoning, recognized_tools
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.plugins.kinds import REASONING_PARSERS, TOOL_PARSERS
from baton.plugins.plugins import NO_PLUGINS, Plugins, instance_of
from baton.rpc.errors import InvalidRequest

AUTO, NONE = "auto", "none"

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class FormatFlags:
    """The operator's flags for output formats."""

    tools: str = AUTO
    reasoning: str = AUTO
    plugin: str = ""  # path of a Python file with TOOL_FORMATS or REASONING_FORMATS; empty: none
    plugins: Plugins = NO_PLUGINS  # installed packages with formats


def choose_format(flags: FormatFlags, traits: Traits) -> OutputFormat:
    """Returns the formats for a model. Raises InvalidRequest that names the flag."""
    plugin = _load_plugin(flags.plugin) if flags.plugin else {}
    tools = flags.plugins.extend(TOOL_PARSERS, TOOL_FORMATS, instance_of(ToolFormat))
    tools |= _formats(plugin, "TOOL_FORMATS", ToolFormat, flags.plugin)
    reasoning = flags.plugins.extend(REASONING_PARSERS, REASONING_FORMATS, instance_of(ReasoningFormat))
    reasoning |= _formats(plugin, "REASONING_FORMATS", ReasoningFormat, flags.plugin)
    for_tools = _choice("tool_call_parser", flags.tools, recognized_tools(traits), tools)
    for_reasoning = _choice("reasoning_parser", flags.reasoning, recognized_reasoning(traits), reasoning)
    return OutputFormat(tools.get(for_tools.name), reasoning.get(for_reasoning.name), for_tools, for_reasoning)


def _choice(flag: str, name: str, recognized: Recognized, formats: Mapping[str, object]) -> Choice:
    if name == AUTO:
        return Choice(recognized.name or NONE, recognized.why)
    if name != NONE and name not in formats:
        allowed = (AUTO, NONE, *formats)
        near = difflib.get_close_matches(name, allowed, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise InvalidRequest(f"{flag}: unknown parser {name!r}{meant}; give one of {', '.join(allowed)}", field=flag)
    return Choice(name, "it is set")


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
