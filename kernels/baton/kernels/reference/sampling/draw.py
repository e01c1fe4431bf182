"""Samples a token per row by Gumbel-max. A row's result depends only on the row.

A row's filters reduce to one threshold on its scaled logits, searched among its most likely tokens. That is cheap while
few tokens pass, and always exact, because the search widens until it includes the threshold. Ties go to the lowest
token id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.reference.sampling.noise import gumbel_noise, noise_words, vocabulary_noise_words

_FIRST_WIDTH = 64
_WIDEN = 16


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Returns token ids [num_rows] int64 for logits [num_rows, vocab_size].

    temperature [num_rows] fp32, 0 is greedy; top_k int64, 0 is off; top_p fp32, 1 is off; min_p fp32, 0 is off;
    seeds int64 with 64 bits of seed; positions int64: the token's index in the output. As in Hugging Face
    Transformers, top_p counts within top_k and min_p is relative to the most likely token; ties pass together, and a
    row without allowed tokens gets token 0.
    """
    warm = temperature > 0
    token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device) if warm.all() else logits.argmax(-1)
    filtered = warm & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    free = warm & ~filtered
    for rows, draw in ((filtered.nonzero().squeeze(1), _draw_filtered), (free.nonzero().squeeze(1), _draw_free)):
        if rows.numel() == len(logits):
            scaled = logits.float() / temperature.unsqueeze(1)
            return draw(scaled, top_k, top_p, min_p, seeds, positions)
        if rows.numel():
            scaled = logits[rows].float() / temperature[rows].unsqueeze(1)
            token_ids[rows] = draw(scaled, top_k[rows], top_p[rows], min_p[rows], seeds[rows], positions[rows])
    return token_ids


def _draw_free(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    noise = gumbel_noise(vocabulary_noise_words(seeds, positions, scaled.shape[1]))
    return scaled.add_(noise).argmax(-1)


def _draw_filtered(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    vocab_size = scaled.shape[1]
    width = max(_FIRST_WIDTH, min(int(top_k.max()), vocab_size) + 1)
    while True:
        width = min(width, vocab_size)
        values, token_ids = scaled.topk(width, dim=1)
        threshold, lowest = _threshold(scaled, values, top_k, top_p, min_p)
        if width == vocab_size or bool((values[:, -1] < lowest).all()):
            break
        width *= _WIDEN
    noisy = values + gumbel_noise(noise_words(seeds, positions, token_ids))
    noisy.masked_fill_(~(values >= threshold.unsqueeze(1)), float("-inf"))
    best = (noisy == noisy.amax(1, keepdim=True)) & (noisy > float("-inf"))
    lowest_id = token_ids.masked_fill(~best, vocab_size).amin(1)
    return lowest_id.masked_fill(lowest_id == vocab_size, 0)


def _threshold(scaled: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the lowest scaled logit [num_rows] that passes the filters, and the lowest that they depend on.

    `values` [num_rows, width] are the largest scaled logits, descending.
    """
    limited = (top_k > 0).unsqueeze(1)
    kth = values.gather(1, (top_k.clamp(1, values.shape[1]) - 1).unsqueeze(1))
    passes = ~limited | (values >= kth)
    if bool((top_p < 1).any()):
        top = values[:, :1]
        mass = torch.exp(values - top).mul_(passes)
        before = mass.cumsum(1)
        # The order of the sum must not depend on the width, or the threshold would depend on the rest of the batch.
        total = before[:, -1:].clone()  # `before` changes below
        if not bool(limited.all()):
            total = torch.where(limited, total, torch.exp(torch.logsumexp(scaled, 1, keepdim=True) - top))
        before -= mass
        passes &= (before < top_p.unsqueeze(1) * total) | (top_p >= 1).unsqueeze(1)
    least = values.masked_fill(~passes, float("inf")).amin(1)
    threshold = torch.maximum(least, values[:, 0] + torch.log(min_p))
    # top_p sums all tokens that tie with the kth.
    return threshold, torch.where(limited, kth, threshold.unsqueeze(1)).squeeze(1)
