"""Masks of the tokens that may be sampled."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Sets masked logits [num_rows, vocab_size] to -inf, in place, in rows [num_masks] int32.

    bits [num_masks, at least vocab_size / 32] int32: token t is kept if bit t % 32 of word t // 32 is set.
    """
    tokens = torch.arange(logits.shape[1], device=logits.device)
    kept = (bits[:, tokens // 32] >> (tokens % 32).to(torch.int32)) & 1
    rows = rows.long()
    logits[rows] = logits[rows].masked_fill(kept == 0, float("-inf"))
