"""Kimi K2: <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>, in a section."""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax, parameters_of
from baton.gateway.parsing.grammar.forms import Form, const, either, json_of, regex, sequence
from baton.gateway.parsing.reading.event_writer import NewId
from baton.gateway.parsing.reading.source import Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _call(tools: Sequence[Tool]) -> Form:
    return either(
        sequence(
            const(f"functions.{tool.name}:"),
            regex("[0-9]{1,6}"),
            const(ARGUMENTS),
            json_of(parameters_of(tool)),
            const(END_CALL),
        )
        for tool in tools
    )


SYNTAX = CallSyntax(
    (Announced((CALL,), _call),), neutral=(SECTION, END_SECTION), section=(SECTION, END_SECTION), separator=""
)

_ID = re.compile(r"(?:functions\.)?(.+?)(?::(\d+))?")


def kimi_call_id(name: str, index: int) -> str:
    """Returns an id in the form that Kimi's template shows to the model."""
    return f"functions.{name}:{index}"


class KimiK2Parser(ToolParser):
    """Parses calls, keeping the model's own ids."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId | None = None) -> None:
        super().__init__(tools, new_id or kimi_call_id)

    def parse(self) -> Steps[None]:
        while marker := (yield from self.source.until(markers(SECTION, CALL, END_SECTION), self.out.content)):
            if marker == CALL:
                yield from self.attempt(self._call(), CALL)

    def _call(self) -> Steps[None]:
        source = self.source
        head, _ = yield from source.read_until(markers(ARGUMENTS))
        match = _ID.fullmatch(head.strip())
        if match is None:
            raise Malformed
        name = call_name(match[1])
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise Malformed
        source.commit()
        self.out.start(name, head.strip() if match[2] is not None else "")
        yield from source.pass_json(self.out.arguments)
        self.out.end()
        source.begin()
        yield from source.skip_space()
        yield from source.take(END_CALL)
