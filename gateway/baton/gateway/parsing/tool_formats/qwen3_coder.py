"""Qwen3 Coder: <tool_call><function=f><parameter=k>v</parameter>...</function></tool_call>, one element per line."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, sequence, text
from baton.gateway.parsing.grammar.tagged_arguments import tagged_arguments
from baton.gateway.parsing.reading.arguments import ArgumentsWriter, json_value
from baton.gateway.parsing.reading.source import MAX_VALUE_CHARS, Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
# The line break before the end of a value is not part of it. Models sometimes omit </parameter>.
_VALUE_ENDS = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)
_VALUE_STOPS = (*(f"\n{end}" for end in _VALUE_ENDS), *_VALUE_ENDS)


def _call(tool: Tool, line_break: str) -> Form:
    """Returns the form of a call from its function's name to its end tag."""
    head = const(f"{tool.name}>\n")
    if not tool.strict:
        return sequence(head, text(), const(_END_FUNCTION))
    arguments = tagged_arguments(
        tool, lambda key: f"{_PARAMETER}{key}>{line_break}", f"{line_break}{_END_PARAMETER}", _VALUE_ENDS, "\n"
    )
    return sequence(*(part for part in (head, arguments, const(_END_FUNCTION)) if part))


def _syntax_of(tags: tuple[str, str], line_break: str) -> CallSyntax:
    def calls(tools: Sequence[Tool]) -> Form:
        return either(_call(tool, line_break) for tool in tools)

    def opened(tools: Sequence[Tool]) -> Form:
        return sequence(const(f"\n{_FUNCTION}"), calls(tools), const(f"\n{tags[1]}"))

    return CallSyntax((Announced(tags[:1], opened), Announced((_FUNCTION,), calls)))


SYNTAX = _syntax_of((_OPEN, _CLOSE), "\n")
SEED_TAGS = ("<seed:tool_call>", "</seed:tool_call>")
SEED_SYNTAX = _syntax_of(SEED_TAGS, "")


class Qwen3CoderParser(ToolParser):
    """Parses calls, also those without <tool_call>, which models sometimes omit."""

    tags = (_OPEN, _CLOSE)
    stops = _VALUE_STOPS
    line_break = "\n"  # around values

    def parse(self) -> Steps[None]:
        while marker := (yield from self.source.until(markers(self.tags[0], _FUNCTION), self.out.content)):
            if marker != _FUNCTION:
                yield from self.attempt(self._opened(), marker)
            else:
                yield from self.attempt(self._call(), _FUNCTION)

    def _opened(self) -> Steps[None]:
        yield from self.source.skip_space()
        yield from self.source.expect(_FUNCTION)
        yield from self._call()

    def _call(self) -> Steps[None]:
        source, out = self.source, self.out
        text, _ = yield from source.read_until(markers(">"))
        name = call_name(text)
        source.commit()
        out.start(name)
        arguments = ArgumentsWriter(out, self.tools.get(name))
        while True:
            source.begin()
            yield from source.skip_space()
            if (yield from source.expect(_PARAMETER, _END_FUNCTION)) == _END_FUNCTION:
                break
            key, _ = yield from source.read_until(markers(">"))
            if self.line_break:
                yield from source.take(self.line_break)
            yield from self._value(arguments, key.strip())
        source.commit()
        arguments.close()
        out.end()
        source.begin()
        yield from source.skip_space()
        yield from source.take(self.tags[1])

    def _value(self, arguments: ArgumentsWriter, key: str) -> Steps[None]:
        source, stops = self.source, markers(*self.stops)
        source.commit()
        kinds = arguments.kinds(key)
        if kinds == {"string"}:
            arguments.begin_text(key)
            stop = yield from source.until(stops, arguments.text)
            if not stop:
                raise Malformed
            arguments.end_text()
        else:
            source.begin(MAX_VALUE_CHARS)
            text, stop = yield from source.read_until(stops)
            source.commit()
            arguments.add(key, json_value(text, kinds))
        if not stop.endswith(_END_PARAMETER):
            source.unread(len(stop))


class SeedOssParser(Qwen3CoderParser):
    """Parses the same format with Seed-OSS' tags and without line breaks around values."""

    tags = SEED_TAGS
    stops = _VALUE_ENDS
    line_break = ""
