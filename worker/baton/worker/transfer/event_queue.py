"""Events from a transport's threads to the engine thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from baton.worker.transfer.base import TransportEvent


class EventQueue:
    """Events from any thread, in order, for one reader, which `wake` wakes."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: deque[TransportEvent] = deque()
        self._wake = wake

    def post(self, event: TransportEvent) -> None:
        """Appends an event. Thread-safe."""
        self._events.append(event)
        self._wake()

    def take(self) -> list[TransportEvent]:
        """Removes and returns all events."""
        taken: list[TransportEvent] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken
