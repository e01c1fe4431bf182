"""A client's position in a stream: for each choice the received tokens and whether it ended. Knows no tokens.

The text `12.15f` means 12 tokens of the first choice, and 15 tokens and the end of the second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.rpc.errors import InvalidRequest

_TEXT = re.compile(r"\d{1,9}f?(\.\d{1,9}f?)*")


@dataclass(frozen=True, slots=True)
class ChoicePosition:
    """The position in one choice."""

    num_tokens: int = 0
    finished: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}{'f' if self.finished else ''}"


def position_text(position: Sequence[ChoicePosition]) -> str:
    """Formats the positions of all choices, the last part of an event id."""
    return ".".join(map(str, position))


def parse_position(text: str, field: str) -> tuple[ChoicePosition, ...]:
    """Parses the output of position_text. Raises InvalidRequest that names `field`."""
    if not _TEXT.fullmatch(text):
        raise InvalidRequest(
            f"{field} ends with the invalid position {text[:40]!r}; give the id of the last event as received",
            field=field,
        )
    return tuple(ChoicePosition(int(part.rstrip("f")), part.endswith("f")) for part in text.split("."))


class Cursor:
    """Tracks a stream's position and compares it with its client's."""

    def __init__(self, known: Sequence[ChoicePosition]) -> None:
        self._known = tuple(known)
        self._now = [ChoicePosition() for _ in known]

    @property
    def resumed(self) -> bool:
        """Returns whether the client has received anything."""
        return any(one.num_tokens or one.finished for one in self._known)

    @property
    def behind(self) -> bool:
        """Returns whether the client already has part of what follows."""
        pairs = zip(self._now, self._known, strict=True)
        return any(now.num_tokens < known.num_tokens or now.finished < known.finished for now, known in pairs)

    @property
    def text(self) -> str:
        """Returns the current position as text."""
        return position_text(self._now)

    def advance(self, index: int, num_tokens: int, finished: bool) -> bool:
        """Advances past a piece of a choice. Returns whether it is new to the client."""
        now, known = self._now[index], self._known[index]
        self._now[index] = now = ChoicePosition(now.num_tokens + num_tokens, finished)
        if finished:
            return not known.finished
        return now.num_tokens > known.num_tokens
