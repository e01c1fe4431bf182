"""Log-probabilities of sampled tokens that are being copied to the host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from baton.kernels.reference.sampling.logprobs import row_logprobs, token_logprobs
from baton.kernels.sampling import MOST_LIKELY, MOST_NAMED
from baton.worker.core import Int32, SamplingParams, TokenLogprobs
from baton.worker.executors.cuda.sampling.prompt_logprobs import to_pinned
from baton.worker.executors.cuda.sampling.row_parameters import num_likely

_LIKELY = 2  # column of the most likely tokens in the results of score_tokens
_LOGPROBS = _LIKELY + MOST_LIKELY
_NAMED = _LOGPROBS + MOST_LIKELY


@dataclass(slots=True)
class PendingLogprobs:
    """The log-probabilities of rows that ask for them."""

    indices: list[int]  # into the step's sampled tokens
    sampling: list[SamplingParams]  # of each of `indices`
    vocab_size: int
    found: Tensor  # pinned results of score_tokens for all sampled tokens
    # For rows that ask for more than `found` has, by position in `indices`: from row_logprobs, or of named tokens.
    wide: dict[int, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        indices: list[int],
        sampling: list[SamplingParams],
        found: Tensor,
        logits: Tensor,
        tokens: Tensor,
        normalized: bool = True,
    ) -> PendingLogprobs:
        """Starts the copies for `indices` of the rows of logits [num_rows, vocab] and sampled tokens [num_rows]."""
        pending = cls(indices, sampling, logits.shape[1], to_pinned(found))
        for position, (index, params) in enumerate(zip(indices, sampling, strict=True)):
            if _is_wide(params, logits.shape[1]):
                # One by one, because PyTorch splits a sum over a row depending on the number of rows.
                own = slice(index, index + 1)
                found_wide = _wide(params, logits[own], tokens[own].long(), normalized)
                pending.wide[position] = [to_pinned(tensor) for tensor in found_wide]
        return pending

    def read(self) -> dict[int, TokenLogprobs]:
        """Returns entries by index into the step's sampled tokens. Called when the step is done."""
        table: Int32 = self.found.numpy()[self.indices]
        counts = [min(num_likely(each, self.vocab_size), MOST_LIKELY) for each in self.sampling]
        most = max(counts)
        columns = zip(
            self.indices,
            counts,
            table[:, 0].copy().view(np.float32).tolist(),
            table[:, 1].tolist(),
            table[:, _LIKELY : _LIKELY + most].tolist(),
            table[:, _LOGPROBS : _LOGPROBS + most].copy().view(np.float32).tolist(),
            strict=True,
        )
        read = {
            index: TokenLogprobs(logprob, rank, tuple(top_ids[:count]), tuple(top[:count]))
            for index, count, logprob, rank, top_ids, top in columns
        }
        for position, (index, params) in enumerate(zip(self.indices, self.sampling, strict=True)):
            if position in self.wide or params.logprob_token_ids:
                top_ids, top = self._alternatives(position, params, table)
                read[index] = replace(read[index], top_token_ids=tuple(top_ids), top_logprobs=tuple(top))
        return read

    def _alternatives(self, position: int, params: SamplingParams, table: Int32) -> tuple[list[int], list[float]]:
        wide = self.wide.get(position)
        named = params.logprob_token_ids
        if wide is None:
            values = table[position, _NAMED : _NAMED + len(named)].copy().view(np.float32)
            return list(named), values.tolist()
        if named:
            return list(named), wide[0].tolist()
        return wide[0].tolist(), wide[1].tolist()


def _is_wide(params: SamplingParams, vocab_size: int) -> bool:
    return num_likely(params, vocab_size) > MOST_LIKELY or len(params.logprob_token_ids) > MOST_NAMED


def _wide(params: SamplingParams, logits: Tensor, tokens: Tensor, normalized: bool) -> list[Tensor]:
    named = params.logprob_token_ids
    if named:
        ids = torch.tensor([named], dtype=torch.int64).to(logits.device, non_blocking=True)
        return [token_logprobs(logits, ids, normalized)[0]]
    found = row_logprobs(logits, tokens, num_likely(params, logits.shape[1]), normalized)
    return [found.top_token_ids[0], found.top_logprobs[0]]
