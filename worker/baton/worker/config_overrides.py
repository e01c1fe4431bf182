"""Overrides of config.json (--hf-overrides): merged at any depth, of the same types, and only of keys that are read."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from baton.rpc.errors import InvalidRequest

Path = tuple[str, ...]

_FIELD = "hf_overrides"
# Keys that many families read, to suggest one that config.json does not have.
_COMMON = (
    "architectures",
    "attention_bias",
    "dtype",
    "eos_token_id",
    "factor",
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_type",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
)


def parse_overrides(text: str) -> dict[str, Any]:
    """Returns the object of --hf-overrides; empty text: none. Raises InvalidRequest."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{_FIELD}={text} is not JSON: {error}", field=_FIELD) from error
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{_FIELD}={text} is {_kind(value)}; it must be an object with keys of config.json", field=_FIELD
        )
    return value


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the config with the overrides merged into it. Raises InvalidRequest for a value of another type."""
    return _merged(raw, overrides, source, ())


def check_read(
    raw: Mapping[str, Any],
    overrides: Mapping[str, Any],
    source: str,
    read: Callable[[Mapping[str, Any]], object],
    reader: str,
) -> None:
    """Raises InvalidRequest for a key that config.json does not have and the `reader`'s function `read` ignores."""
    merged = overridden(raw, overrides, source)
    for path in _added(raw, overrides, ()):
        if _is_read(merged, path, read):
            continue
        level = _at(raw, path[:-1])
        common = [key for key in _COMMON if key not in level and _is_read(merged, (*path[:-1], key), read)]
        near = difflib.get_close_matches(path[-1], [*level, *common], n=1)
        meant = f"; did you mean {'.'.join((*path[:-1], near[0]))}?" if near else ""
        raise InvalidRequest(
            f"{_FIELD}: {source} has no key {'.'.join(path)}, and {reader} reads none of that name{meant}", field=_FIELD
        )


def _merged(raw: Mapping[str, Any], overrides: Mapping[str, Any], source: str, path: Path) -> dict[str, Any]:
    merged = dict(raw)
    for key, value in overrides.items():
        old = raw.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merged(old, value, source, (*path, key))
            continue
        if old is not None and value is not None and _kind(old) != _kind(value):
            raise InvalidRequest(
                f"{_FIELD}: {'.'.join((*path, key))} is {json.dumps(value)}, {_kind(value)}; in {source} it is "
                f"{json.dumps(old)}: give {_kind(old)}, or null to leave it out",
                field=_FIELD,
            )
        merged[key] = value
    return merged


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "a string" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"


def _added(raw: Mapping[str, Any], overrides: Mapping[str, Any], path: Path) -> Iterator[Path]:
    """Yields the paths of overrides that are not in the config."""
    for key, value in overrides.items():
        old = raw.get(key)
        if isinstance(value, dict) and (old is None or isinstance(old, dict)):
            if old is None and not value:
                yield (*path, key)
            yield from _added(old or {}, value, (*path, key))
        elif key not in raw:
            yield (*path, key)


class _Probe:
    """A value that no key may have."""


def _is_read(raw: Mapping[str, Any], path: Path, read: Callable[[Mapping[str, Any]], object]) -> bool:
    """Returns whether the function behaves otherwise with an impossible value at a path."""
    probed = copy.deepcopy(dict(raw))
    level: dict[str, Any] = probed
    for key in path[:-1]:
        level = level.setdefault(key, {})
    level[path[-1]] = _Probe()
    return _outcome(read, probed) != _outcome(read, raw)


def _outcome(read: Callable[[Mapping[str, Any]], object], raw: Mapping[str, Any]) -> object:
    try:
        return read(raw)
    except Exception as error:  # whatever a reader raises for the impossible value
        return str(error)


def _at(raw: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    level: Any = raw
    for key in path:
        level = level.get(key) or {}
    return level if isinstance(level, Mapping) else {}
