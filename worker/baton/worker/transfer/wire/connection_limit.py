"""Room for one more connection of a kind that may have so many: the one that was not used for longest goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from baton.rpc.errors import NoCapacity

T = TypeVar("T")

_SETTLED_SECONDS = 1.0  # that a connection must have been idle
_GONE_SECONDS = 3.0  # until one that was asked to go is gone
_NAP_SECONDS = 0.02


class Retirable(Protocol):
    """A connection, or the link that makes it. Thread-safe."""

    def idle_since(self, kind: str) -> float | None:
        """When it was last used, by the monotonic clock. None: it is in use, about to go, or of another kind."""

    def retire(self) -> None:
        """It ends soon, as if its peer had ended it."""


def retire_longest_idle(kind: str, connections: Iterable[Retirable]) -> bool:
    """Asks the one to go that was not used for longest. False: each was used a moment ago."""
    idle = [(since, one) for one in connections if (since := one.idle_since(kind)) is not None]
    if not idle:
        return False
    since, oldest = min(idle, key=lambda entry: entry[0])
    if time.monotonic() - since < _SETTLED_SECONDS:
        return False
    oldest.retire()
    return True


def retry_after_retiring(make: Callable[[], T], retire: Callable[[], bool]) -> T:
    """What `make` makes; where it has no capacity, once something that was asked to go is gone. Raises NoCapacity."""
    deadline = 0.0
    while True:
        try:
            return make()
        except NoCapacity:
            if not deadline and retire():
                deadline = time.monotonic() + _GONE_SECONDS
            if time.monotonic() >= deadline:
                raise
        time.sleep(_NAP_SECONDS)
