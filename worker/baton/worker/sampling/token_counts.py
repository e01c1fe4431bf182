"""Which distinct tokens one request has used, and how often in its output: what penalties look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Columns of distinct tokens, in any order, that grow with the output."""

    def __init__(self, prompt_token_ids: NDArray[np.int32], output_token_ids: Sequence[int]) -> None:
        prompt = np.flatnonzero(np.bincount(prompt_token_ids)) if len(prompt_token_ids) else np.empty(0, np.int64)
        self._size = len(prompt)
        self._token_ids = np.concatenate((prompt, np.zeros(64, np.int64)))
        self._counts = np.zeros(len(self._token_ids), np.float32)
        self._place = {token_id: index for index, token_id in enumerate(prompt.tolist())}
        for token_id in output_token_ids:
            self.add(token_id)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Every distinct token."""
        return self._token_ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of token_ids is in the output."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """One more output token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._size
            if self._size == len(self._token_ids):
                self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._token_ids[place] = token_id
            self._size += 1
        self._counts[place] += 1
