"""Edits of logits before sampling. Columns of (row, token), so that rows without edits cost nothing."""

from __future__ import annotations

import torch
from torch import Tensor

_NEVER = float("-inf")


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Applies l / r if l > 0 else l * r, then - frequency * count - presence * [count > 0], in place.

    Columns have an entry for each distinct (row, token) of prompt and output. output_counts exclude the prompt.
    """
    seen = logits[rows, token_ids].float()
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= frequency * output_counts + presence * (output_counts > 0)
    logits[rows, token_ids] = seen.to(logits.dtype)


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
    """Adds each bias to its row's token, in place."""
    logits.index_put_((rows, token_ids), biases.to(logits.dtype), accumulate=True)


def allow_only(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Allows only the listed tokens in each row that is listed, in place."""
    kept = logits[rows, token_ids]
    logits[rows] = _NEVER
    logits[rows, token_ids] = kept


def suppress(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Sets the logits of these tokens to -inf, in place."""
    logits[rows, token_ids] = _NEVER


def force(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Forces the token of each of these rows, in place."""
    logits[rows] = _NEVER
    logits[rows, token_ids] = 0.0
