"""executor.output_rules on the device: the same rules for tokens that the host does not know yet. Waits for nothing."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.nn import functional

from baton.worker.core import ReasoningLimit, SamplingParams
from baton.worker.executor.output_rules import first_forced

_ANY = -1  # in a prefix: before its first token
_NONE = -2  # in an output: before its first token


class DeviceRules:
    """One request's. `values` int64 is what they need on the device; `place` takes it there."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        sequences = [each for each in sampling.forbidden_sequences if max(each) < vocab_size]
        limit = sampling.reasoning_limit
        self._limit = limit
        self._width = max((len(each) - 1 for each in sequences), default=0)
        self._num_sequences = len(sequences)
        prefixes = np.full((len(sequences), self._width), _ANY, np.int64)
        for index, each in enumerate(sequences):
            prefixes[index, self._width - len(each) + 1 :] = each[:-1]
        last = np.array([each[-1] for each in sequences], np.int64)
        end = np.array(() if limit is None else limit.end_token_ids, np.int64)
        self.values = np.concatenate((prefixes.reshape(-1), last, end))

    def place(self, values: Tensor) -> None:
        """Takes the device's copy of `values`."""
        count, size = self._num_sequences, self._num_sequences * self._width
        self._prefixes = values[:size].view(count, self._width)  # at the right
        self._last = values[size : size + count]
        self._end = values[size + count :]

    def apply(self, logits: Tensor, output: Tensor) -> None:
        """In place, for one row's fp32 logits [vocab_size]; output [num_output_tokens] int32 is what it has drawn."""
        if len(self._last):
            self._forbid(logits, output)
        if self._limit is not None:
            self._force(logits, output, self._limit)

    def _forbid(self, logits: Tensor, output: Tensor) -> None:
        width = min(self._width, len(output))
        window = functional.pad(output[len(output) - width :], (self._width - width, 0), value=_NONE)
        matches = ((self._prefixes == window) | (self._prefixes == _ANY)).all(1)
        bounds = logits.new_full((len(self._last),), float("inf")).masked_fill_(matches, float("-inf"))
        # Sequences may end alike: the least bound of each token counts.
        logits.scatter_reduce_(0, self._last, bounds, "amin")

    def _force(self, logits: Tensor, output: Tensor, limit: ReasoningLimit) -> None:
        first = first_forced(limit)
        index = len(output) - first
        if not 0 <= index < len(self._end):
            return
        begin = first - limit.max_tokens
        free = output[begin:first]
        forced = logits.new_full(logits.shape, float("-inf"))
        forced[limit.end_token_ids[index]] = 0.0
        ended = logits.new_zeros(1, dtype=self._end.dtype).bool()
        if len(free) >= len(self._end):
            windows = free.unfold(0, len(self._end), 1)
            ended = (windows == self._end).all(1).any().view(1)
        if limit.start_token_id is not None:
            ended = ended | (output[:1] != limit.start_token_id)
        logits.copy_(logits.where(ended, forced))
