"""Estimates the compilation cost of a constraint from its text. Compiles nothing.

Most constraints are JSON Schemas without patterns, whose cost depends on the number of their properties and values.
Others need a trial.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from baton.worker.core import Constraint, ConstraintForm

# Microseconds of CPU.
MAX_PLAIN_COST = 12_000
MAX_KNOWN_COST = 450_000
_BASE_COST = 1_000
_COST_PER_SCHEMA = 10
_COST_PER_VALUE = 4  # of an enum, and of choices
_COST_PER_RANGE = 350  # numbers with bounds, and strings with a format
_COST_PER_PAIR = 0.1  # of properties of one object
_COST_PER_EXCLUSION = 10  # of each pair of alternatives of a oneOf
_COST_PER_CHARACTER = 0.2

MAX_PLAIN_BYTES = 16 * 1024
_MAX_COUNT = 5000  # minLength, maxLength, minItems and maxItems of all schemas together

# Keywords of known cost. Other keywords need a trial.
_NOTES = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
_SCHEMAS = frozenset(("items", "additionalProperties"))
_SCHEMA_LISTS = frozenset(("anyOf", "oneOf", "prefixItems"))
_SCHEMA_MAPS = frozenset(("properties", "$defs", "definitions"))
_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems"))
_VALUES = frozenset(("type", "required", "const", "enum", "format", "discriminator"))
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_KNOWN_KEYS = _NOTES | _SCHEMAS | _SCHEMA_LISTS | _SCHEMA_MAPS | _COUNTS | _VALUES | _BOUNDS | {"$ref"}
# Next to these, other keywords need no intersection of schemas.
_ALONE = ("anyOf", "oneOf", "$ref")
_BESIDE = _NOTES | {"$defs", "definitions", "discriminator"}

_BASE_BYTES = 768 * 1024
_BYTES_PER_BYTE = 640  # of the constraint's text; each may be a state of the automaton
_BYTES_PER_COUNT = 3072
# One class of whitespace, with a quantifier.
_PLAIN_SPACE = re.compile(r"(?: |\\x20|\\s|\[(?: |\\[nrts]|\\x20)+\])[?*+]?")
_COUNT = re.compile(r'"(?:min|max)(?:Length|Items)":\s*(\d+)')


def estimated_bytes(constraint: Constraint) -> int:
    """Returns an upper bound of the bytes of a plain constraint's compilation, after any number of tokens."""
    size = len(constraint.text) + sum(map(len, constraint.choices))
    counts = 0
    if constraint.form in (ConstraintForm.JSON_SCHEMA, ConstraintForm.STRUCTURAL_TAG):
        counts = sum(min(int(found[1][:9]), _MAX_COUNT) for found in _COUNT.finditer(constraint.text))
    return _BASE_BYTES + _BYTES_PER_BYTE * size + _BYTES_PER_COUNT * counts


def is_plain(constraint: Constraint) -> bool:
    """Returns whether the constraint is known to compile within milliseconds. Takes less than one."""
    if len(constraint.text) > MAX_PLAIN_BYTES or sum(map(len, constraint.choices)) > MAX_PLAIN_BYTES:
        return False
    cost = known_cost(constraint)
    return cost is not None and cost <= MAX_PLAIN_COST


def known_cost(constraint: Constraint) -> float | None:
    """Returns an upper bound of a compilation in microseconds; None if it needs a trial."""
    form = constraint.form
    if constraint.whitespace_pattern and not _PLAIN_SPACE.fullmatch(constraint.whitespace_pattern):
        return None
    if form is ConstraintForm.JSON_OBJECT:
        return _BASE_COST
    if form is ConstraintForm.CHOICES:
        size = sum(map(len, constraint.choices))
        return _BASE_COST + _COST_PER_VALUE * len(constraint.choices) + _COST_PER_CHARACTER * size
    if form not in (ConstraintForm.JSON_SCHEMA, ConstraintForm.STRUCTURAL_TAG):
        return None
    try:
        value = json.loads(constraint.text)
    except (ValueError, RecursionError):
        return 0  # rejected without a compilation
    roots = [value] if form is ConstraintForm.JSON_SCHEMA else list(_schemas_of_tag(value))
    cost = _cost_of_schemas(roots)
    return None if cost is None else _BASE_COST + _COST_PER_CHARACTER * len(constraint.text) + cost


def _schemas_of_tag(value: Any) -> Iterator[Any]:
    """Yields the schemas of a structural tag, and None for each part that needs a trial."""
    level = [value]
    while level:
        below: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                if part.get("type") in ("regex", "grammar"):
                    yield None
                for key, item in part.items():
                    if key in ("json_schema", "schema"):
                        yield item
                    else:
                        below.append(item)
            elif isinstance(part, list):
                below += part
        level = below


def _cost_of_schemas(level: list[Any]) -> float | None:
    cost, num_counts = 0.0, 0
    while level:
        below: list[Any] = []
        for schema in level:
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict) or not _is_known(schema):
                return None
            cost += _own_cost(schema)
            num_counts += sum(schema[key] for key in _COUNTS if key in schema)
            below += _below(schema)
        if num_counts > _MAX_COUNT:
            return None
        level = below
    return cost


def _is_known(schema: dict[str, Any]) -> bool:
    if not schema.keys() <= _KNOWN_KEYS:
        return False
    if any(key in schema for key in _ALONE) and len(schema.keys() - _BESIDE) > 1:
        return False
    return all(isinstance(schema[key], int) and 0 <= schema[key] <= _MAX_COUNT for key in _COUNTS if key in schema)


def _own_cost(schema: dict[str, Any]) -> float:
    cost: float = _COST_PER_SCHEMA
    if "format" in schema or not _BOUNDS.isdisjoint(schema):
        cost += _COST_PER_RANGE
    for key, each, power in (
        ("enum", _COST_PER_VALUE, 1),
        ("properties", _COST_PER_PAIR, 2),
        ("oneOf", _COST_PER_EXCLUSION, 2),
    ):
        value = schema.get(key)
        cost += each * len(value) ** power if isinstance(value, list | dict) else 0
    return cost


def _below(schema: dict[str, Any]) -> list[Any]:
    below = [schema[key] for key in _SCHEMAS if key in schema]
    for key in _SCHEMA_LISTS:
        value = schema.get(key)
        below += value if isinstance(value, list) else []
    for key in _SCHEMA_MAPS:
        value = schema.get(key)
        below += list(value.values()) if isinstance(value, dict) else []
    return below
