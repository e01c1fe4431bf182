"""Renews leases on a separate thread while the engine thread computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

Beat = Callable[[], None]


class LeaseRenewal(Protocol):
    """Renews leases by calling every peer's beat at an interval."""

    def alive(self, now: float) -> None:
        """Records progress of the engine thread."""

    def set(self, beats: Mapping[object, Beat], interval: float) -> None:
        """Sets the beats that are called from now on, and the interval."""

    def close(self) -> None:
        """Ends the calls. Idempotent."""


class Heartbeat:
    """Calls every peer's beat at an interval.

    Pauses while the engine thread has shown no progress for `hang_seconds`.
    """

    def __init__(self, hang_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._beats: dict[object, Beat] = {}
        self._interval = 0.0
        self._alive_at = clock()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def alive(self, now: float) -> None:
        """Records progress of the engine thread."""
        self._alive_at = now

    def set(self, beats: Mapping[object, Beat], interval: float) -> None:
        """Sets the beats that are called from now on, and the interval."""
        if beats.keys() == self._beats.keys() and interval == self._interval:
            return
        with self._changed:
            self._beats = dict(beats)
            self._interval = interval
            self._changed.notify()
        if beats and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lease-renewal", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        due = self._clock()
        while True:
            with self._changed:
                while not self._closing and (not self._beats or self._clock() < due):
                    self._changed.wait(due - self._clock() if self._beats else None)
                    due = min(due, self._clock() + self._interval)
                if self._closing:
                    return
                beats = list(self._beats.values())
                due = self._clock() + self._interval
            if self._clock() - self._alive_at < self._hang_seconds:
                for beat in beats:
                    beat()
