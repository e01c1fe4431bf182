"""The output of `baton up`: permanent lines, and on a terminal one live line below them."""

from __future__ import annotations

from typing import TextIO

_CLEAR_LINE = "\r\x1b[K"


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

    def wait(self, waiting_for: list[str], seconds: float) -> None:
        """Shows what is being waited for: redrawn on a terminal, elsewhere one line at each change."""
        names = ", ".join(waiting_for)
        if self._live:
            self._stream.write(f"{_CLEAR_LINE}waiting for {names} ({seconds:.0f} s)")
            self._stream.flush()
            self._shown = names
        elif names != self._shown:
            self._stream.write(f"waiting for {names}\n")
            self._stream.flush()
            self._shown = names
