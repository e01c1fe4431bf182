"""Virtual time: one queue of events for the whole simulation, and the clocks that components are given."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """A clock that stands where it was put. Components that compute run ahead on one of their own."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Seconds since the simulation's start."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advances the clock."""
        self.now += seconds


class Timeline:
    """Events in the order of their time; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.num_events = 0
        self._queue: list[tuple[float, int, Action]] = []
        self._serial = 0

    def at(self, time: float, action: Action) -> None:
        """Calls `action` at a time; one that has passed is now."""
        self._serial += 1
        heapq.heappush(self._queue, (max(time, self.clock.now), self._serial, action))

    def after(self, seconds: float, action: Action) -> None:
        """Calls `action` after `seconds`."""
        self.at(self.clock.now + seconds, action)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Runs events until `done`, the end time, or the last event."""
        queue, clock = self._queue, self.clock
        while queue and not done():
            time, _, action = heapq.heappop(queue)
            if time > until:
                return
            clock.now = time
            self.num_events += 1
            action()
