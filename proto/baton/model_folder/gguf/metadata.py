"""Typed access to the metadata of a GGUF file. Every error names the file, the key and the allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Metadata:
    """The values, and the file that they are from. A key may have no value only where a default is given."""

    values: Mapping[str, Any]
    path: Path

    def count(self, key: str, default: int | None = None) -> int:
        """Returns an integer of at least 1."""
        value = self._value(key, default, "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0."""
        value = self._value(key, default, "a number above 0")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "a number above 0")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """Returns a list of strings."""
        value = self._value(key, default, "a list of strings")
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(key, "a list of strings")
        return value

    def numbers(self, key: str, length: int) -> list[float]:
        """Returns a list of `length` numbers."""
        value = self._value(key, None, f"a list of {length} numbers")
        if not isinstance(value, list) or len(value) != length:
            raise self.error(key, f"a list of {length} numbers")
        return value

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """Returns the id of a token, if there is one."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, int) and 0 <= value < num_tokens):
            raise self.error(key, f"a token id below {num_tokens}")
        return value

    def error(self, key: str, allowed: str) -> InvalidRequest:
        """Returns the error for the value at a key."""
        value = _shown(self.values.get(key))
        return InvalidRequest(f"{self.path}: {key} is {value}; it must be {allowed}", field="model")

    def _value(self, key: str, default: Any, allowed: str) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise InvalidRequest(f"{self.path}: {key} is missing; it must be {allowed}", field="model")
        return default


def _shown(value: object) -> str:
    """Returns a value for an error; long lists by their length."""
    return f"a list of {len(value)}" if isinstance(value, list) and len(value) > 4 else repr(value)
