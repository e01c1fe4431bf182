"""Repetition, frequency and presence penalties of the batch's rows, kept as columns that grow with the outputs."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import Int64, RowInit, SamplingParams
from baton.worker.sampling.noise import Float32

T = TypeVar("T", bound=np.generic)

_FIRST_WIDTH = 64


class Penalties:
    """The distinct tokens of rows with penalties, and what each costs."""

    def __init__(self, num_rows: int) -> None:
        self._repetition = np.ones(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._presence = np.zeros(num_rows, np.float32)
        self._penalized = np.zeros(num_rows, np.bool_)
        self._index: dict[int, dict[int, int]] = {}  # by row: the column of each token
        self._sizes = np.zeros(num_rows, np.int64)  # used columns
        self._token_ids = np.zeros((num_rows, _FIRST_WIDTH), np.int64)
        self._counts = np.zeros((num_rows, _FIRST_WIDTH), np.float32)  # in the output
        self._costs = np.zeros((num_rows, _FIRST_WIDTH), np.float32)  # frequency * count + presence * [count > 0]

    def admit(self, init: RowInit) -> None:
        """Stores a row's penalties, and the tokens that they depend on."""
        row, sampling = init.row, init.sampling
        self.free(row)
        if not is_penalized(sampling):
            return
        self._repetition[row] = sampling.repetition_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._presence[row] = sampling.presence_penalty
        self._penalized[row] = True
        # Only the repetition penalty includes the prompt.
        prompt = init.token_ids[: init.num_prompt_tokens if sampling.repetition_penalty != 1.0 else 0]
        output = init.token_ids[init.num_prompt_tokens :]
        occurrences = np.bincount(np.concatenate((prompt, output)))
        token_ids = np.flatnonzero(occurrences)
        size = len(token_ids)
        self._index[row] = {token_id: column for column, token_id in enumerate(token_ids.tolist())}
        self._widen(size)
        self._sizes[row] = size
        self._token_ids[row, :size] = token_ids
        counts = np.bincount(output, minlength=len(occurrences))[token_ids].astype(np.float32)
        self._counts[row, :size] = counts
        self._costs[row, :size] = self._costs_of(row, counts)

    def free(self, row: int) -> None:
        if self._index.pop(row, None) is not None:
            self._penalized[row] = False

    def of(self, rows: Int64) -> Int64:
        """Returns the indices of those rows that have penalties."""
        return np.flatnonzero(self._penalized[rows]) if self._index else np.empty(0, np.int64)

    def add(self, rows: Int64, token_ids: Int64) -> None:
        """Counts an output token of each of these rows, which have penalties."""
        indices = (self._index[row] for row in rows.tolist())
        tokens = zip(indices, token_ids.tolist(), strict=True)
        columns = np.array([index.setdefault(token_id, len(index)) for index, token_id in tokens])
        self._widen(int(columns.max()) + 1)
        fresh = self._sizes[rows] == columns
        self._token_ids[rows, columns] = token_ids
        self._sizes[rows] += fresh
        counts = np.where(fresh, np.float32(0), self._counts[rows, columns]) + np.float32(1)
        self._counts[rows, columns] = counts
        self._costs[rows, columns] = self._costs_of(rows, counts)

    def apply(self, logits: Float32, indices: Int64, rows: Int64) -> None:
        """l / repetition if l > 0 else l * repetition, then - cost; in place, for these indices of logits, and rows."""
        sizes = self._sizes[rows]
        ends = np.cumsum(sizes)
        first = rows * self._token_ids.shape[1] - (ends - sizes)
        columns = np.arange(ends[-1]) + np.repeat(first, sizes)
        places = np.repeat(indices * logits.shape[1], sizes) + self._token_ids.take(columns)
        seen = logits.take(places)
        repetition = self._repetition[rows]
        if (repetition != 1).any():
            repetition = np.repeat(repetition, sizes)
            seen = np.where(seen > 0, seen / repetition, seen * repetition)
        seen -= self._costs.take(columns)
        logits.put(places, seen)

    def _costs_of(self, rows: Int64 | int, counts: Float32) -> Float32:
        costs: Float32 = self._frequency[rows] * counts + self._presence[rows] * (counts > 0)
        return costs

    def _widen(self, width: int) -> None:
        """Makes room for `width` tokens a row."""
        before = self._token_ids.shape[1]
        if width <= before:
            return
        width = max(width, 2 * before)
        self._token_ids = self._widened(self._token_ids, width)
        self._counts = self._widened(self._counts, width)
        self._costs = self._widened(self._costs, width)

    def _widened(self, columns: NDArray[T], width: int) -> NDArray[T]:
        # Untouched zero pages take no memory, so only used columns are copied.
        widened = np.zeros((len(columns), width), columns.dtype)
        for row in self._index:
            size = self._sizes[row]
            widened[row, :size] = columns[row, :size]
        return widened


def is_penalized(sampling: SamplingParams) -> bool:
    """Returns whether a request has any penalty."""
    return (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1.0, 0.0, 0.0)
