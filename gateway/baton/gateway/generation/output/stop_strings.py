"""Finds stop strings in streamed text, holding back only what may become one. Works on text only."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopStrings:
    """Ends the text at the first completed stop string; of several that end together, at the longest.

    The result does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        assert all(stops)
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._longest = max(map(len, self._stops))
        self._first_chars = re.compile("[" + "".join(re.escape(stop[0]) for stop in self._stops) + "]")
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that can be emitted, and the completed stop string, if any."""
        text = self._held + piece if self._held else piece
        match = self._first_match(text)
        if match is not None:
            begin, stop = match
            self._held = ""
            return text[: begin + len(stop) if self._include else begin], stop
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep], None

    def finish(self) -> str:
        """Returns the held-back text at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            begin = text.find(stop)
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
                best = (begin + len(stop), begin, stop)
        return None if best is None else (best[1], best[2])

    def _possible_start(self, text: str) -> int:
        """Returns where the longest suffix of `text` that begins a stop string starts, or len(text)."""
        begin = max(0, len(text) - self._longest + 1)
        while True:
            found = self._first_chars.search(text, begin)
            if found is None:
                return len(text)
            begin = found.start()
            tail = text[begin:]
            if any(stop.startswith(tail) for stop in self._stops):
                return begin
            begin += 1
