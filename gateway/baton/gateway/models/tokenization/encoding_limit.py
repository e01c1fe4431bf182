"""How much of a text is encoded: until it has too many tokens, or the client has left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

UNLIMITED = sys.maxsize


class TooManyTokens(Exception):
    """A text has more tokens than the limit; it was not encoded to its end."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class EncodingStopped(Exception):
    """The client has left."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class EncodingLimit:
    """The most tokens of one text, and whether to stop encoding it."""

    most: int = UNLIMITED  # tokens
    stopped: Callable[[], bool] = _never  # asked from an encoding thread

    def check(self, at_least: int) -> None:
        """Raises TooManyTokens where a text that has `at_least` tokens has too many; EncodingStopped."""
        if at_least > self.most:
            raise TooManyTokens(at_least)
        if self.stopped():
            raise EncodingStopped
