"""The distinct tokens of one request and their counts in its output, for penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Columns of distinct tokens, in any order. They grow with the output."""

    def __init__(self, prompt_token_ids: NDArray[np.int32], output_token_ids: Sequence[int]) -> None:
        prompt = np.flatnonzero(np.bincount(prompt_token_ids)) if len(prompt_token_ids) else np.empty(0, np.int64)
        self._size = len(prompt)
        self._token_ids = np.concatenate((prompt, np.zeros(64, np.int64)))
        self._counts = np.zeros(len(self._token_ids), np.float32)
        self._index = {token_id: index for index, token_id in enumerate(prompt.tolist())}
        for token_id in output_token_ids:
            self.add(token_id)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """All distinct tokens."""
        return self._token_ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Count of each of token_ids in the output."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Counts an output token."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            if self._size == len(self._token_ids):
                self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._token_ids[index] = token_id
            self._size += 1
        self._counts[index] += 1
