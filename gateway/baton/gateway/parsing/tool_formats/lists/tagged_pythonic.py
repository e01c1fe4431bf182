"""LFM2 and OLMo 3: calls as in Python between tags, in a list or on lines of their own."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, repeat, sequence
from baton.gateway.parsing.reading.python_call import read_python_call
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser
from baton.gateway.parsing.tool import Tool
from baton.gateway.parsing.tool_formats.lists.pythonic import call_form


class TaggedPythonicParser(ToolParser):
    """Parses any number of sections, each a list of calls or calls on lines."""

    tags: tuple[str, str]

    def parse(self) -> Steps[None]:
        while (yield from self.source.until(markers(self.tags[0]), self.out.content)):
            yield from self.attempt(self._section(), self.tags[0])

    def _section(self) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        yield from source.take("[")
        while True:
            yield from read_python_call(source, self.out)
            source.begin()
            yield from source.skip_space()
            yield from source.take(",")
            yield from source.skip_space()
            if (yield from source.peek()) in ("]", "<", ""):
                break
        yield from source.take("]")
        yield from source.skip_space()
        yield from source.take(self.tags[1])


class Lfm2Parser(TaggedPythonicParser):
    """LFM2's tags."""

    tags = ("<|tool_call_start|>", "<|tool_call_end|>")


class Olmo3Parser(TaggedPythonicParser):
    """OLMo 3's tags."""

    tags = ("<function_calls>", "</function_calls>")


def _syntax_of(tags: tuple[str, str], begin: str, separator: str, end: str) -> CallSyntax:
    def calls(tools: Sequence[Tool]) -> Form:
        call = either(call_form(tool, const(f"{tool.name}(")) for tool in tools)
        return sequence(const(begin), repeat(call, separator), const(f"{end}{tags[1]}"))

    return CallSyntax((Announced(tags[:1], calls),))


LFM2_SYNTAX = _syntax_of(Lfm2Parser.tags, "[", ", ", "]")
OLMO3_SYNTAX = _syntax_of(Olmo3Parser.tags, "\n", "\n", "\n")
