"""Limits of encoding a text: the maximum number of tokens, and cancellation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

UNLIMITED = sys.maxsize


class TooManyTokens(Exception):
    """A text has more tokens than the limit. Its encoding was stopped."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class EncodingStopped(Exception):
    """The encoding was cancelled because the client disconnected."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class EncodingLimit:
    """The maximum number of tokens of a text, and whether to stop encoding it."""

    most: int = UNLIMITED  # tokens
    stopped: Callable[[], bool] = _never  # called from an encoding thread

    def check(self, at_least: int) -> None:
        """Raises TooManyTokens if `at_least` exceeds the limit, or EncodingStopped."""
        if at_least > self.most:
            raise TooManyTokens(at_least)
        if self.stopped():
            raise EncodingStopped
