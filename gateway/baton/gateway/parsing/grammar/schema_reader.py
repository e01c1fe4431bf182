"""Reads the schema of a tool's arguments for grammars of tags. Clients write it, so all that is read is counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.gateway.parsing.reading.schema_kinds import resolved, visited_kinds

DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly format $comment $schema $id".split()  # noqa: SIM905
)
# Members of schemas. A reference is read again wherever it is named, so a small text may expand without end.
MAX_READ = 16 << 10
_OBJECT_KEYS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", *DEFINITIONS, "strict"}


class Inexpressible(Exception):
    """The schema cannot be expressed in tags. The message names the reason."""


class SchemaReader:
    """One tool's schema, read within MAX_READ members. References start from `root`."""

    def __init__(self, root: Mapping[str, Any] | None) -> None:
        self.root: Mapping[str, Any] = root or {}
        self._num_read = 0

    def resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the schema without references. Raises Inexpressible."""
        found = resolved(schema, self.root)
        self.count(1 + len(found))
        return found

    def kinds(self, schema: object) -> frozenset[str]:
        """Returns the JSON types that a schema allows. Raises Inexpressible."""
        kinds, num_visited = visited_kinds(schema, self.root)
        self.count(num_visited)
        return kinds

    def properties(self, schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """Returns an object's properties: name, schema and whether it is required. Raises Inexpressible."""
        schema = self.resolved(schema)
        unknown = sorted(set(schema) - _OBJECT_KEYS)
        if unknown:
            raise Inexpressible(f"{unknown[0]} at the schema's top level")
        properties, listed = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(listed, list):
            raise Inexpressible("its properties: they must be an object, and required a list of their names")
        required = dict.fromkeys(name for name in listed if isinstance(name, str))
        self.count(len(properties) + len(listed))
        names = [*properties, *(name for name in required if name not in properties)]
        return [(name, properties.get(name, {}), name in required) for name in names]

    def with_definitions(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the schema with the root's definitions, so that its references lead to them."""
        return {**{key: self.root[key] for key in DEFINITIONS if key in self.root}, **schema}

    def count(self, num_read: int) -> None:
        """Raises Inexpressible once more was read than any grammar holds."""
        self._num_read += num_read
        if self._num_read > MAX_READ:
            raise Inexpressible(f"more than {MAX_READ} members of schemas, with each $ref read where it is named")


def check_keys(schema: Mapping[str, Any], allowed: frozenset[str], name: str) -> None:
    """Raises Inexpressible if the schema of `name` has keys beside annotations, definitions and these."""
    unknown = sorted(set(schema) - allowed - ANNOTATIONS - set(DEFINITIONS))
    if unknown:
        raise Inexpressible(f"{unknown[0]} of {name!r}")


def count_of(schema: Mapping[str, Any], key: str, name: str) -> int | None:
    """Returns the number of this key, or None without one. Raises Inexpressible for what is no number of things."""
    value = schema.get(key)
    if value is None:
        return None
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(whole, bool) or not isinstance(whole, int) or whole < 0:
        raise Inexpressible(f"{key} of {name!r}: it must be a whole number")
    return whole
