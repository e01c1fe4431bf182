"""Kimi K3: elements of special tokens. A call is <|open|>call tool="f" index="1"<|sep|>...<|close|>call<|sep|>.

Its arguments are <|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>. All calls are in an element
`tools`, after the answer in an element `response`.
"""

from __future__ import annotations

import re

from baton.gateway.parsing.reading.arguments import ArgumentsWriter, json_value, kinds_of
from baton.gateway.parsing.reading.source import MAX_VALUE_CHARS, Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
RESPONSE = (f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}")
TOOLS = (f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}")
END_MESSAGE = f"{CLOSE}message{SEP}"
CALL = f"{OPEN}call "
_END_CALL = f"{CLOSE}call{SEP}"
_ARGUMENT, _END_ARGUMENT = f"{OPEN}argument ", f"{CLOSE}argument{SEP}"
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
        arguments = ArgumentsWriter(out, self.tools.get(name))
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
        out.end()

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
