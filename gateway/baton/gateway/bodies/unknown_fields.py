"""Finds keys of a JSON body that its request type does not have, which the typed decoder skips silently."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw, Struct, inspect

# Each object takes about 1 us; json_size.py limits their number.
_MAX_FOUND = 64
_BEGINNING = 16  # bytes of a value
_MAX_STRICT_BYTES = 1 << 20
_NOTHING = (b"null", b"[]", b"{}", b'""')  # neutral values

_object = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Raw])


@dataclass(frozen=True, slots=True)
class Shape:
    """The keys of an object, and the shapes of values that are objects or lists of objects."""

    names: frozenset[str]
    nested: Mapping[str, Shape]
    # JSON values of `type` for objects with these keys; other objects may have any keys. Empty: all objects.
    types: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key that the request type does not have."""

    place: str  # of its object, such as messages[0]; empty: the body
    name: str
    known: frozenset[str]  # keys that this object may have
    value: bytes  # the beginning of its value

    def __str__(self) -> str:
        return f"{self.place}.{self.name}" if self.place else self.name


@dataclass(slots=True)
class _Search:
    """Found keys by path without indices, so that the items of a list count once."""

    found: dict[str, UnknownKey] = field(default_factory=dict)


class KnownKeys:
    """The keys of one request type."""

    def __init__(self, kind: type[Struct]) -> None:
        shape = _shape(inspect.type_info(kind))
        assert shape is not None
        self._shape = shape
        self._strict = msgspec.json.Decoder(_strict(shape))

    def unknown(self, body: bytes) -> list[UnknownKey]:
        """Returns the unknown keys of a decoded body, except keys with neutral values.

        A key that is unknown in several objects of a list is returned once, with the first index.
        """
        if len(body) <= _MAX_STRICT_BYTES:
            with contextlib.suppress(msgspec.ValidationError):
                self._strict.decode(body)
                return []
        search = _Search()
        _search_object(body, self._shape, "", "", search)
        return list(search.found.values())


@cache
def known_keys(kind: type[Struct]) -> KnownKeys:
    """Returns a request type's keys, which take milliseconds to find out."""
    return KnownKeys(kind)


def _search_object(raw: bytes | Raw, shape: Shape, place: str, kind: str, search: _Search) -> None:
    values = _object.decode(raw)
    if shape.types and "type" in values and bytes(values["type"]) not in shape.types:
        return
    if not values.keys() <= shape.names:
        for name, value in values.items():
            if name in shape.names or len(search.found) >= _MAX_FOUND:
                continue
            if (start := bytes(memoryview(value)[:_BEGINNING])) not in _NOTHING:
                search.found.setdefault(f"{kind}.{name}", UnknownKey(place, name, shape.names, start))
    for name, inner in shape.nested.items():
        if (nested := values.get(name)) is not None:
            dot = "." if place else ""
            _search_value(nested, inner, f"{place}{dot}{name}", f"{kind}.{name}", search)


def _search_value(raw: Raw, shape: Shape, place: str, kind: str, search: _Search) -> None:
    start = bytes(memoryview(raw)[:1])
    if start == b"[":
        for index, item in enumerate(_list.decode(raw)):
            _search_value(item, shape, f"{place}[{index}]", f"{kind}[]", search)
    elif start == b"{":
        _search_object(raw, shape, place, kind, search)


def _strict(shape: Shape) -> type[Struct]:
    """Returns a type that decodes the shape's objects only without unknown keys, which is much faster than a search."""
    fields: list[tuple[str, Any, Any]] = []
    for number, name in enumerate(sorted(shape.names)):
        kind: Any = Raw
        if inner := shape.nested.get(name):
            nested = _strict(inner)
            kind = nested | list[nested] | str | bool | int | float | None  # type: ignore[valid-type]
        fields.append((f"f{number}", kind, msgspec.field(name=name, default=None)))
    return msgspec.defstruct("Strict", fields, kw_only=True, forbid_unknown_fields=True, gc=False)


def _shape(kind: inspect.Type) -> Shape | None:
    """Returns the shape of a type's objects, or None if it has none or allows any key."""
    match kind:
        case inspect.Metadata(type=inner):
            return _shape(inner)
        case inspect.ListType(item_type=item):
            return _shape(item)
        case inspect.UnionType(types=types):
            return _merged([shape for each in types if (shape := _shape(each)) is not None])
        case inspect.StructType(cls=cls, fields=fields, tag_field=tag):
            nested = {each.encode_name: shape for each in fields if (shape := _shape(each.type)) is not None}
            # OBJECTS are the types of values that are decoded as objects with any keys.
            objects = {name: _shape(inspect.type_info(each)) for name, each in getattr(cls, "OBJECTS", {}).items()}
            nested |= {name: shape for name, shape in objects.items() if shape is not None}
            names = frozenset(each.encode_name for each in fields)
            return Shape(names | {tag} if tag else names, nested, getattr(cls, "TYPES", ()))
        case _:
            return None


def _merged(shapes: list[Shape]) -> Shape | None:
    """Returns the shape of objects of several types, with the keys of all of them."""
    if len(shapes) < 2:
        return shapes[0] if shapes else None
    nested: dict[str, Shape] = {}
    for shape in shapes:
        for name, inner in shape.nested.items():
            before = nested.get(name)
            merged = inner if before is None else _merged([before, inner])
            assert merged is not None
            nested[name] = merged
    return Shape(frozenset().union(*(shape.names for shape in shapes)), nested)
