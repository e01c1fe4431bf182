"""Detects a stalled device: the front polls the engine's step status, even while the engine is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from baton.worker.link.step_status import StepStatus

TICK_SECONDS = 0.03
_MAX_TICK = 1.5  # times TICK_SECONDS; after a longer tick this process, and perhaps its machine, was delayed
_ALIVE_PART = 0.03  # CPU seconds per second; idle threads use less
_IDLE_TICKS = 25  # polling pauses after so many idle ticks, until `wake`


def no_cpu_seconds() -> float:
    """Returns 0, because CPU time does not show whether this device works."""
    return 0.0


def cpu_seconds_of(pid: int) -> Callable[[], float]:
    """Returns a function that reads the CPU seconds of a process, for devices that are the process (0 off Linux)."""
    ticks_per_second = os.sysconf("SC_CLK_TCK")

    def read() -> float:
        with contextlib.suppress(OSError, ValueError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            fields = stat[stat.rindex(b")") + 2 :].split()
            return (int(fields[11]) + int(fields[12])) / ticks_per_second
        return 0.0

    return read


class StepWatchdog:
    """Calls `on_change` when a step exceeds its limit, and when that step ends after all.

    Counts ticks, not seconds: a delay of this process is not a delay of the device. A device that still uses CPU time
    is slow, perhaps for lack of cores, but not stalled. Does not poll while the engine is idle.
    """

    def __init__(
        self,
        step_status: StepStatus,
        on_change: Callable[[bool], None],
        read_cpu_seconds: Callable[[], float] = no_cpu_seconds,
    ) -> None:
        self.stalled = False
        self._step_status = step_status
        self._on_change = on_change
        self._read_cpu_seconds = read_cpu_seconds
        self._number, _ = step_status.read()
        self._cpu_seconds = 0.0  # when the current step was first seen
        self._seen_at = 0.0  # when that was
        self._ticks = 0  # in which the current step made no progress
        self._idle_ticks = 0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def progress(self) -> int:
        """A number that grows with each step."""
        return self._step_status.read()[0]

    def wake(self) -> None:
        """Resumes polling. Call when a frame is sent to the engine or received from it."""
        self._idle_ticks = 0
        if self._timer is None and not self._closed:
            self._ticks = 0
            self._wait()

    def close(self) -> None:
        """Stops polling. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self, on_time: bool) -> None:
        """Checks the current step after a tick. Late ticks do not count."""
        number, limit = self._step_status.read()
        if number != self._number or not limit:
            self._idle_ticks = 0 if number != self._number else self._idle_ticks + 1
            self._number, self._ticks = number, 0
            if self.stalled:
                self._report(False)
            return
        self._idle_ticks = 0
        if not self._ticks:
            self._cpu_seconds, self._seen_at = self._read_cpu_seconds(), self._loop.time()
        self._ticks += on_time
        elapsed = self._ticks * TICK_SECONDS
        if not self.stalled and elapsed >= limit and not self._is_alive(elapsed):
            self._report(True)

    def _is_alive(self, elapsed: float) -> bool:
        """Returns whether the device used CPU time since the step was first seen, delays of this process included."""
        since = max(elapsed, self._loop.time() - self._seen_at)
        return self._read_cpu_seconds() - self._cpu_seconds >= _ALIVE_PART * since

    def _report(self, stalled: bool) -> None:
        self.stalled = stalled
        self._on_change(stalled)

    def _wait(self) -> None:
        self._due = self._loop.time() + TICK_SECONDS
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.look(on_time=self._loop.time() - self._due < (_MAX_TICK - 1) * TICK_SECONDS)
        if not self._closed and self._idle_ticks < _IDLE_TICKS:
            self._wait()
