"""Edits of the logits before sampling. Sparse: columns of (row, token), so that rows without edits cost nothing."""

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
    """In place: l / r if l > 0 else l * r, then - frequency * count - presence * [count > 0].

    All columns are of one length, an entry for each distinct (row, token) of prompt and output; output_counts says how
    often the token is in the output alone.
    """
    seen = logits[rows, token_ids].float()
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= frequency * output_counts + presence * (output_counts > 0)
    logits[rows, token_ids] = seen.to(logits.dtype)


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
    """In place: adds each bias to its row's token."""
    logits.index_put_((rows, token_ids), biases.to(logits.dtype), accumulate=True)


def allow_only(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """In place: in every row named at least once, only the tokens named with it can be drawn."""
    kept = logits[rows, token_ids]
    logits[rows] = _NEVER
    logits[rows, token_ids] = kept


def suppress(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """In place: these tokens cannot be drawn."""
    logits[rows, token_ids] = _NEVER


def force(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """In place: forces the token of each of these rows."""
    logits[rows] = _NEVER
    logits[rows, token_ids] = 0.0
