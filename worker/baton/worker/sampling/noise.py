"""Random numbers by (seed, position, token id), in NumPy, bit for bit as baton.kernels.reference.sampling.noise."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from baton.worker.core import Int64

UInt64 = NDArray[np.uint64]
UInt32 = NDArray[np.uint32]
Float32 = NDArray[np.float32]

LANES = 4  # tokens that share a counter

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_ROUNDS = 10
_SCHEDULE = np.outer(np.arange(_ROUNDS, dtype=np.uint64), np.array([0x9E3779B9, 0xBB67AE85], np.uint64))
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def noise_words(seeds: UInt64, positions: Int64, token_ids: Int64) -> UInt32:
    """Returns 32 random bits for each token [n], by seeds and positions [n].

    Token t takes word t % LANES of Philox-4x32-10's counter (t // LANES, position, 0, 0).
    """
    counters, lanes = np.divmod(token_ids, LANES)
    multiplied = np.zeros((2, len(counters)), np.uint64)
    multiplied[0] = counters
    added = np.zeros_like(multiplied)
    added[0] = positions
    words = np.concatenate(_philox(multiplied, added, _keys(seeds)))
    taken: UInt32 = words[(lanes >> 1) + 2 * (lanes & 1), np.arange(len(lanes))].astype(np.uint32)
    return taken


def vocabulary_noise_words(seeds: UInt64, positions: Int64, vocab_size: int) -> UInt32:
    """Returns noise_words of all tokens [num_rows, vocab_size rounded up to LANES]; seeds, positions: [num_rows]."""
    num_rows, num_counters = len(seeds), -(-vocab_size // LANES)
    keys = _keys(seeds[:, None])
    multiplied = np.empty((2, num_rows, num_counters), np.uint64)
    added = np.empty_like(multiplied)
    # In the first two rounds most words are the same for all counters, or for all rows.
    first = np.arange(num_counters, dtype=np.uint64) * _MULTIPLIERS[0]
    np.bitwise_xor(first >> _SHIFT, keys[0, 1], out=multiplied[1])
    second = (positions.astype(np.uint64)[:, None] ^ keys[0, 0]) * _MULTIPLIERS[0]
    np.multiply(multiplied[1], _MULTIPLIERS[1], out=added[0])
    added[1] = second
    np.right_shift(added[0], _SHIFT, out=multiplied[0])
    multiplied[0] ^= keys[1, 0]
    np.bitwise_xor(first & _LOW, (second >> _SHIFT) ^ keys[1, 1], out=multiplied[1])
    multiplied, added = _philox(multiplied, added, keys[2:])
    words = np.empty((num_rows, num_counters, 2), np.uint64)
    added <<= _SHIFT
    for pair in range(2):
        np.bitwise_or(multiplied[pair], added[pair], out=words[..., pair])
    return words.view("<u4").reshape(num_rows, -1)


def _philox(multiplied: UInt64, added: UInt64, keys: UInt64) -> tuple[UInt64, UInt64]:
    """Runs one round of Philox per key. Returns a counter's words 0 and 2, which rounds multiply, and words 1 and 3.

    Words are [2, ...]; the high halves of `added` are undefined. Overwrites both.
    """
    factors = _MULTIPLIERS.reshape(2, *(1,) * (multiplied.ndim - 1))
    products = np.empty_like(multiplied)
    for key in keys:
        np.multiply(multiplied, factors, out=products)
        np.right_shift(products[::-1], _SHIFT, out=multiplied)
        multiplied ^= added
        multiplied ^= key
        multiplied &= _LOW
        added, products = products[::-1], added
    return multiplied, added


def _keys(seeds: UInt64) -> UInt64:
    """Returns the keys of all rounds, [rounds, 2, ...]."""
    first = np.stack((seeds & _LOW, seeds >> _SHIFT))
    return (first + _SCHEDULE.reshape(_ROUNDS, 2, *(1,) * seeds.ndim)) & _LOW


def gumbel_noise(words: UInt32) -> Float32:
    """Returns -log(-log u), u uniform in (0, 1), from 32 random bits."""
    noise = words.astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(2.0**-32)
    np.minimum(noise, np.float32(1.0 - 2.0**-24), out=noise)
    np.negative(noise, out=noise)
    # PyTorch's logarithms, because NumPy's are rounded differently.
    torch.from_numpy(noise).log1p_().neg_().log_().neg_()
    return noise


def noise_bounds(words: UInt32) -> Float32:
    """Returns upper bounds of gumbel_noise at a fraction of its cost; within 0.07 for noise from 5 to 15."""
    # -log(-log1p(-c)) < -log c, and log2 c >= exponent + mantissa - 1: c's bits, read as an integer.
    bounds = words.astype(np.float32).view(np.int32).astype(np.float32)
    bounds *= np.float32(-math.log(2) / (1 << 23))
    bounds += np.float32((127 + 32) * math.log(2) + 1e-4)
    return bounds
