"""Samples tokens from logits for the rows of a step. Owns each row's parameters; greedy rows cost one argmax."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from baton.kernels.reference.sampling.logprobs import row_logprobs, token_logprobs
from baton.worker.core import Int64, RowInit, SamplingParams, TokenLogprobs, TokenMasks
from baton.worker.sampling.candidates import Draws
from baton.worker.sampling.draw import draw_tokens
from baton.worker.sampling.edits import LogitsEdits, apply_masks
from baton.worker.sampling.logprobs_mode import LogprobsMode, processed_logits

_NO_LOGPROBS = -1
_COLDEST = 1e-5  # lower temperatures sample the argmax
_LOW_64 = (1 << 64) - 1


def drawn_temperature(sampling: SamplingParams) -> float:
    """Returns the temperature, or 0 if a division by it would overflow."""
    return sampling.temperature if sampling.temperature >= _COLDEST else 0.0


class Sampler:
    """The sampling parameters of the batch, as columns over its rows."""

    def __init__(self, num_rows: int, vocab_size: int, logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS) -> None:
        self._mode = logprobs_mode
        self._vocab_size = vocab_size
        self._draws = Draws(
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int64),
            top_p=np.ones(num_rows, np.float32),
            min_p=np.zeros(num_rows, np.float32),
            seeds=np.zeros(num_rows, np.uint64),
        )
        self._num_logprobs = np.full(num_rows, _NO_LOGPROBS)
        self._chosen: dict[int, tuple[int, ...]] = {}  # by row: the alternatives that the request lists
        self._edits = LogitsEdits(num_rows, vocab_size)

    def admit(self, init: RowInit) -> None:
        """Stores a row's parameters, and its tokens if edits need them."""
        row, sampling = init.row, init.sampling
        draws = self._draws
        draws.temperature[row] = drawn_temperature(sampling)
        draws.top_k[row] = min(sampling.top_k, self._vocab_size)
        draws.top_p[row] = sampling.top_p
        draws.min_p[row] = sampling.min_p
        draws.seeds[row] = sampling.seed & _LOW_64
        wanted = sampling.logprobs
        self._num_logprobs[row] = _NO_LOGPROBS if wanted is None else min(wanted, self._vocab_size)
        self._chosen.pop(row, None)
        if wanted is not None and sampling.logprob_token_ids:
            self._num_logprobs[row] = 0
            self._chosen[row] = sampling.logprob_token_ids
        self._edits.admit(init)

    def free(self, row: int) -> None:
        self._edits.free(row)
        self._chosen.pop(row, None)

    def sample(
        self,
        logits: Tensor,
        rows: Int64,
        num_outputs: Int64,
        masks: TokenMasks | None = None,
        changed: Tensor | None = None,
    ) -> tuple[Int64, dict[int, TokenLogprobs]]:
        """Samples from logits [len(rows), vocab_size] after num_outputs tokens. Returns ids and logprobs by index.

        `changed`: the logits to sample from, if processors have changed some; log-probabilities are of `logits`.
        """
        num_logprobs = self._num_logprobs[rows]
        requested = np.flatnonzero(num_logprobs != _NO_LOGPROBS)
        # Copied before the edits, because raw values are the model's.
        of_model = requested.size and not self._mode.is_processed
        values = logits.index_select(0, torch.from_numpy(requested)) if of_model else None
        edited = (logits if changed is None else changed).float().contiguous().numpy()
        self._edits.apply(edited, rows, num_outputs)
        if masks is not None:
            apply_masks(edited, masks)
        if requested.size and values is None:
            values = processed_logits(edited[requested], self._draws.of(rows[requested]))
        token_ids = draw_tokens(edited, self._draws.of(rows), num_outputs)
        self._edits.add(rows, token_ids)
        if values is None:
            return token_ids, {}
        return token_ids, self._logprobs(values, token_ids, requested, num_logprobs, rows)

    def _logprobs(
        self, values: Tensor, token_ids: Int64, requested: Int64, num_logprobs: Int64, rows: Int64
    ) -> dict[int, TokenLogprobs]:
        normalized = self._mode.is_normalized
        found = _logprobs(values, token_ids, requested, num_logprobs, normalized)
        if self._chosen:
            for row_of_values, index in enumerate(requested.tolist()):
                chosen = self._chosen.get(int(rows[index]))
                if chosen is not None:
                    row = values[row_of_values : row_of_values + 1]
                    named = token_logprobs(row, torch.tensor([chosen]), normalized)[0]
                    found[index] = replace(found[index], top_token_ids=chosen, top_logprobs=tuple(named.tolist()))
        return found


def _logprobs(
    values: Tensor, token_ids: Int64, requested: Int64, num_logprobs: Int64, normalized: bool
) -> dict[int, TokenLogprobs]:
    entries: dict[int, TokenLogprobs] = {}
    wanted = num_logprobs[requested]
    # Among equal values, PyTorch chooses by their number: one for all rows would show who shares the batch.
    for count in np.unique(wanted).tolist():
        chosen = np.flatnonzero(wanted == count)
        some = values if len(chosen) == len(wanted) else values.index_select(0, torch.from_numpy(chosen))
        indices = requested[chosen]
        found = row_logprobs(some, torch.from_numpy(token_ids[indices]), count, normalized)
        columns = zip(
            indices.tolist(),
            found.logprobs.tolist(),
            found.ranks.tolist(),
            found.top_token_ids.tolist(),
            found.top_logprobs.tolist(),
            strict=True,
        )
        for index, logprob, rank, top_ids, top in columns:
            entries[index] = TokenLogprobs(logprob, rank, tuple(top_ids), tuple(top))
    return entries
