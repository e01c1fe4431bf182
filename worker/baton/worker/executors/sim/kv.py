"""The simulator's KV: one 64-bit word per token and layer, chained, so that a wrong block changes the output.

    kv[l, p] = kv[l, p - 1] * A_l + mix(token_p + K_l)      modulo 2^64, with kv[l, -1] = S_l
    digest(row) = sum over l, p of kv[l, p] * (2 p + 1)

All words are read through the block table. A row's digest is computed from all its words when it enters the batch, and
updated from then on; each step reads again the previous word, and a few others selected by its position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import Int64

UInt64 = NDArray[np.uint64]

_NUM_PROBES = 4


def mix(values: UInt64) -> UInt64:
    """Returns splitmix64's finalizer: every bit of the input affects every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class SimKv:
    """Blocks of words, [num_layers, num_blocks * block_size]."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._shape = (num_layers, num_blocks * block_size)
        self.words: UInt64 = np.zeros(self._shape, np.uint64)
        layers = np.arange(1, num_layers + 1, dtype=np.uint64)
        self._multiplier = mix(layers) | np.uint64(1)  # odd, so that it has an inverse
        self._inverse = np.array([pow(int(a), -1, 1 << 64) for a in self._multiplier], np.uint64)
        self._salt = mix(layers + np.uint64(1 << 32))
        self._start = mix(layers + np.uint64(1 << 33))
        self._powers = np.ones((num_layers, 1), np.uint64)
        self._inverse_powers = np.ones((num_layers, 1), np.uint64)

    def free(self) -> int:
        """Drops the words. Returns their bytes. Idempotent."""
        freed, self.words = self.words.nbytes, self.words[:, :0].copy()
        return freed

    def allocate(self) -> None:
        """Allocates the words again, as zeros."""
        self.words = np.zeros(self._shape, np.uint64)

    def slots(self, table: NDArray[np.int32], positions: Int64) -> Int64:
        """Returns the slots of positions of one row."""
        blocks = table[positions // self.block_size].astype(np.int64)
        return np.asarray(blocks * self.block_size + positions % self.block_size)

    def digest(self, table: NDArray[np.int32], num_tokens: int) -> np.uint64:
        """Computes the digest of a row's first num_tokens tokens from all words."""
        positions = np.arange(num_tokens)
        return self._weighted(self.words[:, self.slots(table, positions)], positions)

    def prefill(self, table: NDArray[np.int32], start: int, token_ids: UInt64) -> np.uint64:
        """Computes the words of a chunk that begins at `start`. Returns the increment of the digest."""
        count = len(token_ids)
        positions = np.arange(start, start + count)
        slots = self.slots(table, positions)
        before = self.words[:, self.slots(table, positions[:1] - 1)[0]] if start else self._start
        self._grow_powers(count + 1)
        terms = mix(token_ids[None, :] + self._salt[:, None]) * self._inverse_powers[:, 1 : count + 1]
        sums = np.cumsum(terms, axis=1, dtype=np.uint64) + before[:, None]
        words = sums * self._powers[:, 1 : count + 1]
        self.words[:, slots] = words
        return self._weighted(words, positions)

    def decode(self, tables: NDArray[np.int32], rows: Int64, positions: Int64, token_ids: UInt64) -> UInt64:
        """Computes one word of each of these rows of `tables`, at positions > 0. Returns the increments of digests."""
        size = self.block_size
        slots = tables[rows, positions // size].astype(np.int64) * size + positions % size
        previous = positions - 1
        slots_before = tables[rows, previous // size].astype(np.int64) * size + previous % size
        words = self.words[:, slots_before] * self._multiplier[:, None]
        words += mix(token_ids[None, :] + self._salt[:, None])
        self.words[:, slots] = words
        return np.asarray(words.sum(axis=0, dtype=np.uint64) * (2 * positions + 1).astype(np.uint64))

    def probe(self, tables: NDArray[np.int32], rows: Int64, positions: Int64) -> UInt64:
        """Reads some of each row's words up to its position, and mixes them."""
        seeds = np.arange(_NUM_PROBES, dtype=np.uint64)[:, None] + (positions * _NUM_PROBES).astype(np.uint64)
        picked = (mix(seeds) % (positions + 1).astype(np.uint64)).astype(np.int64)
        picked[0] = positions
        blocks = tables[rows, picked // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + picked % self.block_size
        layers = np.arange(_NUM_PROBES)[:, None] % len(self.words)
        words = self.words[layers, slots] * (seeds | np.uint64(1))
        return mix(words.sum(axis=0, dtype=np.uint64))

    def _weighted(self, words: UInt64, positions: Int64) -> np.uint64:
        weights = (2 * positions + 1).astype(np.uint64)
        return np.uint64((words * weights[None, :]).sum(dtype=np.uint64))

    def _grow_powers(self, count: int) -> None:
        have = self._powers.shape[1]
        if have >= count:
            return
        count = max(count, 2 * have)
        layers = len(self.words)
        self._powers = _powers(self._multiplier, layers, count)
        self._inverse_powers = _powers(self._inverse, layers, count)


def _powers(bases: UInt64, layers: int, count: int) -> UInt64:
    factors = np.broadcast_to(bases[:, None], (layers, count)).copy()
    factors[:, 0] = 1
    return np.cumprod(factors, axis=1, dtype=np.uint64)
