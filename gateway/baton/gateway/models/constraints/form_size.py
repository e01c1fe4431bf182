"""The size of a grammar's form as text. Parts that occur in several places are shared, and counted in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from baton.gateway.models.constraints.structured_output import MAX_BYTES
from baton.gateway.parsing.grammar.forms import Form
from baton.rpc.errors import InvalidRequest

_SCHEMA = "json_schema"


def check_form_size(form: Form, field: str) -> None:
    """Raises InvalidRequest, which names the field, for a form whose text is larger than workers take.

    Takes time by the number of different parts, so it comes before anything that visits each place.
    """
    try:
        _Measure().size(form)
    except _TooLarge:
        raise InvalidRequest(
            f"{field}: the grammar of the tools' calls has more than {MAX_BYTES} bytes; use fewer tools, or smaller "
            "schemas: lists of many items, and definitions, count wherever they are used",
            field=field,
        ) from None


class _TooLarge(Exception):
    """The text is longer than MAX_BYTES."""


class _Measure:
    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by identity, of parts that the form holds

    def size(self, value: Any) -> int:
        """Returns the length of the JSON text, without white space. Raises _TooLarge."""
        if not isinstance(value, dict | list):
            return self._bounded(len(orjson.dumps(value)))
        known = self._sizes.get(id(value))
        if known is None:
            known = self._sizes[id(value)] = self._bounded(self._size(value))
        return known

    def _size(self, value: dict[str, Any] | list[Any]) -> int:
        if isinstance(value, list):
            return 2 + sum(self.size(item) + 1 for item in value)
        return 2 + sum(
            len(key) + 4 + (self._size_of_schema(item) if key == _SCHEMA else self.size(item))
            for key, item in value.items()
        )

    def _size_of_schema(self, schema: Any) -> int:
        """Returns the size of a schema, whose members are not looked into: definitions are shared as a whole."""
        if not isinstance(schema, Mapping):
            return self.size(schema)
        return 2 + sum(len(key) + 4 + self._size_of_member(item) for key, item in schema.items())

    def _size_of_member(self, value: Any) -> int:
        known = self._sizes.get(id(value))
        if known is None:
            known = self._sizes[id(value)] = self._bounded(len(orjson.dumps(value)))
        return known

    def _bounded(self, size: int) -> int:
        if size > MAX_BYTES:
            raise _TooLarge
        return size
