"""The JSON types that a schema allows. Clients write it, so alternatives and references are followed within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
ALL_KINDS = frozenset(KINDS.values())
MAX_ALTERNATIVES = 1024  # looked at; a value of more may be of any type
_MAX_REFERENCES = 16  # followed one after the other
_MAX_REFERENCE_CHARS = 1024


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follows references into the root and returns the schema they name."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/") or len(reference) > _MAX_REFERENCE_CHARS:
            return schema
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return schema
        own = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**own, **found} if own else found
    return schema


def kinds_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that a schema allows; all of them if it does not say."""
    return visited_kinds(schema, root)[0]


def visited_kinds(schema: object, root: Mapping[str, Any]) -> tuple[frozenset[str], int]:
    """Returns the same, and how many alternatives were looked at. Each is looked at once, however often it is named."""
    kinds: set[str] = set()
    waiting: list[Any] = [schema]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if len(seen) > MAX_ALTERNATIVES or not isinstance(part, Mapping):
            return ALL_KINDS, len(seen)
        part = resolved(part, root)
        alternatives = _alternatives(part)
        if alternatives is None:
            kinds |= _own_kinds(part)
        else:
            waiting += alternatives[: MAX_ALTERNATIVES + 1]
    return frozenset(kinds) or ALL_KINDS, len(seen)


def _alternatives(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the schemas that decide the type, or None if the schema itself does."""
    if isinstance(schema.get("type"), str | list) or "const" in schema or _values_of(schema):
        return None
    lists = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    return next(filter(None, lists), None)


def _own_kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,)) & ALL_KINDS or ALL_KINDS
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str)) & ALL_KINDS or ALL_KINDS
    if "const" in schema:
        return frozenset((KINDS.get(type(schema["const"]), "string"),))
    if values := _values_of(schema):
        return frozenset(KINDS.get(one, "string") for one in set(map(type, values)))
    return ALL_KINDS


def _values_of(schema: Mapping[str, Any]) -> list[Any]:
    values = schema.get("enum")
    return values if isinstance(values, list) else []
