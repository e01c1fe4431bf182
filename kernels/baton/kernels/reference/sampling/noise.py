"""Random numbers by (seed, position, token id): the same for any batch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

# Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_LANES = 4


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Returns Philox-4x32-10: four 32-bit words per counter, in a new last dimension. Tensors are uint32 in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products wrap as signed 64-bit integers, with the same bits as unsigned ones.
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) & _LOW) ^ c1 ^ k0
        c1 = product_1 & _LOW
        c2 = ((product_0 >> 32) & _LOW) ^ c3 ^ k1
        c3 = product_0 & _LOW
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def noise_words(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Returns 32 random bits, in int64, for token_ids [num_rows, n] by positions and 64-bit seeds [num_rows].

    Token id t takes word t % 4 of the counter (t // 4, position, 0, 0).
    """
    words = _words(seeds, positions, token_ids // _LANES)
    return words.gather(-1, (token_ids % _LANES).unsqueeze(-1)).squeeze(-1)


def vocabulary_noise_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Returns noise_words of all token ids, [num_rows, vocab_size], with a quarter of the work."""
    counters = torch.arange(-(-vocab_size // _LANES), device=seeds.device).unsqueeze(0)
    return _words(seeds, positions, counters).flatten(1)[:, :vocab_size]


def gumbel_noise(words: Tensor) -> Tensor:
    """Returns -log(-log u), u uniform in (0, 1), from 32 random bits; fp32 with full resolution at the large end."""
    complement = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-complement))


def _words(seeds: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    key = ((seeds & _LOW).unsqueeze(-1), ((seeds >> 32) & _LOW).unsqueeze(-1))
    zero = torch.zeros_like(key[0])
    return philox4x32((counters, positions.unsqueeze(-1), zero, zero), key)
