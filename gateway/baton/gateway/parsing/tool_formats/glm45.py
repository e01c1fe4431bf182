"""GLM 4.5 to 4.7: <tool_call>f, then <arg_key>k</arg_key><arg_value>v</arg_value> for each argument, </tool_call>.

Hunyuan 3 writes a separator after the name, and a section around all calls.
"""

from __future__ import annotations

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, sequence, text
from baton.gateway.parsing.grammar.tagged_arguments import tagged_arguments
from baton.gateway.parsing.reading.arguments import ArgumentsWriter
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"
TAGS = (_KEY, _END_KEY, _VALUE, _END_VALUE)
SEP = "<tool_sep>"
SECTION = ("<tool_calls>", "</tool_calls>")


def syntax_of(line_break: str, sep: str = "", section: tuple[str, str] = ("", "")) -> CallSyntax:
    """Returns the syntax with this text between the parts of calls: a line break for GLM 4.5, nothing for GLM 4.7."""

    def begin(key: str) -> str:
        return f"{_KEY}{key}{_END_KEY}{line_break}{_VALUE}"

    def one(tool: Tool) -> Form:
        if not tool.strict:
            rest = text(special=TAGS)
            return sequence(const(tool.name + sep + line_break), rest, const(CLOSE))
        arguments = tagged_arguments(tool, begin, _END_VALUE, (_END_VALUE,), line_break)
        return sequence(*(part for part in (const(tool.name + sep + line_break), arguments, const(CLOSE)) if part))

    neutral = section if section[0] else ()
    around = (f"{section[0]}\n", f"\n{section[1]}") if section[0] else section
    return CallSyntax((Announced((OPEN,), lambda tools: either(map(one, tools))),), neutral=neutral, section=around)


SYNTAX = syntax_of("\n")
HUNYUAN_3_SYNTAX = syntax_of("\n", SEP, SECTION)


class Glm45Parser(ToolParser):
    """Parses calls whose values are JSON, except that strings are plain text."""

    section: tuple[str, ...] = ()  # tags around all calls
    name_ends: tuple[str, ...] = (_KEY, CLOSE)

    def parse(self) -> Steps[None]:
        while marker := (yield from self.source.until(markers(OPEN, *self.section), self.out.content)):
            if marker == OPEN:
                yield from self.attempt(self._call(), OPEN)

    def _call(self) -> Steps[None]:
        source, out = self.source, self.out
        text, stop = yield from source.read_until(markers(*self.name_ends))
        name = call_name(text)
        if stop != SEP:
            source.unread(len(stop))
        source.commit()
        out.start(name)
        arguments = ArgumentsWriter(out, self.tools.get(name))
        while True:
            source.begin()
            yield from source.skip_space()
            if (yield from source.expect(_KEY, CLOSE)) == CLOSE:
                break
            key, _ = yield from source.read_until(markers(_END_KEY))
            yield from source.skip_space()
            yield from source.expect(_VALUE)
            yield from self.value_until(arguments, key.strip(), _END_VALUE)
        source.commit()
        arguments.close()
        out.end()


class Hunyuan3Parser(Glm45Parser):
    """Parses the same with a separator after the name, in a section."""

    section = SECTION
    name_ends = (SEP, _KEY, CLOSE)
