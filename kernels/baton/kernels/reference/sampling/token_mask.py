"""Tokens that may not be drawn, taken out of some rows' logits."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """In place, for logits [num_rows, vocab_size] of any float: rows [num_masks] int32 keep the tokens of their bits.

    bits [num_masks, at least vocab_size / 32] int32: token t is kept where bit t % 32 of word t // 32 is set.
    """
    tokens = torch.arange(logits.shape[1], device=logits.device)
    kept = (bits[:, tokens // 32] >> (tokens % 32).to(torch.int32)) & 1
    rows = rows.long()
    logits[rows] = logits[rows].masked_fill(kept == 0, float("-inf"))
