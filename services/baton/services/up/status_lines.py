"""The output of `baton up` and `baton serve`: permanent lines, and on a terminal one live line below them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import TextIO

from baton.services.up.start_log import Progress

_CLEAR_LINE = "\r\x1b[K"
_BAR_CELLS = 12


class StatusLines:
    """Writes to a terminal or a plain stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._shown = ""

    def say(self, line: str) -> None:
        """Writes a permanent line."""
        self._stream.write(f"{_CLEAR_LINE if self._live and self._shown else ''}{line}\n")
        self._shown = ""
        self._stream.flush()

    def wait(
        self, waiting_for: list[str], seconds: float, progress: Mapping[str, Progress] = MappingProxyType({})
    ) -> None:
        """Shows what is being waited for: redrawn on a terminal, elsewhere one line at each change."""
        names = ", ".join(waiting_for)
        if self._live:
            parts = [f"{name}: {_bar(progress[name])}" if name in progress else name for name in waiting_for]
            line = f"waiting for {', '.join(parts)} ({seconds:.0f} s)"
            self._stream.write(f"{_CLEAR_LINE}{line[: shutil.get_terminal_size().columns - 1]}")
            self._stream.flush()
            self._shown = names
        elif names != self._shown:
            self._stream.write(f"waiting for {names}\n")
            self._stream.flush()
            self._shown = names


def _bar(progress: Progress) -> str:
    filled = int(progress.part * _BAR_CELLS)
    return f"{progress.phase} [{'#' * filled + '.' * (_BAR_CELLS - filled)}] {progress.amounts}"
