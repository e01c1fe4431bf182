"""Llama 4, ToolACE and others: the whole output is a Python list of calls, [f(a="x", b=1), g()]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from baton.gateway.parsing.grammar.call_syntax import BareCalls, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, json_of, regex, repeat, sequence, spaced
from baton.gateway.parsing.grammar.tagged_arguments import listed_arguments
from baton.gateway.parsing.reading.python_call import KEY, read_python_call
from baton.gateway.parsing.reading.source import Steps
from baton.gateway.parsing.reading.text_parser import ToolParser
from baton.gateway.parsing.tool import Tool

START, END = "<|python_start|>", "<|python_end|>"


def bare_start(tools: Sequence[Tool]) -> dict[str, Any]:
    """Returns the beginning of a list of calls as a part of a structural tag: a bracket and a function's name."""
    names = [{"type": "const_string", "value": tool.name} for tool in tools]
    # The same lexemes as in JSON, so that the list may still become a JSON list.
    bracket, paren = ({"type": "const_string", "value": mark} for mark in "[(")
    return {"type": "sequence", "elements": [bracket, {"type": "or", "elements": names}, paren]}


def call_form(tool: Tool, begin: Form) -> Form:
    """Returns the form of one call. JSON's literals are parsed like Python's."""
    if tool.strict and tool.parameters is not None:
        arguments = listed_arguments(tool, lambda key: f"{key}=", ", ", lambda key: KEY.fullmatch(key) is not None)
        return sequence(*(part for part in (begin, arguments, const(")")) if part))
    several = repeat(sequence(regex(KEY.pattern), const("="), json_of({})), ", ", optional=True)
    return sequence(begin, several, const(")"))


def _list(tools: Sequence[Tool]) -> Form:
    # A list's beginning is one lexeme with its first function's name; otherwise it would match free text.
    more = repeat(either(call_form(tool, const(f", {tool.name}(")) for tool in tools), optional=True)
    calls = sequence(either(call_form(tool, spaced(f"[{tool.name}(")) for tool in tools), more, const("]"))
    tagged = sequence(either(call_form(tool, const(f"{START}[{tool.name}(")) for tool in tools), more, const(f"]{END}"))
    return either([calls, tagged])


def _signs(tools: Sequence[Tool]) -> str:
    names = "|".join(re.escape(tool.name) for tool in tools)
    return rf"\s*(<\|python_start\|>)?\s*\[\s*({names})\s*\("


def _beside_json(tools: Sequence[Tool]) -> Form:
    def calls(begin: str) -> Form:
        return either(call_form(tool, sequence(const(begin), const(tool.name), const("("))) for tool in tools)

    return sequence(calls("["), repeat(calls(", "), optional=True), const("]"))


SYNTAX = CallSyntax(bare=BareCalls(_list, _signs, _beside_json))


class PythonicParser(ToolParser):
    """Parses the whole output as a list of calls to the request's tools. Any other list is text."""

    def parse(self) -> Steps[None]:
        yield from self.attempt(self._calls(), "")
        yield from self.source.everything(self.out.content)

    def _calls(self) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        if (yield from source.take(START)):
            source.announced = True
        yield from source.skip_space()
        yield from source.expect("[")
        while True:
            yield from read_python_call(source, self.out, self.tools.__contains__)
            source.begin()
            yield from source.skip_space()
            if (yield from source.expect(",", "]")) == "]":
                break
        yield from source.skip_space()
        yield from source.take(END)
