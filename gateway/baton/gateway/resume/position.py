"""How far a client has come in a stream: of each choice the tokens told, and whether its end was. Knows no token.

As text `12.15f`: 12 tokens of the first choice, 15 and the end of the second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.rpc.errors import InvalidRequest

_TEXT = re.compile(r"\d{1,9}f?(\.\d{1,9}f?)*")


@dataclass(frozen=True, slots=True)
class ChoicePosition:
    """One choice's."""

    num_tokens: int = 0
    finished: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}{'f' if self.finished else ''}"


def position_text(position: Sequence[ChoicePosition]) -> str:
    """All choices', as an event's id ends with it."""
    return ".".join(map(str, position))


def parse_position(text: str, field: str) -> tuple[ChoicePosition, ...]:
    """The inverse. Raises InvalidRequest that names `field`."""
    if not _TEXT.fullmatch(text):
        raise InvalidRequest(
            f"{field} ends with {text[:40]!r}, which is no position; give the id of the last event as it came",
            field=field,
        )
    return tuple(ChoicePosition(int(part.rstrip("f")), part.endswith("f")) for part in text.split("."))


class Cursor:
    """Counts what a stream tells, and knows what of it its client has already."""

    def __init__(self, known: Sequence[ChoicePosition]) -> None:
        self._known = tuple(known)
        self._now = [ChoicePosition() for _ in known]

    @property
    def resumed(self) -> bool:
        """Whether the client has anything."""
        return any(one.num_tokens or one.finished for one in self._known)

    @property
    def behind(self) -> bool:
        """Whether something is still to come that the client has."""
        pairs = zip(self._now, self._known, strict=True)
        return any(now.num_tokens < known.num_tokens or now.finished < known.finished for now, known in pairs)

    @property
    def text(self) -> str:
        """Where the stream is."""
        return position_text(self._now)

    def advance(self, index: int, num_tokens: int, finished: bool) -> bool:
        """A piece of a choice comes; whether it is new to the client."""
        now, known = self._now[index], self._known[index]
        self._now[index] = now = ChoicePosition(now.num_tokens + num_tokens, finished)
        if finished:
            return not known.finished
        return now.num_tokens > known.num_tokens
