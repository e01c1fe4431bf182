"""The grammar of values as elements within elements: an object's members and a list's items have tags of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.gateway.parsing.grammar.forms import Form, const, either, member, members, repeat, sequence
from baton.gateway.parsing.grammar.schema_reader import Inexpressible, SchemaReader, check_keys, count_of
from baton.gateway.parsing.grammar.tagged_arguments import tagged_value

_MAX_DEPTH = 8
_MAX_LISTED_ITEMS = 32  # each has a part of its own in the grammar
_ITEM = "item"
_NESTED = frozenset(("object", "array"))
_OF_LISTS = frozenset(("type", "items", "minItems", "maxItems"))


@dataclass(frozen=True, slots=True)
class NestedElements:
    """The forms of elements. `schemas` reads the tool's schema."""

    tag: Callable[[str], str]  # the tag with this text between its brackets
    stop: str  # begins each tag; plain text does not contain it
    is_key: Callable[[str], bool]
    schemas: SchemaReader

    def members_of(self, schema: Mapping[str, Any], depth: int = 0) -> Form | None:
        """Returns the form of an object's members, or None without any. Raises Inexpressible."""
        several = []
        for name, inner, required in self.schemas.properties(schema):
            if not self.is_key(name):
                raise Inexpressible(f"the name {name!r}")
            several.append(member(self._element(name, self._value(inner, name, depth + 1)), required))
        return members(several) if several else None

    def _element(self, name: str, content: Form | None) -> Form:
        begin, end = const(self.tag(name)), const(self.tag(f"/{name}"))
        return sequence(begin, end) if content is None else sequence(begin, content, end)

    def _value(self, schema: object, name: str, depth: int) -> Form | None:
        """Returns the form of one value, None for an empty one. Raises Inexpressible."""
        if depth > _MAX_DEPTH:
            raise Inexpressible(f"the depth of {name!r}")
        schema = self.schemas.resolved(schema) if isinstance(schema, Mapping) else {}
        kinds = self.schemas.kinds(schema)
        if not kinds & _NESTED:
            return either(tagged_value(schema, self.schemas, (self.stop,), name))
        if len(kinds) > 1:
            raise Inexpressible(f"the type of {name!r}: a list or an object may have no other type")
        if "anyOf" in schema or "oneOf" in schema:
            raise Inexpressible(f"the alternatives of {name!r}: those of lists and objects cannot be distinguished")
        return self._list(schema, name, depth) if kinds == {"array"} else self._object(schema, name, depth)

    def _object(self, schema: Mapping[str, Any], name: str, depth: int) -> Form | None:
        if not schema.get("properties") and schema.get("additionalProperties") is not False:
            raise Inexpressible(f"the members of {name!r}: they must be listed")
        return self.members_of(schema, depth)

    def _list(self, schema: Mapping[str, Any], name: str, depth: int) -> Form | None:
        check_keys(schema, _OF_LISTS, name)
        item = self._element(_ITEM, self._value(schema.get("items"), name, depth + 1))
        least, most = count_of(schema, "minItems", name) or 0, count_of(schema, "maxItems", name)
        if max(least, most or 0) > _MAX_LISTED_ITEMS:
            raise Inexpressible(f"minItems or maxItems of {name!r}: at most {_MAX_LISTED_ITEMS} can be counted")
        if most is not None:
            return members([member(item, at < least) for at in range(most)]) if most else None
        if not least:
            return repeat(item, optional=True)
        return sequence(*[item] * (least - 1), repeat(item))
