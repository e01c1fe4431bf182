"""Validates JSON values of requests that are encoded again later, so that encoding cannot fail."""

from __future__ import annotations

from typing import Any

import orjson

from baton.rpc.errors import InvalidRequest

MAX_DEPTH = 64
MAX_VALUES = 128 * 1024
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1


def checked_json(value: Any, field: str) -> str:
    """Returns the value as JSON text. Keys keep their order, which is the output's. Raises InvalidRequest."""
    check_json(value, field)
    return orjson.dumps(value).decode()


def check_json(value: Any, field: str) -> None:
    """Raises InvalidRequest for a value that is nested too deeply, too large, or has an integer beyond 64 bits."""
    level, depth, num_values = [value], 0, 0
    _check_integers(level, field)
    while level := [item for outer in level if isinstance(outer, dict | list) for item in _items(outer)]:
        depth += 1
        num_values += len(level)
        if num_values > MAX_VALUES:
            raise InvalidRequest(f"{field} has more than {MAX_VALUES} values", field=field)
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{field} is nested more than {MAX_DEPTH} levels deep", field=field)
        _check_integers(level, field)


def _check_integers(values: list[Any], field: str) -> None:
    for value in values:
        if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
            shown = str(value) if abs(value) < 10**30 else "an integer of more than 30 digits"
            raise InvalidRequest(
                f"{field} has {shown}; integers must be from {_MIN_INTEGER} to {_MAX_INTEGER}", field=field
            )


def _items(outer: dict[str, Any] | list[Any]) -> list[Any]:
    return list(outer.values()) if isinstance(outer, dict) else outer
