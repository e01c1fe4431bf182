"""Llama 3.1 to 4: the whole output is {"name": "f", "parameters": {...}}, with more calls after a semicolon."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from baton.gateway.parsing.grammar.call_syntax import (
    Announced,
    BareCalls,
    CallSyntax,
    call_object,
    json_calls,
    parameters_of,
)
from baton.gateway.parsing.grammar.forms import Form, const, either, json_of, repeat, sequence, spaced
from baton.gateway.parsing.reading.call_object import read_call_object
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser
from baton.gateway.parsing.tool import Tool

# Llama 3; Llama 4
TAGS = ("<|python_tag|>", "<|python_start|>")
END_TAG = "<|python_end|>"


def bare_start(tools: Sequence[Tool]) -> dict[str, Any]:
    """Returns an unannounced call as a part of a structural tag."""
    properties = {"name": {"enum": [tool.name for tool in tools]}, "parameters": {"type": "object"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": schema}


def _begin(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "parameters": '


_call = json_calls(_begin, "}")


def _calls(tools: Sequence[Tool]) -> Form:
    first = either(sequence(spaced(_begin(tool.name)), json_of(parameters_of(tool)), const("}")) for tool in tools)
    return sequence(first, repeat(sequence(const("; "), _call(tools)), optional=True))


def object_signs(tools: Sequence[Tool]) -> str:
    """Returns a regex of objects that begin as calls do. A key or name with an escape may be any key or name."""
    names = "|".join(re.escape(tool.name) for tool in tools)
    before = r'("(type|id)"\s*:\s*("([^"\\]|\\.)*"|[\w.+-]+)\s*,\s*)*'
    call = rf'"name"\s*:\s*"([^"]*\\|({names})")|"(parameters|arguments)"|"[^"]*\\|"(type|id)"\s*:\s*[{{\[]'
    return rf"\s*\{{\s*{before}({call})"


def _beside_json(tools: Sequence[Tool]) -> Form:
    call = either(call_object(tool, "parameters") for tool in tools)
    return sequence(call, repeat(sequence(const("; "), call), optional=True))


SYNTAX = CallSyntax((Announced(TAGS, _call),), BareCalls(_calls, object_signs, _beside_json), neutral=(END_TAG,))


class Llama3JsonParser(ToolParser):
    """Parses calls at the output's start or after a tag.

    Only objects that name the request's tools are calls: nothing else distinguishes a call from a JSON answer.
    """

    def parse(self) -> Steps[None]:
        tag = ""
        while True:
            if (yield from self.attempt(self._call(), tag)):
                while (yield from self.attempt(self._next_call(), "")):
                    pass
            yield from self.source.take(END_TAG)
            tag = yield from self.source.until(markers(*TAGS), self.out.content)
            if not tag:
                return

    def _call(self) -> Steps[None]:
        yield from self.source.skip_space()
        yield from read_call_object(self.source, self.out, self.tools.__contains__)

    def _next_call(self) -> Steps[None]:
        yield from self.source.skip_space()
        if (yield from self.source.take(";", ",")):
            yield from self.source.skip_space()
        yield from self.source.take(*TAGS)
        yield from self._call()
