"""Logs the phases of a start, their durations, and the progress of long ones. Knows no device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

_PROGRESS_STEPS = 5  # log lines of a long phase


class StartPhases:
    """Call `end` after each phase. `wait` waits for the device to complete a phase."""

    def __init__(self, wait: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._wait = wait
        self._clock = clock
        self._seconds: list[tuple[str, float]] = []
        self._last = clock()

    def end(self, name: str) -> None:
        """Ends and logs a phase."""
        self._wait()
        now = self._clock()
        self._seconds.append((name, now - self._last))
        self._last = now
        _log.info("start: %s in %.1f s", *self._seconds[-1])

    def progress(self, name: str) -> Callable[[int, int], None]:
        """Returns a function that logs about every fifth of a phase. Its arguments are parts done and their total."""

        def report(done: int, total: int) -> None:
            part = -(-total // _PROGRESS_STEPS)
            if done % part == 0 and done < total:
                _log.info("start: %s, %d of %d", name, done, total)

        return report

    def log(self, num_blocks: int, block_size: int) -> None:
        """Logs the summary of all phases."""
        total = sum(seconds for _, seconds in self._seconds)
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds)
        _log.info("executor ready in %.1f s (%s) with %d blocks of %d tokens", total, parts, num_blocks, block_size)
