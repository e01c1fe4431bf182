"""The holders of a block, as a code of 32 bits: none, one column, or a row of bits that several columns share.

A column is a worker's slot and a tier. Every code is also the number of its row of bits, so that a lookup turns codes
into bits with one gather: 0 is a row of zeros, the next 65,535 have one bit each, and only blocks with several columns
take a row of their own.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.router.index.lines import Codes
from baton.rpc.errors import NoCapacity

Columns: TypeAlias = NDArray[np.int64]  # slot * NUM_TIERS + tier
Masks: TypeAlias = NDArray[np.uint64]  # [n, NUM_TIERS, words]

DEVICE, HOST, NUM_TIERS = 0, 1, 2
_FIRST_SHARED = 1 << 16
MAX_SLOTS = (_FIRST_SHARED - 1) // NUM_TIERS
_MIN_ROWS = 1024
_ONE = np.uint64(1)


class Holders:
    """The rows of bits. Codes are the caller's to keep, one for each block."""

    def __init__(self) -> None:
        self._words = 1  # 64 slots each
        self._rows = np.zeros((NUM_TIERS, _FIRST_SHARED + _MIN_ROWS, 1), np.uint64)
        self._num_rows = _FIRST_SHARED
        self._free = np.zeros(0, np.uint32)  # rows of no block, in [:_num_free]
        self._num_free = 0
        self._num_slots = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the shared rows."""
        return (self._num_rows - _FIRST_SHARED) * NUM_TIERS * self._words * 8 + self._free.nbytes

    @property
    def words(self) -> int:
        """Number of words in one tier's bits."""
        return self._words

    def add_slot(self) -> int:
        """Returns a new slot. Raises NoCapacity if there are too many."""
        slot = self._num_slots
        if slot == MAX_SLOTS:
            raise NoCapacity(f"the index has {MAX_SLOTS} workers; it takes no more")
        if slot == self._words * 64:
            wider = np.zeros((*self._rows.shape[:2], 2 * self._words), np.uint64)
            wider[:, : self._num_rows, : self._words] = self._rows[:, : self._num_rows]
            self._rows = wider
            self._words *= 2
        for tier in range(NUM_TIERS):
            self._rows[tier, 1 + slot * NUM_TIERS + tier, slot // 64] = 1 << (slot % 64)
        self._num_slots += 1
        return slot

    def mask_of(self, slots: list[int]) -> Masks:
        """Returns the bits of slots, in both tiers. [NUM_TIERS, words]"""
        mask = np.zeros((NUM_TIERS, self._words), np.uint64)
        for slot in slots:
            mask[:, slot // 64] |= np.uint64(1 << (slot % 64))
        return mask

    def masks(self, codes: Codes) -> Masks:
        """Returns the bits of each code."""
        return self._rows[:, codes].swapaxes(0, 1)

    def words_of(self, codes: Codes, tier: int) -> NDArray[np.uint64]:
        """Returns the bits of each code in one tier. [n, words]"""
        rows = self._rows[tier]
        if self._words > 1:
            taken: NDArray[np.uint64] = rows.take(codes, axis=0, mode="clip")
            return taken
        # Single words are gathered several times as fast as rows.
        words: NDArray[np.uint64] = rows.reshape(-1).take(codes, mode="clip").reshape(-1, 1)
        return words

    def add(self, codes: Codes, columns: Columns) -> tuple[Codes, NDArray[np.bool_]]:
        """Adds a column to each code. Returns the new codes, and which lacked it. No shared row may occur twice."""
        single = (columns + 1).astype(np.uint32)
        result = np.where(codes == 0, single, codes)
        lacked = codes != single
        shared = (codes >= _FIRST_SHARED).nonzero()[0]
        if shared.size:
            rows, (tiers, words, bits) = codes[shared], self._bits(columns[shared])
            before = self._rows[tiers, rows, words]
            lacked[shared] = before & bits == 0
            self._rows[tiers, rows, words] = before | bits
        second = ((codes != 0) & (codes < _FIRST_SHARED) & (codes != single)).nonzero()[0]
        if second.size:
            taken = self._take_rows(second.size)
            self._rows[:, taken] = self._rows[:, codes[second]] | self._rows[:, single[second]]
            result[second] = taken
        return result, lacked

    def discard(self, codes: Codes, columns: Columns) -> tuple[Codes, NDArray[np.bool_]]:
        """Removes a column from each code. Returns the new codes, and which had it. No shared row may occur twice."""
        had = codes == columns + 1
        result = np.where(had, np.uint32(0), codes)
        shared = (codes >= _FIRST_SHARED).nonzero()[0]
        if shared.size:
            rows, (tiers, words, bits) = codes[shared], self._bits(columns[shared])
            before = self._rows[tiers, rows, words]
            had[shared] = before & bits != 0
            self._rows[tiers, rows, words] = before & ~bits
            result[shared] = self._simplified(rows)
        return result, had

    def strip(self, codes: Codes, mask: Masks) -> Codes:
        """Returns the codes without the mask's bits."""
        left = self.masks(codes) & ~mask
        result = np.where(left.any(axis=(1, 2)), codes, np.uint32(0))
        shared = (codes >= _FIRST_SHARED).nonzero()[0]
        if shared.size:
            self._rows[:, codes[shared]] = left[shared].swapaxes(0, 1)
            result[shared] = self._simplified(codes[shared])
        return result

    def _bits(self, columns: Columns) -> tuple[Columns, Columns, NDArray[np.uint64]]:
        """Returns the position of a column's bit: tier, word, and the bit in it."""
        slots = columns // NUM_TIERS
        return columns % NUM_TIERS, slots >> 6, _ONE << (slots & 63).astype(np.uint64)

    def _simplified(self, rows: Codes) -> Codes:
        """Returns codes for shared rows that lost bits. Frees rows with one bit or none."""
        masks = self.masks(rows).reshape(rows.size, -1)
        counts = np.bitwise_count(masks).sum(axis=1)
        result = rows.copy()
        result[counts == 0] = 0
        lone = (counts == 1).nonzero()[0]
        if lone.size:
            words = (masks[lone] != 0).argmax(axis=1)
            places = np.bitwise_count(masks[lone, words] - _ONE)  # of the only bit
            tiers, words = words // self._words, words % self._words
            result[lone] = 1 + (words * 64 + places) * NUM_TIERS + tiers
        self._give_rows(rows[counts <= 1])
        return result

    def _take_rows(self, count: int) -> Codes:
        reused = min(count, self._num_free)
        self._num_free -= reused
        taken = self._free[self._num_free : self._num_free + reused]
        fresh = count - reused
        while self._num_rows + fresh > self._rows.shape[1]:
            shared = self._rows.shape[1] - _FIRST_SHARED
            grown = np.zeros((NUM_TIERS, _FIRST_SHARED + 2 * shared, self._words), np.uint64)
            grown[:, : self._num_rows] = self._rows[:, : self._num_rows]
            self._rows = grown
        new = np.arange(self._num_rows, self._num_rows + fresh, dtype=np.uint32)
        self._num_rows += fresh
        return np.concatenate((taken, new))

    def _give_rows(self, rows: Codes) -> None:
        end = self._num_free + rows.size
        if end > self._free.size:
            grown = np.zeros(max(end, 2 * self._free.size, _MIN_ROWS), np.uint32)
            grown[: self._num_free] = self._free[: self._num_free]
            self._free = grown
        self._free[self._num_free : end] = rows
        self._num_free = end
