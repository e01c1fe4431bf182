"""Kimi K3: elements of special tokens. A call is <|open|>call tool="f" index="1"<|sep|>...<|close|>call<|sep|>.

Its arguments are <|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>, or one element `json` with all
of them. All calls are in an element `tools`, after the answer in an element `response`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, regex, sequence, text
from baton.gateway.parsing.grammar.tagged_arguments import tagged_arguments
from baton.gateway.parsing.reading.arguments import ArgumentsWriter, json_value
from baton.gateway.parsing.reading.schema_kinds import kinds_of
from baton.gateway.parsing.reading.source import MAX_VALUE_CHARS, Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
RESPONSE = (f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}")
TOOLS = (f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}")
END_MESSAGE = f"{CLOSE}message{SEP}"
CALL = f"{OPEN}call "
_END_CALL = f"{CLOSE}call{SEP}"
_ARGUMENT, _END_ARGUMENT = f"{OPEN}argument ", f"{CLOSE}argument{SEP}"
_JSON, _END_JSON = f"{OPEN}json ", f"{CLOSE}json{SEP}"
_ELEMENTS = ("response", "tools", "think")  # around text and calls
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_ATTRIBUTES = re.compile(r'(\s*\w+="[^"]*")*\s*')
_NO_STRINGS = kinds_of({}, {}) - {"string"}


class KimiK3Parser(ToolParser):
    """Parses calls whose arguments name their types: strings are plain text, others JSON."""

    def parse(self) -> Steps[None]:
        stops = markers(*RESPONSE, *TOOLS, END_MESSAGE, CALL)
        while marker := (yield from self.source.until(stops, self.out.content)):
            if marker == CALL:
                yield from self.attempt(self._call(), CALL)

    def _call(self) -> Steps[None]:
        source, out = self.source, self.out
        name = call_name((yield from self._attributes()).get("tool", ""))
        source.commit()
        out.start(name)
        source.begin()
        yield from source.skip_space()
        if (yield from source.take(_JSON)):
            yield from self._whole_object()
        else:
            yield from self._arguments(ArgumentsWriter(out, self.tools.get(name)))
        source.commit()
        out.end()

    def _whole_object(self) -> Steps[None]:
        source = self.source
        yield from self._attributes()
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise Malformed
        source.commit()
        yield from source.pass_json(self.out.arguments)
        source.begin()
        for end in (_END_JSON, _END_CALL):
            yield from source.skip_space()
            yield from source.expect(end)

    def _arguments(self, arguments: ArgumentsWriter) -> Steps[None]:
        source = self.source
        while True:
            source.begin()
            yield from source.skip_space()
            if (yield from source.expect(_ARGUMENT, _END_CALL)) == _END_CALL:
                break
            given = yield from self._attributes()
            if "key" not in given:
                raise Malformed
            yield from self._value(arguments, given["key"], given.get("type", "string"))
        source.commit()
        arguments.close()

    def _attributes(self) -> Steps[dict[str, str]]:
        text, _ = yield from self.source.read_until(markers(SEP))
        if _ATTRIBUTES.fullmatch(text) is None:
            raise Malformed
        found = _ATTRIBUTE.findall(text)
        return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}

    def _value(self, arguments: ArgumentsWriter, key: str, kind: str) -> Steps[None]:
        source = self.source
        source.commit()
        if kind == "string":
            arguments.begin_text(key)
            if not (yield from source.until(markers(_END_ARGUMENT), arguments.text)):
                raise Malformed
            arguments.end_text()
            return
        source.begin(MAX_VALUE_CHARS)
        text, _ = yield from source.read_until(markers(_END_ARGUMENT))
        source.commit()
        arguments.add(key, json_value(text, _NO_STRINGS))


def _quoted(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _of_string(key: str) -> Form:
    return const(f'{_ARGUMENT}key="{_quoted(key)}" type="string"{SEP}')


def _of_other(key: str) -> Form:
    head = const(f'{_ARGUMENT}key="{_quoted(key)}" type="')
    return sequence(head, regex("number|boolean|object|array|null"), const(f'"{SEP}'))


def _one(tool: Tool) -> Form:
    """Returns the form of a call after its first mark."""
    head = (const(f'call tool="{_quoted(tool.name)}" index="'), regex("[0-9]{1,4}"), const(f'"{SEP}'))
    if not tool.strict:
        return sequence(*head, text(special=(OPEN, CLOSE, SEP)), const(_END_CALL))
    arguments = tagged_arguments(tool, _quoted, _END_ARGUMENT, (_END_ARGUMENT,), "", of_kinds=(_of_string, _of_other))
    return sequence(*(part for part in (*head, arguments, const(_END_CALL)) if part))


def _calls(tools: Sequence[Tool]) -> Form:
    return either(map(_one, tools))


SYNTAX = CallSyntax(
    (Announced((OPEN,), _calls, beside=either(const(f"{name}{SEP}") for name in _ELEMENTS)),),
    neutral=(CLOSE, SEP),
    section=TOOLS,
    separator="",
)
