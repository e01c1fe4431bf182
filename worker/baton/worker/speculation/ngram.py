"""Prompt lookup: guesses that what followed the last tokens' earlier occurrence in the request follows again."""

from __future__ import annotations

import numpy as np

from baton.worker.core import Int32, RowInit

_NOTHING = np.empty(0, np.int32)


class NgramProposer:
    """Implements Proposer without any state: looks for the last tokens in each request's prompt and output."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest  # last tokens that are looked up
        self._shortest = shortest

    def admit(self, init: RowInit) -> None:
        """Does nothing."""

    def free(self, row: int, token_ids: Int32) -> None:
        """Does nothing."""

    def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
        """Copies what follows the latest occurrence of as many of the last tokens as possible."""
        length, end = longest_match(token_ids, token_ids[-self._longest :], len(token_ids) - 1)
        return continued(token_ids, end, most) if length >= self._shortest else _NOTHING


def longest_match(text: Int32, suffix: Int32, before: int) -> tuple[int, int]:
    """Returns how many last tokens of `suffix` occur in text[:before], and where the latest such occurrence ends.

    (0, 0): the last one does not occur.
    """
    ends = np.flatnonzero(text[:before] == suffix[-1]) + 1
    if not len(ends):
        return 0, 0
    length = 1
    for length in range(2, len(suffix) + 1):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == suffix[-length]]
        if not len(longer):
            return length - 1, int(ends[-1])
        ends = longer
    return length, int(ends[-1])


def continued(text: Int32, end: int, most: int) -> Int32:
    """Returns `most` tokens from text[end] on. What lies behind the text's end is what was copied before it."""
    period = len(text) - end
    if period >= most:
        return text[end : end + most]
    return np.resize(text[end:], most)
