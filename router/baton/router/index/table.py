"""Block fingerprints and the line of each, in packed arrays. Knows no worker and no hash function.

An extendible hash table: the top bits of a fingerprint choose a segment through the directory, its lowest sixteen bits
name two buckets of eight slots in it. A block is in the first bucket or, if that was full, in the second, so a lookup
reads at most two cache lines a block, and a removal leaves no tombstone. A full segment is split in two by the next
bit. All others stay, so growth never stops all lookups.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.router.index.lines import Codes, Fingerprints, LineNumbers, Lines, doubled, zeros

Slots: TypeAlias = NDArray[np.int64]  # [n], -1: not there

_BUCKET_SLOTS = 8  # 64 bytes of fingerprints: a cache line
_BUCKETS_BITS = 8
_SEGMENT_BUCKETS = 1 << _BUCKETS_BITS
_SEGMENT_SLOTS_BITS = _BUCKETS_BITS + 3
SEGMENT_SLOTS = 1 << _SEGMENT_SLOTS_BITS
_MAX_FILL = int(0.78 * SEGMENT_SLOTS)  # beyond, both buckets of a block are too often full
_BUCKET_MASK = np.uint64(_SEGMENT_BUCKETS - 1)
_SECOND_SHIFT = np.uint64(_BUCKETS_BITS)
_FIRST_MISSES = 64
_MIN_PIECES, _LONG_PIECE = 3, 64  # at least this many pieces, and one more for each `_LONG_PIECE` blocks
_FEW_BLOCKS = 384  # of a prompt: to look for them all is as quick as to guess
_SCATTERED = 16  # blocks: a prompt of which the first pieces together have less lies in no order
_GUESSED_BITS = 4
_GUESSED = 1 << _GUESSED_BITS  # blocks of a prompt for each one that is looked for
_FOLLOWING = np.arange(_GUESSED)
_FEW = 1024
_SPLIT_AT_ONCE = 32  # segments: half a megabyte
# [n, bits]: position of the n-th set bit of eight; -1: fewer are set
_NTH_SET = np.full((_BUCKET_SLOTS + 1, 256), -1, np.int64)
for _bits in range(256):
    for _nth, _slot in enumerate(slot for slot in range(_BUCKET_SLOTS) if _bits >> slot & 1):
        _NTH_SET[_nth, _bits] = _slot
_NO_CODES = np.zeros(0, np.uint32)
_ZERO, _NONE = np.zeros(1, np.int64), np.zeros(0, np.int64)
# 29 million blocks fit before anything is copied: a copy of all would hold up lookups.
_RESERVED_SEGMENTS = 1 << 15


class BlockTable:
    """Fingerprints of 64 bits, a line's number of 32 bits each: 12 bytes a slot."""

    def __init__(self) -> None:
        self._bits = 1  # of the directory
        self._directory = np.array([0, _SEGMENT_BUCKETS], np.int64)  # first bucket of each segment
        self._num_segments = 2
        self._local_bits = [1, 1]
        self._prefixes = [0, 1]
        self._fill = zeros((_RESERVED_SEGMENTS,), np.int64)
        self._keys = zeros((_RESERVED_SEGMENTS * _SEGMENT_BUCKETS, _BUCKET_SLOTS), np.uint64)
        self._line_at = zeros((_RESERVED_SEGMENTS * SEGMENT_SLOTS,), np.uint32)  # by slot; undefined where free
        self.lines = Lines()

    def __len__(self) -> int:
        """Returns the number of stored blocks."""
        return int(self._fill[: self._num_segments].sum())

    @property
    def num_bytes(self) -> int:
        """Memory in use, without what is only reserved."""
        slots = self._num_segments * SEGMENT_SLOTS
        return slots * 12 + self._directory.nbytes + self._num_segments * 8 + self.lines.num_bytes

    def find(self, fingerprints: Fingerprints) -> Slots:
        """Returns the slot of each block."""
        bases, slots = self._look_first(fingerprints)
        missing = (slots < 0).nonzero()[0]
        if missing.size:
            slots[missing] = self._look_second(fingerprints[missing], bases[missing])
        return slots

    def lines_at(self, slots: Slots) -> LineNumbers:
        """Returns the lines of stored blocks."""
        return self._line_at.take(slots, mode="clip").astype(np.int64)

    def find_prefix(self, fingerprints: Fingerprints) -> Codes:
        """Returns the codes of the first blocks, up to the first that is not stored."""
        keys, codes = self.lines.fingerprints, self.lines.codes
        pieces: list[Codes] = []
        at, end = 0, fingerprints.size
        # As long as what follows a block in the prompt follows it in memory, the prompt is read piece by piece.
        tries = _MIN_PIECES
        while at < end and tries:
            line = self._line_of(fingerprints.item(at))
            if line < 0:
                end = at
                break
            piece = keys[line : line + end - at]
            same = piece == fingerprints[at : at + piece.size]
            length = int(same.argmin())
            if same[length]:
                length = same.size
            pieces.append(codes[line : line + length])
            at += length
            tries += length // _LONG_PIECE - 1
        if at < end:
            rest = fingerprints[at:]
            is_scattered = at < _SCATTERED or rest.size <= _FEW_BLOCKS
            lines = self.lines_at(self._find_first(rest)) if is_scattered else self._guess(rest)
            pieces.append(codes.take(lines, mode="clip"))
        return pieces[0] if len(pieces) == 1 else np.concatenate((_NO_CODES, *pieces))

    def _guess(self, fingerprints: Fingerprints) -> LineNumbers:
        """Returns the lines of the first blocks: looks some up and guesses that the others are next to them."""
        marks = self._find_few(fingerprints[::_GUESSED])
        if marks.size and marks.min() < 0:
            marks = marks[: (marks < 0).argmax()]
            fingerprints = fingerprints[: marks.size * _GUESSED]
        marks = self.lines_at(marks)
        lines = (marks[:, None] + _FOLLOWING).ravel()[: fingerprints.size]
        wrong = (self.lines.fingerprints.take(lines, mode="clip") != fingerprints).nonzero()[0]
        if wrong.size:
            wrong = self._guess_back(fingerprints, lines, marks, wrong)
        for some in (wrong[:_FIRST_MISSES], wrong[_FIRST_MISSES:]):
            if some.size:
                slots = self._find_few(fingerprints[some])
                lines[some] = self.lines_at(slots)
                if slots.min() < 0:
                    return lines[: some[(slots < 0).argmax()]]
        return lines

    def _line_of(self, fingerprint: int) -> int:
        """Returns one block's line, or -1 if it is not stored."""
        base = self._directory.item(fingerprint >> (64 - self._bits))
        for bucket in (fingerprint, fingerprint >> _BUCKETS_BITS):
            bucket = base + bucket % _SEGMENT_BUCKETS
            keys = self._keys[bucket].tolist()
            if fingerprint in keys:
                return self._line_at.item(bucket * _BUCKET_SLOTS + keys.index(fingerprint))
        return -1

    def _find_first(self, fingerprints: Fingerprints) -> Slots:
        """Returns the same as `find`, up to the first block that is not stored."""
        bases, slots = self._look_first(fingerprints)
        missing = (slots < 0).nonzero()[0]
        for some in (missing[:_FIRST_MISSES], missing[_FIRST_MISSES:]):
            if some.size:
                found = self._look_second(fingerprints[some], bases[some])
                slots[some] = found
                absent = (found < 0).nonzero()[0]
                if absent.size:
                    return slots[: some[absent[0]]]
        return slots

    def insert(self, fingerprints: Fingerprints, lines: LineNumbers) -> bool:
        """Adds blocks that are not there, sorted and each once; the codes of their lines are the caller's to set at
        once. Returns whether other blocks have moved."""
        moved = self._split_full(fingerprints)
        self.lines.fingerprints[lines] = fingerprints
        left = self._put(fingerprints, lines)
        while left.size:
            # Both buckets are full: rare, and cured by a split.
            moved = True
            fingerprints, lines = fingerprints[left], lines[left]
            self._split(np.unique(self._bases(fingerprints) >> _BUCKETS_BITS))
            left = self._put(fingerprints, lines)
        return moved

    def free_slots(self, fingerprints: list[int]) -> list[int] | None:
        """Returns where `put` can add these different blocks, or None if one is stored already or does not fit."""
        slots: list[int] = []
        taken: dict[int, list[int]] = {}  # keys of buckets, with those of these blocks
        fills: dict[int, int] = {}
        for fingerprint in fingerprints:
            base = self._directory.item(fingerprint >> (64 - self._bits))
            fill = fills.get(base)
            if fill is None:
                fill = self._fill.item(base >> _BUCKETS_BITS)
            if fill >= _MAX_FILL:
                return None
            fills[base] = fill + 1
            slot = -1
            for bits in (fingerprint, fingerprint >> _BUCKETS_BITS):
                bucket = base + bits % _SEGMENT_BUCKETS
                keys = taken.get(bucket)
                if keys is None:
                    keys = taken[bucket] = self._keys[bucket].tolist()
                if fingerprint in keys:
                    return None
                if slot < 0 and 0 in keys:
                    slot = bucket * _BUCKET_SLOTS + keys.index(0)
            if slot < 0:
                return None
            taken[slot // _BUCKET_SLOTS][slot % _BUCKET_SLOTS] = fingerprint
            slots.append(slot)
        return slots

    def put(self, slots: list[int], fingerprints: Fingerprints, lines: LineNumbers) -> None:
        """Adds blocks at their `free_slots`; the codes of their lines are the caller's to set at once."""
        self.lines.fingerprints[lines] = fingerprints
        self._keys.reshape(-1)[slots] = fingerprints
        self._line_at[slots] = lines
        for slot in slots:
            self._fill[slot >> _SEGMENT_SLOTS_BITS] += 1

    def remove(self, slots: Slots, lines: LineNumbers) -> None:
        """Takes blocks out, each once: where they are, and their lines."""
        self._keys.reshape(-1)[slots] = 0
        self.lines.give(lines)
        add_at(self._fill, slots >> _SEGMENT_SLOTS_BITS, -1)

    def _guess_back(
        self, fingerprints: Fingerprints, lines: LineNumbers, marks: LineNumbers, wrong: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Guesses again from the next block that was looked up, and returns which guesses are still wrong."""
        nexts = (wrong >> _GUESSED_BITS) + 1
        guessed = marks.take(nexts, mode="clip") - ((nexts << _GUESSED_BITS) - wrong)
        np.maximum(guessed, 0, out=guessed)
        hit = self.lines.fingerprints.take(guessed, mode="clip") == fingerprints[wrong]
        lines[wrong[hit]] = guessed[hit]
        left: NDArray[np.int64] = wrong[~hit]
        return left

    def _find_few(self, fingerprints: Fingerprints) -> Slots:
        """Returns the same as `find`, reading both buckets at once, which takes fewer NumPy calls."""
        bases, count = self._bases(fingerprints), fingerprints.size
        both = np.empty((count, 2), np.int64)
        both[:, 0] = bases + (fingerprints & _BUCKET_MASK).view(np.int64)
        both[:, 1] = _second_buckets(fingerprints, bases)
        buckets = both.ravel()
        keys = self._keys.take(buckets, axis=0, mode="clip").reshape(count, 2 * _BUCKET_SLOTS)
        hits = (keys == fingerprints[:, None]).ravel().nonzero()[0]
        slots: Slots = np.full(count, -1, np.int64)
        # Where both buckets are one, the block is hit twice; either will do.
        slots[hits >> 4] = (buckets[hits >> 3] << 3) + (hits & 7)
        return slots

    def _bases(self, fingerprints: Fingerprints) -> Slots:
        """Returns the first bucket of each block's segment."""
        return self._directory.take((fingerprints >> np.uint64(64 - self._bits)).view(np.int64), mode="clip")

    def _look_first(self, fingerprints: Fingerprints) -> tuple[Slots, Slots]:
        bases = self._bases(fingerprints)
        return bases, self._look(fingerprints, bases + (fingerprints & _BUCKET_MASK).view(np.int64))

    def _look_second(self, fingerprints: Fingerprints, bases: Slots) -> Slots:
        return self._look(fingerprints, _second_buckets(fingerprints, bases))

    def _look(self, fingerprints: Fingerprints, buckets: Slots) -> Slots:
        # mode="clip" saves NumPy a second pass over the indices; none is out of range.
        hits = np.packbits(self._keys.take(buckets, axis=0, mode="clip") == fingerprints[:, None], bitorder="little")
        slots: Slots = np.where(hits, (buckets << 3) + _NTH_SET[0].take(hits), -1)
        return slots

    def _put(self, fingerprints: Fingerprints, lines: LineNumbers) -> NDArray[np.int64]:
        """Puts each block into one of its buckets; returns the indices of those that do not fit."""
        left = self._take_slots(fingerprints, lines, fingerprints)
        if left.size:
            rest = fingerprints[left]
            left = left[self._take_slots(rest, lines[left], rest >> _SECOND_SHIFT)]
        return left

    def _take_slots(
        self, fingerprints: Fingerprints, lines: LineNumbers, bucket_bits: Fingerprints
    ) -> NDArray[np.int64]:
        """Puts each block into the bucket that the lowest bits name, if they fit; returns the sorted indices of the
        others."""
        bases = self._bases(fingerprints)
        in_segment = (bucket_bits & _BUCKET_MASK).view(np.int64)
        buckets = bases + in_segment
        segments = np.zeros(bases.size, np.int64)  # numbered in order
        np.not_equal(bases[1:], bases[:-1], out=segments[1:], casting="unsafe")
        np.cumsum(segments, out=segments)
        if segments[-1] < _SEGMENT_BUCKETS:  # numpy sorts 16 bits by counting
            order = np.argsort(((segments << _BUCKETS_BITS) + in_segment).astype(np.uint16), kind="stable")
        else:
            order = np.argsort(buckets)
        chosen = buckets[order]
        free = np.packbits(self._keys.take(chosen, axis=0, mode="clip") == 0, bitorder="little")
        nth = _NTH_SET[np.minimum(rank_in_runs(chosen), _BUCKET_SLOTS), free]
        rows = (nth >= 0).nonzero()[0]
        slots, blocks = (chosen[rows] << 3) + nth[rows], order[rows]
        self._keys.reshape(-1)[slots] = fingerprints[blocks]
        self._line_at[slots] = lines[blocks]
        add_at(self._fill, slots >> _SEGMENT_SLOTS_BITS, 1)
        if rows.size == order.size:
            return _NONE
        is_left = np.ones(order.size, np.bool_)
        is_left[blocks] = False
        return is_left.nonzero()[0]

    def _split_full(self, fingerprints: Fingerprints) -> bool:
        """Splits the segments that would be too full. Returns whether there were any."""
        moved = False
        while True:
            segments, coming = _runs(self._bases(fingerprints) >> _BUCKETS_BITS)
            full = segments[self._fill[segments] + coming > _MAX_FILL]
            if not full.size:
                return moved
            moved = True
            self._split(full)

    def _split(self, segments: NDArray[np.int64]) -> None:
        """Moves the blocks of segments, each once, whose next bit is set to the same slots of new ones."""
        for at in range(0, segments.size, _SPLIT_AT_ONCE):
            some = segments[at : at + _SPLIT_AT_ONCE]
            others = self._new_segments(some.size)
            bits = np.array([self._local_bits[segment] for segment in some.tolist()], np.uint64)
            all_keys, all_lines = self._keys.reshape(-1, SEGMENT_SLOTS), self._line_at.reshape(-1, SEGMENT_SLOTS)
            keys = all_keys[some]
            moving = (keys >> (np.uint64(63) - bits)[:, None]) & np.uint64(1)
            np.multiply(keys, moving, out=all_keys[others])
            all_keys[some] = keys - all_keys[others]
            all_lines[others] = all_lines[some]
            num_moved = moving.sum(axis=1).astype(np.int64)
            self._fill[some] -= num_moved
            self._fill[others] = num_moved
            for segment, other in zip(some.tolist(), range(others.start, others.stop), strict=True):
                self._enter(segment, other)

    def _enter(self, segment: int, other: int) -> None:
        """Updates the directory after a segment was split."""
        bits = self._local_bits[segment]
        if bits == self._bits:
            self._directory = np.repeat(self._directory, 2)
            self._bits += 1
        prefix = self._prefixes[segment] << 1
        self._prefixes[segment] = prefix
        self._prefixes.append(prefix + 1)
        self._local_bits[segment] = bits + 1
        self._local_bits.append(bits + 1)
        reach = self._bits - bits - 1
        self._directory[(prefix + 1) << reach : (prefix + 2) << reach] = other << _BUCKETS_BITS

    def _new_segments(self, count: int) -> slice:
        first = self._num_segments
        self._num_segments += count
        while self._num_segments > self._fill.size:
            self._keys, self._line_at = doubled(self._keys), doubled(self._line_at)
            self._fill = doubled(self._fill)
        return slice(first, self._num_segments)


def rank_in_runs(values: NDArray[np.generic]) -> NDArray[np.int64]:
    """Returns the number of equal elements right before each, 0 where a run begins."""
    numbers = np.arange(values.size)
    begins = np.zeros(values.size, np.int64)
    changes = (values[1:] != values[:-1]).nonzero()[0] + 1
    begins[changes] = changes
    return numbers - np.maximum.accumulate(begins) if values.size else numbers


def _runs(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the values of runs of equal elements, and the runs' lengths."""
    edges = (values[1:] != values[:-1]).nonzero()[0] + 1
    begins = np.concatenate((_ZERO, edges))
    return values[begins], np.concatenate((edges, [values.size])) - begins


def add_at(counts: NDArray[np.int64], indices: NDArray[np.int64], amount: int) -> None:
    """Adds to counts, once for each occurrence of an index."""
    if indices.size < _FEW:
        np.add.at(counts, indices, amount)
        return
    sums = np.bincount(indices)
    counts[: sums.size] += amount * sums


def _second_buckets(fingerprints: Fingerprints, bases: Slots) -> Slots:
    return bases + ((fingerprints >> _SECOND_SHIFT) & _BUCKET_MASK).view(np.int64)
