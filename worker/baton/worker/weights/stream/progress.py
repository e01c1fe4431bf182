"""Reports how far the weights are read: a bar on a terminal, elsewhere a log line every few seconds."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_log = logging.getLogger(__name__)

_LOG_SECONDS = 2.0
_BAR_CELLS = 30
_CLEAR_LINE = "\r\x1b[K"


class LoadProgress:
    """Call with bytes read, bytes in total and seconds, as often as there is something new; `end` at the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._drawn = False
        self._logged = 0.0  # seconds of the last line

    def __call__(self, done: int, total: int, seconds: float) -> None:
        """Draws the bar, or logs a line if the last one is some time ago."""
        if self._live:
            filled = _BAR_CELLS * done // max(1, total)
            bar = "#" * filled + "." * (_BAR_CELLS - filled)
            self._stream.write(f"{_CLEAR_LINE}weights [{bar}] {_amounts(done, total, seconds)}")
            self._stream.flush()
            self._drawn = True
        elif seconds - self._logged >= _LOG_SECONDS and done < total:
            self._logged = seconds
            _log.info("weights: %s", _amounts(done, total, seconds))

    def end(self) -> None:
        """Removes the bar, so that the next line of the log takes its place. Idempotent."""
        if self._drawn:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
            self._drawn = False


def _amounts(done: int, total: int, seconds: float) -> str:
    rate = done / 1e9 / seconds if seconds else 0.0
    return f"{done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate:.2f} GB/s"
