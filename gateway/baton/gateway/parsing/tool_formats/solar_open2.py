"""Solar Open 2: <|tool_call:start|>f, then <|tool_arg:start|>k<|tool_arg:value|>v<|tool_arg:end|> lines, and an end."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, sequence, text
from baton.gateway.parsing.grammar.tagged_arguments import tagged_arguments
from baton.gateway.parsing.reading.arguments import ArgumentsWriter
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

OPEN, CLOSE = "<|tool_call:start|>", "<|tool_call:end|>"
ARGUMENT, VALUE, END_ARGUMENT = "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"
TAGS = (OPEN, CLOSE, ARGUMENT, VALUE, END_ARGUMENT)


class SolarOpen2Parser(ToolParser):
    """Parses calls whose values are JSON, except that strings are plain text. The next call ends one without an end."""

    def parse(self) -> Steps[None]:
        while (yield from self.source.until(markers(OPEN), self.out.content)):
            yield from self.attempt(self._call(), OPEN)

    def _call(self) -> Steps[None]:
        source, out = self.source, self.out
        text, stop = yield from source.read_until(markers("\n", ARGUMENT, CLOSE))
        name = call_name(text)
        source.unread(len(stop))
        source.commit()
        out.start(name)
        arguments = ArgumentsWriter(out, self.tools.get(name))
        while True:
            source.begin()
            yield from source.skip_space()
            stop = yield from source.expect(ARGUMENT, CLOSE, OPEN)
            if stop != ARGUMENT:
                break
            key, _ = yield from source.read_until(markers(VALUE))
            yield from self.value_until(arguments, key.strip(), END_ARGUMENT)
        if stop == OPEN:
            source.unread(len(OPEN))
        source.commit()
        arguments.close()
        out.end()


def _begin(key: str) -> str:
    return f"{ARGUMENT}{key}{VALUE}"


def _one(tool: Tool) -> Form:
    head = const(f"{tool.name}\n")
    if not tool.strict:
        return sequence(head, text(special=(ARGUMENT, VALUE, END_ARGUMENT)), const(CLOSE))
    arguments = tagged_arguments(tool, _begin, END_ARGUMENT, (END_ARGUMENT,), "\n")
    return sequence(*(part for part in (head, arguments, const(CLOSE)) if part))


def _calls(tools: Sequence[Tool]) -> Form:
    return either(map(_one, tools))


SYNTAX = CallSyntax((Announced((OPEN,), _calls),))
