"""Granite, Phi 4 mini, xLAM, Jamba, Hunyuan and Command A: [{"name": "f", "arguments": {...}}, ...] after a mark."""

from __future__ import annotations

import json
from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import (
    Announced,
    BareCalls,
    CallSyntax,
    call_array,
    json_calls,
    parameters_of,
)
from baton.gateway.parsing.grammar.forms import Form, const, either, json_of, regex, repeat, sequence, spaced
from baton.gateway.parsing.reading.call_object import read_call_list
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser
from baton.gateway.parsing.tool import Tool
from baton.gateway.parsing.tool_formats.llama3_json import object_signs

GRANITE_MARKS = ("<|tool_call|>", "<tool_call>")  # Granite 3.0; Granite 3.1 and later
PHI_MARK = "functools"
XLAM_MARKS = ("[TOOL_CALLS]", "<tool_call>")
SECTION = ("<tool_calls>", "</tool_calls>")  # Jamba and Hunyuan
ACTION = ("<|START_ACTION|>", "<|END_ACTION|>")  # Command A and R7B
# Begins an answer in the templates of Hunyuan A13B: "assistant:".
_HUNYUAN_LABEL = "助手："


class _ListedCallsParser(ToolParser):
    marks: tuple[str, ...]
    close_tag = "</tool_call>"
    name_key = "name"

    def parse(self) -> Steps[None]:
        while mark := (yield from self.source.until(markers(*self.marks), self.out.content)):
            yield from self.attempt(self._list(), mark)

    def _list(self) -> Steps[None]:
        yield from read_call_list(self.source, self.out, name_key=self.name_key)
        yield from self.source.skip_space()
        yield from self.source.take(self.close_tag)


class GraniteParser(_ListedCallsParser):
    """Parses a list after <|tool_call|> or <tool_call>."""

    marks = GRANITE_MARKS


class Phi4MiniParser(_ListedCallsParser):
    """Parses a list after "functools"."""

    marks = (PHI_MARK,)


class XlamParser(_ListedCallsParser):
    """Parses a list after a mark, or as the whole output if it names the request's tools."""

    marks = XLAM_MARKS

    def parse(self) -> Steps[None]:
        yield from self.attempt(read_call_list(self.source, self.out, self.tools.__contains__), "")
        yield from super().parse()


class JambaParser(_ListedCallsParser):
    """Parses a list between <tool_calls> and </tool_calls>."""

    marks = SECTION[:1]
    close_tag = SECTION[1]


class CohereParser(_ListedCallsParser):
    """Parses a list of {"tool_call_id": "0", "tool_name": "f", "parameters": {...}} in an action."""

    marks = ACTION[:1]
    close_tag = ACTION[1]
    name_key = "tool_name"


class HunyuanParser(JambaParser):
    """Parses the same, and drops the label before an answer."""

    def parse(self) -> Steps[None]:
        yield from self.source.take(_HUNYUAN_LABEL)
        yield from super().parse()


def _begin(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


_object = json_calls(_begin, "}")


def call_list(tools: Sequence[Tool]) -> Form:
    """Returns the form of a list of calls."""
    return sequence(const("["), repeat(_object(tools), ", "), const("]"))


def bare_list(tools: Sequence[Tool]) -> Form:
    """Returns the form of a list that is the whole output."""
    first = either(sequence(spaced(f"[{_begin(tool.name)}"), json_of(parameters_of(tool))) for tool in tools)
    more = repeat(sequence(const(", "), _object(tools)), optional=True)
    return sequence(first, const("}"), more, const("]"))


GRANITE_SYNTAX = CallSyntax((Announced(GRANITE_MARKS, call_list),))
PHI_SYNTAX = CallSyntax((Announced((PHI_MARK,), call_list),))
SECTION_SYNTAX = CallSyntax((Announced(SECTION[:1], lambda tools: sequence(call_list(tools), const(SECTION[1]))),))


def _action(tools: Sequence[Tool]) -> Form:
    call = either(
        sequence(
            const('{"tool_call_id": "'),
            regex("[0-9]{1,6}"),
            const(f'", "tool_name": {json.dumps(tool.name)}, "parameters": '),
            json_of(parameters_of(tool)),
            const("}"),
        )
        for tool in tools
    )
    return sequence(const("[\n    "), repeat(call, ",\n    "), const(f"\n]{ACTION[1]}"))


COHERE_SYNTAX = CallSyntax((Announced(ACTION[:1], _action),))
XLAM_SYNTAX = CallSyntax(
    (Announced(XLAM_MARKS, call_list),),
    BareCalls(bare_list, lambda tools: rf"\s*\[{object_signs(tools)}", lambda tools: call_array(tools, "arguments")),
)
