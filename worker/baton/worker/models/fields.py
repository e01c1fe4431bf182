"""Typed access to a JSON object. Every error names the file, the key and the allowed values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and its source. Null counts as absent."""

    raw: Mapping[str, Any]
    source: str

    def positive_int(self, key: str, default: int | None = None) -> int:
        """Returns an integer of at least 1."""
        value = self._value(key, default, "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "a positive integer")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, "a number above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def inner(self, key: str) -> Fields | None:
        """Returns the object at a key, if there is one."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(value, f"{self.source}: {key}")

    def error(self, key: str, allowed: str) -> InvalidRequest:
        """Returns the error for the value at a key."""
        return InvalidRequest(f"{self.source}: {key} is {self.raw.get(key)!r}; it must be {allowed}", field="model")

    def _value(self, key: str, default: Any, allowed: str) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is None:
            raise InvalidRequest(f"{self.source}: {key} is missing; it must be {allowed}", field="model")
        return default


def read_json(path: Path, why: str) -> dict[str, Any]:
    """Reads a JSON file that holds an object. Raises InvalidRequest with the file's name."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InvalidRequest(f"{path} is missing: {why}", field="model") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="model") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", field="model") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} holds a {type(content).__name__}; it must hold an object", field="model")
    return content
