"""Frees capacity for one more connection of a kind that has a limit, by retiring the one that was idle longest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from baton.rpc.errors import NoCapacity

T = TypeVar("T")

_SETTLED_SECONDS = 1.0  # the shortest idle time of a connection that is retired
_GONE_SECONDS = 3.0  # for a retired connection to close
_NAP_SECONDS = 0.02


class Retirable(Protocol):
    """A connection that can be closed to free capacity. Thread-safe."""

    def idle_since(self, kind: str) -> float | None:
        """Returns when it was last used, by the monotonic clock. None: it is in use, retired, or of another kind."""

    def retire(self) -> None:
        """Makes the connection end soon, as if its peer had ended it."""


def retire_longest_idle(kind: str, connections: Iterable[Retirable]) -> bool:
    """Retires the connection that was idle longest. False: every one was used a moment ago."""
    idle = [(since, one) for one in connections if (since := one.idle_since(kind)) is not None]
    if not idle:
        return False
    since, oldest = min(idle, key=lambda entry: entry[0])
    if time.monotonic() - since < _SETTLED_SECONDS:
        return False
    oldest.retire()
    return True


def retry_after_retiring(make: Callable[[], T], retire: Callable[[], bool]) -> T:
    """Returns `make()`.

    Without capacity, retires a connection and tries again until it has closed. Raises NoCapacity.
    """
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
