"""From logits to tokens for the rows of a step. Owns how each row draws; greedy rows cost one argmax."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.reference.logprobs import row_logprobs, token_logprobs
from baton.kernels.reference.sampling import sample
from baton.worker.core import RowInit, SamplingParams, TokenLogprobs, TokenMasks
from baton.worker.executor.logits_edits import LogitsEdits, apply_edits, apply_masks, edits_of
from baton.worker.executor.rows import Int64

_NO_LOGPROBS = -1
_COLDEST = 1e-5  # what lower temperatures would draw is the argmax
_LOW_64 = (1 << 64) - 1


def drawn_temperature(sampling: SamplingParams) -> float:
    """The temperature; 0 where a division by it would overflow."""
    return sampling.temperature if sampling.temperature >= _COLDEST else 0.0


class Sampler:
    """Sampling parameters as columns over the batch's rows."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.int64)
        self._num_logprobs = np.full(num_rows, _NO_LOGPROBS)
        self._chosen: dict[int, tuple[int, ...]] = {}  # by row: the alternatives, where the request says which
        self._edits: dict[int, LogitsEdits] = {}  # by row

    def admit(self, init: RowInit) -> None:
        """Takes a row's parameters and, where they count, its tokens."""
        row, sampling = init.row, init.sampling
        self._temperature[row] = drawn_temperature(sampling)
        self._top_k[row] = min(sampling.top_k, self._vocab_size)
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = np.uint64(sampling.seed & _LOW_64).astype(np.int64)
        wanted = sampling.logprobs
        self._num_logprobs[row] = _NO_LOGPROBS if wanted is None else min(wanted, self._vocab_size)
        self._chosen.pop(row, None)
        if wanted is not None and sampling.logprob_token_ids:
            self._num_logprobs[row] = 0
            self._chosen[row] = sampling.logprob_token_ids
        edits = edits_of(init, self._vocab_size)
        if edits is None:
            self._edits.pop(row, None)
        else:
            self._edits[row] = edits

    def free(self, row: int) -> None:
        """Forgets a row."""
        self._edits.pop(row, None)
        self._chosen.pop(row, None)

    def count(self, row: int, token_id: int) -> None:
        """Tells a row's wishes of an output token."""
        edits = self._edits.get(row)
        if edits is not None:
            edits.add(token_id)

    def sample(
        self, logits: Tensor, rows: Int64, num_outputs: Int64, masks: TokenMasks | None = None
    ) -> tuple[Int64, dict[int, TokenLogprobs]]:
        """Tokens for logits [len(rows), vocab_size], and logprobs by index. num_outputs: tokens drawn so far."""
        num_logprobs = self._num_logprobs[rows]
        asking = np.flatnonzero(num_logprobs != _NO_LOGPROBS)
        # Taken before the edits: logprobs are the model's own.
        raw = logits[torch.from_numpy(asking)] if asking.size else None
        edits = self._edits_of(rows)
        if edits:
            logits = logits.float()
            apply_edits(logits, edits, num_outputs)
        if masks is not None:
            apply_masks(logits, masks)
        token_ids = self._draw(logits, rows, num_outputs)
        for index, edit in edits:
            edit.add(int(token_ids[index]))
        if raw is None:
            return token_ids, {}
        return token_ids, self._logprobs(raw, token_ids, asking, num_logprobs, rows)

    def _logprobs(
        self, raw: Tensor, token_ids: Int64, asking: Int64, num_logprobs: Int64, rows: Int64
    ) -> dict[int, TokenLogprobs]:
        found = _logprobs(raw, token_ids, asking, num_logprobs)
        if self._chosen:
            for place, index in enumerate(asking.tolist()):
                chosen = self._chosen.get(int(rows[index]))
                if chosen is not None:
                    values = token_logprobs(raw[place : place + 1], torch.tensor([chosen]))[0]
                    found[index] = replace(found[index], top_token_ids=chosen, top_logprobs=tuple(values.tolist()))
        return found

    def _edits_of(self, rows: Int64) -> list[tuple[int, LogitsEdits]]:
        if not self._edits:
            return []
        return [(index, self._edits[row]) for index, row in enumerate(rows.tolist()) if row in self._edits]

    def _draw(self, logits: Tensor, rows: Int64, num_outputs: Int64) -> Int64:
        temperature = self._temperature[rows]
        if not temperature.any():
            drawn = logits.argmax(-1)
        else:
            columns = (
                temperature,
                self._top_k[rows],
                self._top_p[rows],
                self._min_p[rows],
                self._seed[rows],
                num_outputs,
            )
            drawn = sample(logits, *(torch.from_numpy(column) for column in columns))
        token_ids: NDArray[np.int64] = drawn.numpy()
        return token_ids


def _logprobs(raw: Tensor, token_ids: Int64, asking: Int64, num_logprobs: Int64) -> dict[int, TokenLogprobs]:
    most = int(num_logprobs[asking].max())
    found = row_logprobs(raw, torch.from_numpy(token_ids[asking]), most)
    columns = zip(
        asking.tolist(),
        found.logprobs.tolist(),
        found.ranks.tolist(),
        found.top_token_ids.tolist(),
        found.top_logprobs.tolist(),
        strict=True,
    )
    return {
        index: TokenLogprobs(logprob, rank, tuple(top_ids[: num_logprobs[index]]), tuple(top[: num_logprobs[index]]))
        for index, logprob, rank, top_ids, top in columns
    }
