"""Whether the engine's device is stuck: the front looks at its board, whatever holds the engine up."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from baton.worker.link.step_status import StepBoard

TICK_SECONDS = 0.03
_MAX_TICK = 1.5  # of its length: a longer one says that this process, and perhaps its machine, is held up
_ALIVE_PART = 0.03  # of the time: a pulse that gets on less is that of idle threads
_IDLE_TICKS = 25  # after which nobody looks until there is work again


def no_pulse() -> float:
    """Of a device that shows none within a step."""
    return 0.0


def cpu_pulse(pid: int) -> Callable[[], float]:
    """Of a device that is the engine's own process: the processor seconds that it used (Linux; elsewhere 0)."""
    ticks_per_second = os.sysconf("SC_CLK_TCK")

    def read() -> float:
        with contextlib.suppress(OSError, ValueError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            fields = stat[stat.rindex(b")") + 2 :].split()
            return (int(fields[11]) + int(fields[12])) / ticks_per_second
        return 0.0

    return read


class StepWatch:
    """Calls `on_change` when a step takes longer than the board allows, and when it ended after all.

    A step is late by the ticks that it was seen in, not by the clock: what holds this process up is not the device. A
    device whose pulse goes on is slow, perhaps for want of processors, and not stuck. Nothing is looked at while
    nothing is asked of the engine.
    """

    def __init__(
        self, board: StepBoard, on_change: Callable[[bool], None], read_pulse: Callable[[], float] = no_pulse
    ) -> None:
        self.stalled = False
        self._board = board
        self._on_change = on_change
        self._read_pulse = read_pulse
        self._number, _ = board.read()
        self._pulse = 0.0  # when the step was seen first,
        self._seen_at = 0.0  # and when that was
        self._ticks = 0  # that saw this step without progress
        self._idle_ticks = 0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def progress(self) -> int:
        """Grows with each step."""
        return self._board.read()[0]

    def wake(self) -> None:
        """Something was asked of the engine, or came from it."""
        self._idle_ticks = 0
        if self._timer is None and not self._closed:
            self._ticks = 0
            self._wait()

    def close(self) -> None:
        """Looks no more. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self, on_time: bool) -> None:
        """A tick has passed; late ticks count for nothing."""
        number, limit = self._board.read()
        if number != self._number or not limit:
            self._idle_ticks = 0 if number != self._number else self._idle_ticks + 1
            self._number, self._ticks = number, 0
            if self.stalled:
                self._tell(False)
            return
        self._idle_ticks = 0
        if not self._ticks:
            self._pulse, self._seen_at = self._read_pulse(), self._loop.time()
        self._ticks += on_time
        elapsed = self._ticks * TICK_SECONDS
        if not self.stalled and elapsed >= limit and not self._is_alive(elapsed):
            self._tell(True)

    def _is_alive(self, elapsed: float) -> bool:
        """Whether the pulse went on: while this process was held up, too."""
        since = max(elapsed, self._loop.time() - self._seen_at)
        return self._read_pulse() - self._pulse >= _ALIVE_PART * since

    def _tell(self, stalled: bool) -> None:
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
