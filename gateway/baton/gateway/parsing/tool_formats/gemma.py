"""FunctionGemma and Gemma 4: call:f{key:"text",n:1,at:{lat:1.5}} between tags, with a special quote around texts."""

from __future__ import annotations

import json
import re

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, sequence, text
from baton.gateway.parsing.grammar.quoted_values import QuotedValues
from baton.gateway.parsing.grammar.schema_reader import SchemaReader
from baton.gateway.parsing.reading.arguments import ArgumentsWriter, json_value
from baton.gateway.parsing.reading.schema_kinds import kinds_of
from baton.gateway.parsing.reading.source import MAX_VALUE_CHARS, Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

_MAX_DEPTH = 32
_ALL_KINDS = kinds_of({}, {})
_KEY = re.compile(r"[^\s:,{}\[\]]+")
_WORD = re.compile(r"[^,{}\[\]]+")
_CALL = "call:"


class FunctionGemmaParser(ToolParser):
    """Parses calls with unquoted keys. A value that is no number, boolean, list or object is a text."""

    tags = ("<start_function_call>", "<end_function_call>")
    quote = "<escape>"

    def parse(self) -> Steps[None]:
        while (yield from self.source.until(markers(self.tags[0]), self.out.content)):
            yield from self.attempt(self._call(), self.tags[0])

    def _call(self) -> Steps[None]:
        source, out = self.source, self.out
        yield from source.skip_space()
        yield from source.expect(_CALL)
        name, _ = yield from source.read_until(markers("{"))
        name = call_name(name)
        source.commit()
        out.start(name)
        arguments = ArgumentsWriter(out, self.tools.get(name))
        while True:
            source.begin(MAX_VALUE_CHARS)
            yield from source.skip_space()
            if (yield from source.take("}")):
                break
            key = yield from self._key()
            value = yield from self._value(arguments.kinds(key), 0)
            yield from source.skip_space()
            stop = yield from source.expect(",", "}")
            source.commit()
            arguments.add(key, value)
            if stop == "}":
                break
        source.commit()
        arguments.close()
        out.end()
        source.begin()
        yield from source.skip_space()
        yield from source.take(self.tags[1])

    def _key(self) -> Steps[str]:
        if (yield from self.source.take(self.quote)):
            key, _ = yield from self.source.read_until(markers(self.quote))
        else:
            key = yield from self.source.read_pattern(_KEY)
        yield from self.source.skip_space()
        yield from self.source.expect(":")
        return key

    def _value(self, kinds: frozenset[str], depth: int) -> Steps[str]:
        """Returns the JSON text of a value."""
        source = self.source
        if depth > _MAX_DEPTH:
            raise Malformed
        yield from source.skip_space()
        if (yield from source.take(self.quote)):
            value, _ = yield from source.read_until(markers(self.quote))
            return json.dumps(value, ensure_ascii=False)
        bracket = yield from source.take("{", "[")
        if bracket == "{":
            return (yield from self._items("}", depth))
        if bracket == "[":
            return (yield from self._items("]", depth))
        return json_value((yield from source.read_pattern(_WORD)).strip(), kinds)

    def _items(self, close: str, depth: int) -> Steps[str]:
        source, items = self.source, []
        while True:
            yield from source.skip_space()
            if (yield from source.take(close)):
                break
            key = f"{json.dumps((yield from self._key()), ensure_ascii=False)}: " if close == "}" else ""
            items.append(key + (yield from self._value(_ALL_KINDS, depth + 1)))
            yield from source.skip_space()
            if (yield from source.expect(",", close)) == close:
                break
        inside = ", ".join(items)
        return f"{{{inside}}}" if close == "}" else f"[{inside}]"


class Gemma4Parser(FunctionGemmaParser):
    """Parses the same format with Gemma 4's tags."""

    tags = ("<|tool_call>", "<tool_call|>")
    quote = '<|"|>'


def _is_key(name: str) -> bool:
    return _KEY.fullmatch(name) is not None


def _syntax_of(parser: type[FunctionGemmaParser]) -> CallSyntax:
    def one(tool: Tool) -> Form:
        head, last = const(f"{_CALL}{tool.name}{{"), const(f"}}{parser.tags[1]}")
        if not tool.strict:
            return sequence(head, text(special=(parser.quote,)), last)
        schemas = SchemaReader(tool.parameters)
        arguments = QuotedValues(parser.quote, _is_key, schemas).members_of(schemas.root)
        return sequence(*(part for part in (head, arguments, last) if part))

    return CallSyntax((Announced(parser.tags[:1], lambda tools: either(map(one, tools))),), separator="")


FUNCTION_GEMMA_SYNTAX = _syntax_of(FunctionGemmaParser)
GEMMA4_SYNTAX = _syntax_of(Gemma4Parser)
