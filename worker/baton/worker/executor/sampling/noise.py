"""Random numbers by (seed, position, token id), in NumPy: the bits of baton.kernels.reference.sampling.noise."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]
UInt32 = NDArray[np.uint32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

LANES = 4  # tokens that share a counter

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64).reshape(2, 1, 1)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64).reshape(2, 1, 1)
_ROUNDS = 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def noise_words(seeds: UInt64, positions: Int64, token_ids: Int64) -> UInt32:
    """32 random bits for each token [n], under seeds and positions [n].

    Token t takes word t % LANES of Philox-4x32-10's counter (t // LANES, position, 0, 0).
    """
    counters, lanes = np.divmod(token_ids, LANES)
    words = np.stack(_philox(seeds[None], positions[None], counters[None]))
    taken: UInt32 = words[lanes, 0, np.arange(len(lanes))].astype(np.uint32)
    return taken


def vocabulary_noise_words(seeds: UInt64, positions: Int64, vocab_size: int) -> UInt32:
    """noise_words of every token, [num_rows, vocab_size rounded up to LANES], for seeds and positions [num_rows]."""
    counters = np.arange(-(-vocab_size // LANES))[None]
    words = np.empty((len(seeds), counters.size, LANES), np.uint32)
    for lane, each in enumerate(_philox(seeds[:, None], positions[:, None], counters)):
        words[..., lane] = each
    return words.reshape(len(seeds), -1)


def _philox(seeds: UInt64, positions: Int64, counters: Int64) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    """Four words of each counter. Shapes broadcast to two dimensions."""
    shape = np.broadcast_shapes(seeds.shape, counters.shape)
    keys = np.stack((seeds & _LOW, seeds >> _SHIFT))
    # The counter's words 0 and 2, which are multiplied, and 1 and 3, whose high halves are to be ignored.
    multiplied = np.zeros((2, *shape), np.uint64)
    multiplied[0] = counters
    added = np.zeros_like(multiplied)
    added[0] = positions
    products = np.empty_like(multiplied)
    for _ in range(_ROUNDS):
        np.multiply(multiplied, _MULTIPLIERS, out=products)
        np.right_shift(products[::-1], _SHIFT, out=multiplied)
        multiplied ^= added
        multiplied ^= keys
        multiplied &= _LOW
        added, products = products[::-1], added
        keys += _WEYL
    added &= _LOW
    return multiplied[0], added[0], multiplied[1], added[1]


def gumbel_noise(words: UInt32) -> Float32:
    """-log(-log u), u uniform in (0, 1), from 32 random bits."""
    noise = words.astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(2.0**-32)
    np.minimum(noise, np.float32(1.0 - 2.0**-24), out=noise)
    np.negative(noise, out=noise)
    # PyTorch's logarithms: NumPy's are rounded differently.
    torch.from_numpy(noise).log1p_().neg_().log_().neg_()
    return noise


def noise_bounds(words: UInt32) -> Float32:
    """What gumbel_noise is less than, by 0.07 where it is from 5 to 15, at a fraction of its cost."""
    # -log(-log1p(-c)) < -log c, and log2 c >= exponent + mantissa - 1: c's bits, read as an integer.
    bounds = words.astype(np.float32).view(np.int32).astype(np.float32)
    bounds *= np.float32(-math.log(2) / (1 << 23))
    bounds += np.float32((127 + 32) * math.log(2) + 1e-4)
    return bounds
