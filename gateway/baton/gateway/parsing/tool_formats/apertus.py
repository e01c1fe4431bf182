"""Apertus: <|tools_prefix|>[{"f": {...}}, ...]<|tools_suffix|>, with a function's name as the key of its arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax, json_calls
from baton.gateway.parsing.grammar.forms import Form, const, repeat, sequence
from baton.gateway.parsing.reading.call_object import read_keyed_call
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser
from baton.gateway.parsing.tool import Tool

TAGS = ("<|tools_prefix|>", "<|tools_suffix|>")

_call = json_calls(lambda name: f"{{{json.dumps(name)}: ", "}")


def _calls(tools: Sequence[Tool]) -> Form:
    return sequence(const("["), repeat(_call(tools), ", "), const(f"]{TAGS[1]}"))


SYNTAX = CallSyntax((Announced(TAGS[:1], _calls),))


class ApertusParser(ToolParser):
    """Parses any number of lists with text around them."""

    def parse(self) -> Steps[None]:
        while (yield from self.source.until(markers(TAGS[0]), self.out.content)):
            yield from self.attempt(self._list(), TAGS[0])

    def _list(self) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        yield from source.expect("[")
        while True:
            yield from read_keyed_call(source, self.out)
            source.begin()
            yield from source.skip_space()
            if (yield from source.expect(",", "]")) == "]":
                break
        yield from source.skip_space()
        yield from source.take(TAGS[1])
