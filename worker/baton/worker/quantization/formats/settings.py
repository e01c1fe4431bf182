"""The values of a quantization_config, checked. Errors name the key, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def choice(settings: Mapping[str, Any], key: str, allowed: Sequence[Any], default: Any = None) -> Any:
    """Returns one of the allowed values. Null counts as absent."""
    value = settings.get(key)
    value = default if value is None else value
    if value not in [one for one in allowed if type(one) is type(value)]:
        raise ValueError(f"{key} is {value!r}; it must be one of {', '.join(map(str, allowed))}")
    return value


def flag(settings: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Returns true or false."""
    found: bool = choice(settings, key, (True, False), default)
    return found


def group_size(settings: Mapping[str, Any], key: str = "group_size", default: int | None = None) -> int:
    """Returns the columns that share a scale; 0: the whole row, which configs call -1."""
    value = settings.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < -1 or value == 0:
        raise ValueError(f"{key} is {value!r}; it must be a positive integer, or -1 for the whole row")
    return max(0, value)


def names(settings: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Returns the list of strings at the first key that is present."""
    for key in keys:
        value = settings.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"{key} is {value!r}; it must be a list of names")
        return tuple(value)
    return ()


def block(settings: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Returns the rows and columns of a block; None if there are no blocks."""
    value = settings.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(_is_size(one) for one in value):
        raise ValueError(f"{key} is {value!r}; it must be two positive integers")
    rows, columns = value
    return rows, columns


def inner(settings: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Returns the object at a key, if there is one."""
    value = settings.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}; it must be an object")
    return value


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
