"""What a worker gives as log-probabilities of sampled tokens: of which logits, and whether normalized."""

from __future__ import annotations

import enum

import numpy as np
import torch
from torch import Tensor

from baton.worker.sampling.candidates import Draws
from baton.worker.sampling.filters import filtered
from baton.worker.sampling.noise import Float32

_NEVER = np.float32("-inf")


class LogprobsMode(enum.Enum):
    """Raw values are the model's. Processed ones have penalties, biases, masks, temperature and filters applied."""

    RAW_LOGPROBS = "raw_logprobs"
    PROCESSED_LOGPROBS = "processed_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def is_processed(self) -> bool:
        """Returns whether the values are those that the token is drawn from."""
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def is_normalized(self) -> bool:
        """Returns whether the values are logarithms of probabilities."""
        return self in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)


MODES = tuple(mode.value for mode in LogprobsMode)


def processed_logits(edited: Float32, draws: Draws) -> Tensor:
    """Returns the logits [num_rows, vocab_size] that tokens are drawn from: -inf for those that cannot be drawn.

    `edited` are logits with penalties, biases and masks applied. Greedy rows have no temperature and no filters.
    """
    warm = draws.temperature > 0
    limited = np.flatnonzero(warm & ((draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0)))
    with np.errstate(all="ignore"):  # infinities stay infinite
        processed = (edited / np.where(warm, draws.temperature, 1)[:, None]).astype(np.float32)
        if limited.size:
            kept = filtered(edited[limited], draws.of(limited), np.zeros(limited.size, np.int64))
            passing = np.full((limited.size, edited.shape[1]), _NEVER, np.float32)
            passing[kept.rows, kept.token_ids] = processed[limited[kept.rows], kept.token_ids]
            processed[limited] = passing
    return torch.from_numpy(processed)
