"""The values that a field of a request takes, if it takes only some, for the errors that list them."""

from __future__ import annotations

import re
from functools import cache

from msgspec import Struct, inspect

_STEPS = re.compile(r"\.\.\.|[^.\[\]]+")  # of a place: names, indices, and ... for any key

_type_info = cache(inspect.type_info)


def allowed_values(kind: type[Struct], place: str) -> list[str]:
    """Returns the values that `kind` takes at a place like `messages[0].role`, sorted."""
    found = [_type_info(kind)]
    for step in _STEPS.findall(place):
        found = [inner for each in found for inner in _inside(each, step)]
    return list(dict.fromkeys(value for each in found for value in _values(each)))


def _inside(kind: inspect.Type, step: str) -> list[inspect.Type]:
    match kind:
        case inspect.Metadata(type=inner):
            return _inside(inner, step)
        case inspect.UnionType(types=types):
            return [inner for each in types for inner in _inside(each, step)]
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return [item]
        case inspect.DictType(value_type=value):
            return [value]
        case inspect.StructType(fields=fields):
            return [each.type for each in fields if each.encode_name == step]
        case _:
            return []


def _values(kind: inspect.Type) -> list[str]:
    match kind:
        case inspect.Metadata(type=inner):
            return _values(inner)
        case inspect.UnionType(types=types):
            return [value for each in types for value in _values(each)]
        case inspect.LiteralType(values=values):
            return [str(value) for value in values]
        case _:
            return []
