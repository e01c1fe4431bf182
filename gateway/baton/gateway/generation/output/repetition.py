"""Detects outputs whose end repeats a pattern. Works on token ids only."""

from __future__ import annotations

import numpy as np

from baton.v1 import types_pb2


class RepetitionDetector:
    """Detects when one output ends with a pattern repeated `min_count` times in a row."""

    def __init__(self, min_pattern_size: int, max_pattern_size: int, min_count: int) -> None:
        assert 1 <= min_pattern_size <= max_pattern_size
        assert min_count >= 2
        self._least, self._most = min_pattern_size, max_pattern_size
        sizes = np.arange(min_pattern_size, max_pattern_size + 1)
        self._enough = (min_count - 1) * sizes
        # per pattern size: consecutive tokens equal to the one a pattern earlier
        self._runs = np.zeros(len(sizes), np.int64)
        self._tokens = np.empty(64, np.int64)
        self._count = 0

    def add(self, token_id: int) -> bool:
        """Adds a token. Returns whether the output is repetitive now."""
        count = self._count
        before = self._tokens[max(0, count - self._most) : count][::-1][self._least - 1 :]
        equal = before == token_id
        self._runs[len(equal) :] = 0
        runs = self._runs[: len(equal)]
        runs += 1
        runs *= equal
        if count == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[count] = token_id
        self._count = count + 1
        return bool((self._runs >= self._enough).any())


def detector_of(stop: types_pb2.StopConditions) -> RepetitionDetector | None:
    """Returns the requested detector, or None."""
    wanted = stop.repetition_detection
    if not wanted.max_pattern_size:
        return None
    return RepetitionDetector(max(1, wanted.min_pattern_size), wanted.max_pattern_size, wanted.min_count)
