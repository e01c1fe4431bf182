"""Closes the objects of a JSON Schema: those that list properties allow no others, unless the schema does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_OPENNESS = ("additionalProperties", "unevaluatedProperties")
_OWN = ("properties", "patternProperties")
_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("then", "else")
# Keywords with subschemas. Without `not`, `if` and `propertyNames`: closing inside them would invert their meaning.
_ONE = ("items", "additionalProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems", "contains")
_LISTS = ("prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_MAX_VISITS = 100_000  # about 1 us each; an inlined reference counts as its target


def close_objects(schema: Schema) -> Schema:
    """Returns the schema with `additionalProperties: false` in every object that lists properties and lacks it.

    Existing values are kept. An object that lists no properties stays open. A composition (`allOf`, `anyOf` beside
    `properties`, a `$ref` with siblings) is closed as one: it allows the properties of all its parts.
    `unevaluatedProperties: false` closes in the same way.
    """
    closer = _Closer(schema)
    closed: Schema = closer.close(schema)
    return {**closed, "$defs": {**closed.get("$defs", {}), **closer.named}} if closer.named else closed


class _Closer:
    def __init__(self, root: Schema) -> None:
        self.named: dict[str, Schema] = {}  # closed schemas that contain themselves, by name in $defs
        self._root = root
        self._num_visits = 0
        self._names: dict[int, str] = {}  # of the nodes being closed; empty: not needed yet

    def close(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if id(node) in self._names:
            name = self._names[id(node)] = self._names[id(node)] or self._new_name()
            return {"$ref": f"#/$defs/{name}"}
        self._names[id(node)] = ""
        closed = self._closed(node)
        name = self._names.pop(id(node))
        if not name:
            return closed
        self.named[name] = closed
        return {"$ref": f"#/$defs/{name}"}

    def _new_name(self) -> str:
        taken = self._root.get("$defs")
        number = len(self._names) + len(self.named)
        while isinstance(taken, dict) and f"closed-{number}" in taken:
            number += 1
        return f"closed-{number}"

    def _closed(self, node: Schema) -> Any:
        if not self._is_composed(node):
            closed = self._inside(node)
            for key in (*_IN_PLACE_LISTS, *_IN_PLACE):
                if key in node:
                    closed[key] = _mapped(node[key], self.close)
            return self._shut(closed, node) if any(isinstance(node.get(key), dict) for key in _OWN) else closed
        names, patterns = self._listed(node, frozenset())
        opened = self._open(node, frozenset())
        if not names and not patterns:
            return opened
        return self._shut(_with_listed(opened, names, patterns), node)

    def _is_composed(self, node: Schema) -> bool:
        """Returns whether several parts of the node list properties of the same object."""
        parts = [key for key in (*_IN_PLACE_LISTS, *_IN_PLACE, "$ref") if key in node]
        own = any(isinstance(node.get(key), dict) for key in _OWN) or any(key in node for key in _OPENNESS)
        many = isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1
        return bool(parts) and (own or many or len(parts) > 1)

    def _shut(self, closed: Schema, node: Schema) -> Schema:
        unevaluated = node.get("unevaluatedProperties")
        if "additionalProperties" in node:
            return closed
        if isinstance(unevaluated, bool):
            closed.pop("unevaluatedProperties", None)
            closed["additionalProperties"] = unevaluated
        elif unevaluated is None:
            closed["additionalProperties"] = False
        return closed

    def _inside(self, node: Schema) -> Schema:
        """Returns the node with the schemas of its values closed, and the schemas that apply in place unchanged."""
        self._count()
        closed = dict(node)
        for key in _ONE:
            if isinstance(node.get(key), dict):
                closed[key] = self.close(node[key])
        for key in _LISTS:
            if isinstance(node.get(key), list):
                closed[key] = [self.close(item) for item in node[key]]
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                closed[key] = {name: self.close(value) for name, value in node[key].items()}
        return closed

    def _open(self, node: Any, seen: frozenset[str]) -> Any:
        """Returns the node as part of a composition: closed inside, but open itself. Inlines references."""
        if not isinstance(node, dict):
            return node
        opened = self._inside(node)
        for key in (*_IN_PLACE_LISTS, *_IN_PLACE):
            if key in node:
                opened[key] = _mapped(node[key], lambda part: self._open(part, seen))
        target = self._target(node, seen)
        if target is not None:
            del opened["$ref"]
            inlined = self._open(target, seen | {node["$ref"]})
            if opened:
                opened["allOf"] = [*opened.get("allOf", ()), inlined]
            else:
                opened = inlined
        return opened

    def _listed(self, node: Any, seen: frozenset[str]) -> tuple[dict[str, None], dict[str, None]]:
        """Returns the names and patterns of all properties that the node's parts list, in their order."""
        names: dict[str, None] = {}
        patterns: dict[str, None] = {}
        if isinstance(node, dict):
            self._count()
            for found, key in ((names, "properties"), (patterns, "patternProperties")):
                if isinstance(node.get(key), dict):
                    found.update(dict.fromkeys(node[key]))
            target = self._target(node, seen)
            for part, below in [*((part, seen) for part in _parts(node)), (target, seen | {str(node.get("$ref"))})]:
                more_names, more_patterns = self._listed(part, below)
                names.update(more_names)
                patterns.update(more_patterns)
        return names, patterns

    def _target(self, node: Schema, seen: frozenset[str]) -> Schema | None:
        """Returns the target of the node's reference in this schema; None without one, or for a cycle."""
        ref = node.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#/") or ref in seen:
            return None
        target: Any = self._root
        for step in ref[2:].split("/"):
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = target[int(name)] if name.isdigit() and int(name) < len(target) else None
            else:
                target = target.get(name) if isinstance(target, Mapping) else None
        return target if isinstance(target, dict) else None

    def _count(self) -> None:
        self._num_visits += 1
        if self._num_visits > _MAX_VISITS:
            raise ValueError(f"its $refs beside other keywords expand to more than {_MAX_VISITS} schemas")


def _parts(node: Schema) -> Iterator[Any]:
    for key in _IN_PLACE_LISTS:
        if isinstance(node.get(key), list):
            yield from node[key]
    for key in _IN_PLACE:
        yield node.get(key)


def _mapped(value: Any, change: Any) -> Any:
    return [change(item) for item in value] if isinstance(value, list) else change(value)


def _with_listed(node: Schema, names: dict[str, None], patterns: dict[str, None]) -> Schema:
    """Returns the node with these properties added; what its parts require of them is kept."""
    listed = dict(node)
    for key, found in (("properties", names), ("patternProperties", patterns)):
        if found:
            own = node.get(key)
            own = own if isinstance(own, dict) else {}
            listed[key] = {**own, **{name: {} for name in found if name not in own}}
    return listed
