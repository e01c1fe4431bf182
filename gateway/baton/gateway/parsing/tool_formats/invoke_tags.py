"""MiniMax M2 and DeepSeek V3.2: <invoke name="f"><parameter name="k">v</parameter>...</invoke>, in a section.

DeepSeek's tags have a prefix, and an attribute of each value marks text: string="true".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, sequence, text
from baton.gateway.parsing.grammar.tagged_arguments import tagged_arguments
from baton.gateway.parsing.reading.arguments import ArgumentsWriter, json_value
from baton.gateway.parsing.reading.event_writer import NewId
from baton.gateway.parsing.reading.source import MAX_VALUE_CHARS, Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

_NAME = re.compile(r'\s*name="([^"]*)"(?:\s+string="(true|false)")?\s*')
_STRING = frozenset(("string",))


class InvokeParser(ToolParser):
    """Parses any number of sections with text around them."""

    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    mark = ""  # prefix of all tags inside the section

    def __init__(self, tools: Sequence[Tool], new_id: NewId | None = None) -> None:
        self._call_tag, self._parameter_tag = f"<{self.mark}invoke", f"<{self.mark}parameter"
        self._end_call, self._end_parameter = f"</{self.mark}invoke>", f"</{self.mark}parameter>"
        super().__init__(tools, new_id)

    def parse(self) -> Steps[None]:
        stops = markers(*self.section, self._call_tag)
        while marker := (yield from self.source.until(stops, self.out.content)):
            if marker == self._call_tag:
                yield from self.attempt(self._call(), marker)

    def _call(self) -> Steps[None]:
        source, out = self.source, self.out
        name, _ = yield from self._name()
        name = call_name(name)
        source.commit()
        out.start(name)
        arguments = ArgumentsWriter(out, self.tools.get(name))
        while True:
            source.begin()
            yield from source.skip_space()
            if (yield from source.expect(self._parameter_tag, self._end_call)) == self._end_call:
                break
            key, kind = yield from self._name()
            yield from self._value(arguments, key, kind)
        source.commit()
        arguments.close()
        out.end()

    def _name(self) -> Steps[tuple[str, str]]:
        """Returns the name in an opening tag, and its `string` attribute."""
        head, _ = yield from self.source.read_until(markers(">"))
        match = _NAME.fullmatch(head)
        if match is None:
            raise Malformed
        return match[1], match[2] or ""

    def _value(self, arguments: ArgumentsWriter, key: str, kind: str) -> Steps[None]:
        source, stops = self.source, markers(self._end_parameter)
        source.commit()
        kinds = arguments.kinds(key)
        if kind == "true" or (not kind and kinds == _STRING):
            arguments.begin_text(key)
            if not (yield from source.until(stops, arguments.text)):
                raise Malformed
            arguments.end_text()
            return
        source.begin(MAX_VALUE_CHARS)
        value, _ = yield from source.read_until(stops)
        source.commit()
        # Values marked as JSON are parsed as JSON for any schema.
        arguments.add(key, json_value(value, kinds - _STRING if kind else kinds))


class DsmlParser(InvokeParser):
    """Parses the same tags with DeepSeek's prefix."""

    mark = "｜DSML｜"
    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")


def _syntax_of(parser: type[InvokeParser], typed: bool) -> CallSyntax:
    mark = parser.mark
    end, stops = f"</{mark}parameter>", (f"</{mark}parameter>",)

    def begin(key: str, string: str = "") -> str:
        return f'<{mark}parameter name="{key}"{string}>'

    def one(tool: Tool) -> Form:
        head, last = const(f' name="{tool.name}">\n'), const(f"</{mark}invoke>")
        if not tool.strict:
            return sequence(head, text(), last)
        of_kinds = (lambda key: begin(key, ' string="true"'), lambda key: begin(key, ' string="false"'))
        arguments = tagged_arguments(tool, begin, end, stops, "\n", of_kinds if typed else None)
        return sequence(*(part for part in (head, arguments, last) if part))

    def calls(tools: Sequence[Tool]) -> Form:
        return either(map(one, tools))

    section = (f"{parser.section[0]}\n", f"\n{parser.section[1]}")
    return CallSyntax((Announced((f"<{mark}invoke",), calls),), neutral=parser.section, section=section)


MINIMAX_SYNTAX = _syntax_of(InvokeParser, typed=False)
DSML_SYNTAX = _syntax_of(DsmlParser, typed=True)
