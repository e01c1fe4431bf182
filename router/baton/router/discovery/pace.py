"""The times of following a Kubernetes API server, and the bounds that result from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds. A watched API server sends a bookmark about every 60 s."""

    silence: float = 75.0  # without an event or a bookmark; the connection is given up then
    request: float = 5.0  # for one page of a list, and for the first byte of a watch
    watch: int = 300  # the server ends a watch then
    min_backoff: float = 0.2  # before the next list; doubles while lists fail
    max_backoff: float = 2.0

    @property
    def recovery(self) -> float:
        """Returns the longest time until the next list begins: a timed-out attempt and the wait after it."""
        return self.request + self.max_backoff

    @property
    def blindness(self) -> float:
        """Returns the longest time for which a silent connection hides a change while other connections work."""
        return self.silence + self.recovery
