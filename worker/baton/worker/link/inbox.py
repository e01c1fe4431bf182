"""Objects that a front hands to an engine of its own process, where frames only carry their numbers."""

from __future__ import annotations

import itertools
from typing import Any


class Inbox:
    """Each object is taken once. Thread-safe, because each method is one operation of a dictionary."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._objects: dict[int, Any] = {}

    def put(self, value: Any) -> int:
        """Keeps an object. Returns its number."""
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def take(self, number: int) -> Any:
        """Removes and returns an object."""
        return self._objects.pop(number)
