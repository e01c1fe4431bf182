"""The formats in which a model writes reasoning and calls, and the parsers they give for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.gateway.parsing.constrained_calls import CallListParser, NamedCallParser
from baton.gateway.parsing.grammar.call_syntax import CallSyntax
from baton.gateway.parsing.grammar.forms import Form
from baton.gateway.parsing.output_parser import OutputOptions, OutputParser, ReasoningParser
from baton.gateway.parsing.reading.text_parser import TextParser
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """How the outputs of one request are parsed."""

    new_parser: Callable[[], OutputParser]  # for one choice
    special_tokens: frozenset[str]  # markup always kept in the text for the parsers
    constraint: types_pb2.Constraint | None = None  # constraint for the worker; None: free output


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of tool calls."""

    new_parser: Callable[[Sequence[Tool]], TextParser]  # for one choice
    special_tokens: tuple[str, ...] = ()  # markup hidden from other outputs
    has_reasoning: bool = False  # whether the parser is also a ReasoningParser
    answer_mark: str = ""  # with has_reasoning: what the answer begins with, and a constraint follows
    syntax: CallSyntax | None = None  # None: unknown, so strict schemas cannot be enforced in free text
    # For formats that write reasoning, calls and answer as messages: the form of the whole output, with the given form
    # of the final message, if any.
    output_form: Callable[[Sequence[Tool], Form | None], Form] | None = None
    # For the same formats: the form of an output that must call, several times if the second argument is True.
    forced_form: Callable[[Sequence[Tool], bool], Form] | None = None
    starts: tuple[str, ...] = ()  # the only texts that calls begin with
    bare_start: Callable[[Sequence[Tool]], dict[str, Any]] | None = None  # the same as a part of a structural tag


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The format of reasoning. `open_tag` and `close_tag` at a prompt's end decide whether the output begins in it."""

    new_parser: Callable[[bool], ReasoningParser]  # for one choice; True: the output begins in the reasoning
    special_tokens: tuple[str, ...] = ()
    open_tag: str = ""  # empty: the prompt does not decide it
    close_tag: str = ""  # empty: reasoning is in messages, and a constraint follows `answer_mark`
    answer_mark: str = ""
    opened: bool = False  # whether it begins in the reasoning if the prompt does not decide it
    prompted: bool = False  # whether the prompt opens the reasoning in each chat that enables it

    def is_open(self, prompt_end: str) -> bool:
        """Returns whether the output begins in the reasoning."""
        end = prompt_end.rstrip()
        if self.open_tag and end.endswith(self.open_tag):
            return True
        return self.opened and not (self.close_tag and end.endswith(self.close_tag))


class Choice(NamedTuple):
    """The name of a format, and why a model has it."""

    name: str = "none"
    why: str = ""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A model's formats. None: it has none, or none was recognized."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    tools_choice: Choice = Choice()  # noqa: RUF009 - frozen
    reasoning_choice: Choice = Choice()  # noqa: RUF009 - frozen

    def _calls(self, use: ToolUse) -> ToolFormat | None:
        if self.tools is not None and self.tools.forced_form is not None:
            return self.tools if use.active else None
        if use.mode is ToolMode.NAMED:
            return ToolFormat(lambda tools: NamedCallParser(use.name))
        if use.mode is ToolMode.REQUIRED:
            return ToolFormat(CallListParser)
        return self.tools if use.active else None

    def output_parsing(self, use: ToolUse, prompt_end: str, include_reasoning: bool = True) -> OutputParsing | None:
        """Returns how a request's outputs are parsed, or None for plain text.

        `prompt_end` is the text of at least the last 12 tokens of the prompt.
        """
        calls = self._calls(use)
        combined = calls is not None and calls.has_reasoning
        reasoning = None if combined else self.reasoning
        if calls is None and reasoning is None:
            return None
        finish_reason = "stop" if use.mode is ToolMode.NAMED else "tool_calls"
        options = OutputOptions(include_reasoning, use.parallel, finish_reason)
        opened = reasoning is not None and reasoning.is_open(prompt_end)

        def new_parser() -> OutputParser:
            if calls is not None and combined:
                return OutputParser(calls.new_parser(use.tools), None, options)  # type: ignore[arg-type]
            return OutputParser(
                None if reasoning is None else reasoning.new_parser(opened),
                None if calls is None else calls.new_parser(use.tools),
                options,
            )

        special_tokens = {*(calls.special_tokens if calls else ()), *(reasoning.special_tokens if reasoning else ())}
        return OutputParsing(new_parser, frozenset(special_tokens))
