"""How a model writes reasoning and calls, and the parsers that follow for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.parsing.constrained_calls import CallListParser, NamedCallParser
from baton.gateway.parsing.grammar.call_syntax import CallSyntax
from baton.gateway.parsing.grammar.forms import Form
from baton.gateway.parsing.output_parser import OutputParser, ReasoningParser, Wanted
from baton.gateway.parsing.reading.text_parser import TextParser
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Reading:
    """How the choices of one request are read."""

    new_parser: Callable[[], OutputParser]  # for one choice
    special_tokens: frozenset[str]  # that stay in the text whatever the request says: the parsers' markup
    constraint: types_pb2.Constraint | None = None  # what the worker holds the outputs to; None: nothing


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written."""

    new_parser: Callable[[Sequence[Tool]], TextParser]  # for one choice
    special_tokens: tuple[str, ...] = ()  # markup that other outputs do not show
    has_reasoning: bool = False  # the parser is a ReasoningParser too, for all of the output
    syntax: CallSyntax | None = None  # None: it is not known, so no strict schema can be held to among free text
    # Where reasoning, calls and the answer are messages: the whole output, the final message of this form if any.
    output_form: Callable[[Sequence[Tool], Form | None], Form] | None = None
    starts: tuple[str, ...] = ()  # what calls begin with; nothing else does
    bare_start: Callable[[Sequence[Tool]], dict[str, Any]] | None = None  # the same as a part of a structural tag


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How reasoning is written. `open_tag` and `close_tag` in a prompt's end say where the output begins."""

    new_parser: Callable[[bool], ReasoningParser]  # for one choice; True: the output begins in the reasoning
    special_tokens: tuple[str, ...] = ()
    open_tag: str = ""  # empty: prompts do not say
    close_tag: str = ""  # empty: nothing constrained can follow the reasoning
    opened: bool = False  # where the prompt says nothing
    prompted: bool = False  # the prompt opens the reasoning of each chat that asks for it

    def is_open(self, prompt_end: str) -> bool:
        """Whether the output begins in the reasoning."""
        end = prompt_end.rstrip()
        if self.open_tag and end.endswith(self.open_tag):
            return True
        return self.opened and not (self.close_tag and end.endswith(self.close_tag))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A model's formats; None where it has none, or none was recognized."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def _calls(self, use: ToolUse) -> ToolFormat | None:
        if use.mode is ToolMode.NAMED:
            return ToolFormat(lambda tools: NamedCallParser(use.name))
        if use.mode is ToolMode.REQUIRED:
            return ToolFormat(CallListParser)
        return self.tools if use.active else None

    def reading(self, use: ToolUse, prompt_end: str, include_reasoning: bool = True) -> Reading | None:
        """How the outputs of a request are read; None where they are plain text.

        `prompt_end` is the prompt's last text, a dozen tokens or more.
        """
        calls = self._calls(use)
        combined = calls is not None and calls.has_reasoning
        reasoning = None if combined else self.reasoning
        if calls is None and reasoning is None:
            return None
        finish_reason = "stop" if use.mode is ToolMode.NAMED else "tool_calls"
        wanted = Wanted(include_reasoning, use.parallel, finish_reason)
        opened = reasoning is not None and reasoning.is_open(prompt_end)

        def new_parser() -> OutputParser:
            if calls is not None and combined:
                return OutputParser(calls.new_parser(use.tools), None, wanted)  # type: ignore[arg-type]
            return OutputParser(
                None if reasoning is None else reasoning.new_parser(opened),
                None if calls is None else calls.new_parser(use.tools),
                wanted,
            )

        special_tokens = {*(calls.special_tokens if calls else ()), *(reasoning.special_tokens if reasoning else ())}
        return Reading(new_parser, frozenset(special_tokens))
