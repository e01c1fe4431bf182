"""Random numbers as a function of (seed, position, token id): the same whoever shares the batch, on any device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.int64]

# Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_LANES = 4


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Philox-4x32-10: four 32-bit words a counter, in a new last dimension; all tensors int64 that hold uint32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products wrap as signed 64-bit integers; their bits are those of the unsigned ones.
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
    """32 random bits, in int64, for token_ids [num_rows, n] at positions [num_rows] under 64-bit seeds [num_rows].

    Token id t takes word t % 4 of the counter (t // 4, position, 0, 0).
    """
    words = _words(seeds, positions, token_ids // _LANES)
    return words.gather(-1, (token_ids % _LANES).unsqueeze(-1)).squeeze(-1)


def vocabulary_noise_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """noise_words of every token id, [num_rows, vocab_size], at a quarter of the work."""
    counters = torch.arange(-(-vocab_size // _LANES), device=seeds.device).unsqueeze(0)
    return _words(seeds, positions, counters).flatten(1)[:, :vocab_size]


def gumbel_noise(words: Tensor) -> Tensor:
    """-log(-log u), u uniform in (0, 1), from 32 random bits; fp32 with full resolution at the large end."""
    complement = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-complement))


def _words(seeds: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    if seeds.is_cpu and counters.is_cpu:
        return torch.from_numpy(_words_on_host(seeds.numpy(), positions.numpy(), counters.numpy()))
    key = ((seeds & _LOW).unsqueeze(-1), ((seeds >> 32) & _LOW).unsqueeze(-1))
    zero = torch.zeros_like(key[0])
    return philox4x32((counters, positions.unsqueeze(-1), zero, zero), key)


def _words_on_host(seeds: NDArray[np.int64], positions: NDArray[np.int64], counters: NDArray[np.int64]) -> Words:
    """philox4x32 in NumPy, whose small operations cost less; both halves of the counter side by side."""
    low, shift = np.uint64(_LOW), np.uint64(32)
    multipliers = np.array([_MULTIPLIER_0, _MULTIPLIER_1], np.uint64).reshape(2, 1, 1)
    weyl = np.array([_WEYL_0, _WEYL_1], np.uint64).reshape(2, 1, 1)
    bits = seeds.view(np.uint64)[:, None]
    keys = np.stack((bits & low, bits >> shift))  # [2, num_rows, 1]
    multiplied = np.zeros((2, len(seeds), counters.shape[1]), np.uint64)
    added = np.zeros_like(multiplied)
    multiplied[0] = counters
    added[0] = positions[:, None]
    for _ in range(_ROUNDS):
        products = (multiplied * multipliers)[::-1]
        multiplied = products >> shift
        multiplied ^= added
        multiplied ^= keys
        added = products & low
        keys = (keys + weyl) & low
    words = np.stack((multiplied[0], added[0], multiplied[1], added[1]), axis=-1)
    return words.view(np.int64)
