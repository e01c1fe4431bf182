"""MiniMax M3: <invoke name="f"><k>v</k>...</invoke> in a section, with a mark before every tag.

Values nest: an element with elements in it is an object, or the items of a list if its schema is a list's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, repeat, sequence, text
from baton.gateway.parsing.grammar.nested_elements import NestedElements
from baton.gateway.parsing.grammar.schema_reader import SchemaReader
from baton.gateway.parsing.reading.arguments import ArgumentsWriter, json_value
from baton.gateway.parsing.reading.schema_kinds import MAX_ALTERNATIVES, kinds_of, resolved
from baton.gateway.parsing.reading.source import MAX_VALUE_CHARS, Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

MARK = "]<]minimax[>["
_SECTION_TAGS = ("<tool_call>", "</tool_call>")
SECTION = (f"{MARK}<tool_call>", f"{MARK}</tool_call>")
TOKENS = (MARK, *_SECTION_TAGS)
_CALL, _END_CALL = f"{MARK}<invoke", "/invoke"
_NAME = re.compile(r"""\s+name=(["']?)([^"'<>]+)\1\s*""")
_KEY = re.compile(r"[^\s<>/][^<>]*")
_MAX_DEPTH = 32
_TEXT = "$text"

Children = list[tuple[str, "Element"]]
Element = str | Children


class MiniMaxM3Parser(ToolParser):
    """Parses any number of sections with text around them."""

    def parse(self) -> Steps[None]:
        stops = markers(*SECTION, _CALL)
        while marker := (yield from self.source.until(stops, self.out.content)):
            if marker == _CALL:
                yield from self.attempt(self._call(), _CALL)

    def _call(self) -> Steps[None]:
        source, out = self.source, self.out
        head, _ = yield from source.read_until(markers(">"))
        match = _NAME.fullmatch(head)
        if match is None:
            raise Malformed
        name = call_name(match[2])
        source.commit()
        out.start(name)
        tool = self.tools.get(name)
        arguments, root = ArgumentsWriter(out, tool), (tool.parameters if tool is not None else None) or {}
        while True:
            source.begin()
            yield from source.skip_space()
            key = yield from self._tag()
            if key == _END_CALL:
                break
            yield from self._argument(arguments, key, root)
        source.commit()
        arguments.close()
        out.end()

    def _tag(self) -> Steps[str]:
        yield from self.source.expect(f"{MARK}<")
        tag, _ = yield from self.source.read_until(markers(">"))
        if _KEY.fullmatch(tag.removeprefix("/")) is None:
            raise Malformed
        return tag

    def _argument(self, arguments: ArgumentsWriter, key: str, root: Mapping[str, Any]) -> Steps[None]:
        source = self.source
        source.commit()
        if arguments.kinds(key) == {"string"}:
            arguments.begin_text(key)
            if not (yield from source.until(markers(f"{MARK}</{key}>"), arguments.text)):
                raise Malformed
            arguments.end_text()
            return
        source.begin(MAX_VALUE_CHARS)
        element = yield from self._element(key, 0)
        source.commit()
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        arguments.add(key, json.dumps(_value_of(element, schema, root), ensure_ascii=False))

    def _element(self, name: str, depth: int) -> Steps[Element]:
        """Reads an element up to its closing tag."""
        if depth > _MAX_DEPTH:
            raise Malformed
        children: Children = []
        text = ""
        while True:
            piece, _ = yield from self.source.read_until(markers(f"{MARK}<"))
            text += piece
            tag, _ = yield from self.source.read_until(markers(">"))
            if tag == f"/{name}":
                return _with_text(children, text) if children else text
            if _KEY.fullmatch(tag) is None:
                raise Malformed
            child = yield from self._element(tag, depth + 1)
            children.append((tag, child))


def _tag(name: str) -> str:
    return f"{MARK}<{name}>"


def _is_key(name: str) -> bool:
    return _KEY.fullmatch(name) is not None


def _one(tool: Tool) -> Form:
    """Returns the form of a call after its first mark."""
    head, last = const(f'<invoke name="{tool.name}">'), const(_tag(_END_CALL))
    if not tool.strict:
        other_tag = sequence(text(not_matches=[f"<{_END_CALL}>(.|\\n)*"]), const(MARK))
        return sequence(head, repeat(other_tag), const(f"<{_END_CALL}>"))
    schemas = SchemaReader(tool.parameters)
    arguments = NestedElements(_tag, f"{MARK}<", _is_key, schemas).members_of(schemas.root)
    return sequence(*(part for part in (head, arguments, last) if part))


def _calls(tools: Sequence[Tool]) -> Form:
    return either(map(_one, tools))


SYNTAX = CallSyntax(
    (Announced((MARK,), _calls, beside=either(map(const, _SECTION_TAGS))),),
    section=(f"{SECTION[0]}\n", f"\n{SECTION[1]}"),
)


def _with_text(children: Children, text: str) -> Children:
    """Returns the elements with the text between them, if there is any, under a name that none of them has."""
    if not text.strip():
        return children
    name = _TEXT
    while any(name == one for one, _ in children):
        name = f"${name}"
    return [*children, (name, text)]


def _value_of(element: Element, schema: object, root: Mapping[str, Any]) -> Any:
    kinds = kinds_of(schema, root)
    if isinstance(element, str):
        if not element.strip() and "string" not in kinds and kinds & {"array", "object"}:
            return [] if "array" in kinds else {}  # how the template writes empty ones
        return orjson.loads(json_value(element, kinds))
    if "array" in kinds and "object" not in kinds:
        items = _of_kind("array", schema, root).get("items")
        return [_value_of(child, items, root) for _, child in element]
    return _object_of(element, _of_kind("object", schema, root), root)


def _object_of(children: Children, schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object. What occurs several times becomes a list."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    several: dict[str, list[Any]] = {}
    for name, child in children:
        inner = properties.get(name, others) if isinstance(properties, Mapping) else others
        several.setdefault(name, []).append(_value_of(child, inner, root))
    return {name: values[0] if len(values) == 1 else values for name, values in several.items()}


def _of_kind(kind: str, schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a schema that describes values of this kind."""
    if not isinstance(schema, Mapping):
        return {}
    schema = resolved(schema, root)
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        for one in parts[:MAX_ALTERNATIVES] if isinstance(parts, list) else ():
            if kind in kinds_of(one, root):
                return resolved(one, root) if isinstance(one, Mapping) else {}
    return schema
