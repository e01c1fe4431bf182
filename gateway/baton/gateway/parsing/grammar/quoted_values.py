"""The grammar of values with bare keys and texts between special tokens: {key:<q>text<q>,list:[1,<q>a<q>]}."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.gateway.parsing.grammar.forms import Form, const, either, member, members, repeat, sequence
from baton.gateway.parsing.grammar.schema_reader import Inexpressible, SchemaReader, check_keys, count_of
from baton.gateway.parsing.grammar.tagged_arguments import tagged_value

_MAX_DEPTH = 8
_MAX_LISTED_ITEMS = 32  # each has a part of its own in the grammar
_NESTED = frozenset(("object", "array"))
_OF_LISTS = frozenset(("items", "minItems", "maxItems"))
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties"))


@dataclass(frozen=True, slots=True)
class QuotedValues:
    """The forms of values. `schemas` reads the tool's schema."""

    quote: str
    is_key: Callable[[str], bool]
    schemas: SchemaReader

    def members_of(self, schema: Mapping[str, Any], depth: int = 0) -> Form | None:
        """Returns the form of an object's members, or None without any. Raises Inexpressible."""
        several = []
        for name, inner, required in self.schemas.properties(schema):
            if not self.is_key(name):
                raise Inexpressible(f"the name {name!r}")
            several.append(member(sequence(const(f"{name}:"), self.value(inner, name, depth + 1)), required))
        return members(several, ",") if several else None

    def value(self, schema: object, name: str, depth: int = 0) -> Form:
        """Returns the form of one value. Raises Inexpressible."""
        if depth > _MAX_DEPTH:
            raise Inexpressible(f"the depth of {name!r}")
        schema = self.schemas.resolved(schema) if isinstance(schema, Mapping) else {}
        kinds = self.schemas.kinds(schema)
        if not kinds & _NESTED:
            return either(map(self._leaf, tagged_value(schema, self.schemas, (self.quote,), name)))
        if "anyOf" in schema or "oneOf" in schema or len(kinds) > 1:
            return either(self.value(one, name, depth + 1) for one in _alternatives(schema, name))
        return self._list(schema, name, depth) if kinds == {"array"} else self._object(schema, name, depth)

    def _leaf(self, form: Form) -> Form:
        return form if form["type"] == "json_schema" else sequence(const(self.quote), form, const(self.quote))

    def _object(self, schema: Mapping[str, Any], name: str, depth: int) -> Form:
        if not schema.get("properties") and schema.get("additionalProperties") is not False:
            raise Inexpressible(f"the members of {name!r}: they must be listed")
        inside = self.members_of(schema, depth)
        return const("{}") if inside is None else sequence(const("{"), inside, const("}"))

    def _list(self, schema: Mapping[str, Any], name: str, depth: int) -> Form:
        check_keys(schema, _OF_LISTS | {"type"}, name)
        item = self.value(schema.get("items"), name, depth + 1)
        least, most = count_of(schema, "minItems", name) or 0, count_of(schema, "maxItems", name)
        if max(least, most or 0) > _MAX_LISTED_ITEMS:
            raise Inexpressible(f"minItems or maxItems of {name!r}: at most {_MAX_LISTED_ITEMS} can be counted")
        if most is not None:
            inside = members([member(item, at < least) for at in range(most)], ",") if most else None
        elif least:
            more = repeat(sequence(const(","), item), optional=True)
            inside = sequence(members([member(item, True)] * least, ","), more)
        else:
            inside = repeat(item, ",", optional=True)
        return const("[]") if inside is None else sequence(const("["), inside, const("]"))


def _alternatives(schema: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Returns the schema as several, each of fewer types."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            check_keys(schema, frozenset((key,)), name)
            return list(schema[key])
    kinds = schema.get("type")
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise Inexpressible(f"the type of {name!r}: it must be given")
    return [_of_kind(schema, kind) for kind in kinds]


def _of_kind(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    others = _OF_LISTS | _OF_OBJECTS
    if kind in _NESTED:
        others = others - (_OF_LISTS if kind == "array" else _OF_OBJECTS)
    return {**{key: value for key, value in schema.items() if key not in others}, "type": kind}
