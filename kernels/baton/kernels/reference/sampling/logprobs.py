"""Log-probabilities of the sampled tokens under the model, before temperature and filters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowLogprobs(NamedTuple):
    """Log-probabilities of rows, as natural logarithms."""

    logprobs: Tensor  # [num_rows] fp32, of the sampled tokens
    ranks: Tensor  # [num_rows] int64; 1 is the most likely
    top_token_ids: Tensor  # [num_rows, num_top] int64, the most likely first
    top_logprobs: Tensor  # [num_rows, num_top] fp32


def row_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, normalized: bool = True) -> RowLogprobs:
    """Returns log-probabilities for logits [num_rows, vocab_size] and the sampled token_ids [num_rows].

    Without `normalized`, returns the logits themselves instead.
    """
    wide = logits.float()
    drawn = wide.gather(1, token_ids.unsqueeze(1))
    ranks = (wide > drawn).sum(1) + 1
    norm = _norm(wide) if normalized else torch.zeros_like(drawn)
    top, top_token_ids = wide.topk(num_top, dim=1)
    return RowLogprobs((drawn - norm).squeeze(1), ranks, top_token_ids, top - norm)


def token_logprobs(logits: Tensor, token_ids: Tensor, normalized: bool = True) -> Tensor:
    """Returns fp32 log-probabilities of token_ids [num_rows, count] for logits [num_rows, vocab_size].

    Without `normalized`, returns the logits themselves instead.
    """
    wide = logits.float()
    found = wide.gather(1, token_ids)
    return found - _norm(wide) if normalized else found


def _norm(wide: Tensor) -> Tensor:
    return torch.logsumexp(wide, dim=1, keepdim=True)
