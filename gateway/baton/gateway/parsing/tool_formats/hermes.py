"""Hermes 2 Pro, Qwen 2.5 and 3, and many others: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax, json_calls
from baton.gateway.parsing.reading.call_object import read_call_object
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"

SYNTAX = CallSyntax(
    (Announced((_OPEN,), json_calls(lambda name: f'\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{_CLOSE}")),)
)


class HermesParser(ToolParser):
    """Parses any number of calls with text around them."""

    def parse(self) -> Steps[None]:
        while (yield from self.source.until(markers(_OPEN), self.out.content)):
            yield from self.attempt(self._call(), _OPEN)

    def _call(self) -> Steps[None]:
        yield from self.source.skip_space()
        yield from read_call_object(self.source, self.out)
        yield from self.source.skip_space()
        yield from self.source.take(_CLOSE)
