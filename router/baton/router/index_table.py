"""Block fingerprints and one code each, in packed arrays. Knows no worker and no hash function.

An extendible hash table: the top bits of a fingerprint choose a segment through the directory, its lowest sixteen bits
name two buckets of eight places there. A block is in the first of the two, or, where that was full, in the second:
so a lookup reads at most two cache lines a block, and a removal leaves nothing behind. A full segment is split in
two by the next bit; every other one stays as it is, so that growth never stops the world.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Fingerprints: TypeAlias = NDArray[np.uint64]  # [n], never 0
Places: TypeAlias = NDArray[np.int64]  # [n], -1: not there
Codes: TypeAlias = NDArray[np.uint32]  # [n], never 0 for a block that is there

Item = TypeVar("Item", bound=np.generic)

_BUCKET_PLACES = 8  # 64 bytes of fingerprints: a cache line
_BUCKETS_BITS = 8
_SEGMENT_BUCKETS = 1 << _BUCKETS_BITS
_SEGMENT_PLACES_BITS = _BUCKETS_BITS + 3
SEGMENT_PLACES = 1 << _SEGMENT_PLACES_BITS
_MAX_FILL = int(0.78 * SEGMENT_PLACES)  # beyond, both buckets of a block are too often full
_BUCKET_MASK = np.uint64(_SEGMENT_BUCKETS - 1)
_SECOND_SHIFT = np.uint64(_BUCKETS_BITS)
_FIRST_MISSES = 64
_FEW = 1024
_ZERO = np.zeros(1, np.int64)
# 29 million blocks fit before anything is copied: a copy of all would hold up lookups.
_RESERVED_SEGMENTS = 1 << 15
# MAP_NORESERVE has a name from Python 3.13 on.
_LAZILY: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000} if sys.platform == "linux" else {}


class BlockTable:
    """Fingerprints of 64 bits, a code of 32 bits each: 12 bytes a place."""

    def __init__(self) -> None:
        self._bits = 1  # of the directory
        self._directory = np.array([0, _SEGMENT_BUCKETS], np.int64)  # first bucket of each segment
        self._num_segments = 2
        self._local_bits = [1, 1]
        self._prefixes = [0, 1]
        self._fill = _zeros((_RESERVED_SEGMENTS,), np.int64)
        self._keys = _zeros((_RESERVED_SEGMENTS * _SEGMENT_BUCKETS, _BUCKET_PLACES), np.uint64)
        self.codes = _zeros((_RESERVED_SEGMENTS * SEGMENT_PLACES,), np.uint32)  # by place; 0: free

    def __len__(self) -> int:
        """Blocks that are there."""
        return int(self._fill[: self._num_segments].sum())

    @property
    def num_places(self) -> int:
        """Places in use or free; `codes` may be longer."""
        return self._num_segments * SEGMENT_PLACES

    @property
    def num_bytes(self) -> int:
        """Memory in use; what is only reserved is not counted."""
        return self.num_places * 12 + self._directory.nbytes + self._num_segments * 8

    def find(self, fingerprints: Fingerprints) -> Places:
        """Where each block is."""
        bases, places = self._look_first(fingerprints)
        missing = (places < 0).nonzero()[0]
        if missing.size:
            places[missing] = self._look_second(fingerprints[missing], bases[missing])
        return places

    def find_prefix(self, fingerprints: Fingerprints) -> Places:
        """Where the first blocks are, up to the first that is not there."""
        bases, places = self._look_first(fingerprints)
        missing = (places < 0).nonzero()[0]
        # Of a prompt that nobody holds, a few blocks tell.
        for some in (missing[:_FIRST_MISSES], missing[_FIRST_MISSES:]):
            if some.size:
                found = self._look_second(fingerprints[some], bases[some])
                absent = (found < 0).nonzero()[0]
                if absent.size:
                    places[some] = found
                    return places[: some[absent[0]]]
                places[some] = found
        return places

    def insert(self, fingerprints: Fingerprints) -> Places:
        """Adds blocks that are not there, sorted and each once; their codes are 0 and the caller's to set at once."""
        self._make_room(fingerprints)
        moved = False
        bases = self._bases(fingerprints)
        places = self._take_places(fingerprints, bases + (fingerprints & _BUCKET_MASK).view(np.int64))
        left = (places < 0).nonzero()[0]
        if left.size:
            places[left] = self._take_places(fingerprints[left], _second_buckets(fingerprints[left], bases[left]))
            left = left[places[left] < 0]
        while left.size:
            # Both buckets are full: rare, and cured by a split.
            for base in np.unique(self._bases(fingerprints[left])).tolist():
                self._split(base >> _BUCKETS_BITS)
            moved = True
            here = fingerprints[left]
            bases = self._bases(here)
            taken = self._take_places(here, bases + (here & _BUCKET_MASK).view(np.int64))
            again = (taken < 0).nonzero()[0]
            if again.size:
                taken[again] = self._take_places(here[again], _second_buckets(here[again], bases[again]))
            left = left[taken < 0]
        return self.find(fingerprints) if moved else places

    def remove(self, places: Places) -> None:
        """Frees places, each once."""
        self._keys.reshape(-1)[places] = 0
        self.codes[places] = 0
        add_at(self._fill, places >> _SEGMENT_PLACES_BITS, -1)

    def _bases(self, fingerprints: Fingerprints) -> Places:
        """The first bucket of each block's segment."""
        return self._directory.take((fingerprints >> np.uint64(64 - self._bits)).view(np.int64), mode="clip")

    def _look_first(self, fingerprints: Fingerprints) -> tuple[Places, Places]:
        bases = self._bases(fingerprints)
        return bases, self._look(fingerprints, bases + (fingerprints & _BUCKET_MASK).view(np.int64))

    def _look_second(self, fingerprints: Fingerprints, bases: Places) -> Places:
        return self._look(fingerprints, _second_buckets(fingerprints, bases))

    def _look(self, fingerprints: Fingerprints, buckets: Places) -> Places:
        # mode="clip" spares numpy a second pass over the indices; none is out of range.
        hits: Places = (self._keys.take(buckets, axis=0, mode="clip") == fingerprints[:, None]).ravel().nonzero()[0]
        rows = hits >> 3
        if rows.size == buckets.size:
            in_order: Places = (buckets << 3) + (hits & 7)
            return in_order
        is_there = np.zeros(buckets.size, np.bool_)
        is_there[rows] = True
        places = buckets << 3
        places[is_there] += hits & 7
        places[~is_there] = -1
        return places

    def _take_places(self, fingerprints: Fingerprints, buckets: Places) -> Places:
        """Puts each block into its bucket, where there is room."""
        order = np.argsort(buckets)
        chosen = buckets[order]
        free = self._keys.take(chosen, axis=0, mode="clip") == 0
        nth_free = np.cumsum(free, axis=1, dtype=np.uint8)
        wanted = np.minimum(rank_in_runs(chosen), _BUCKET_PLACES).astype(np.uint8) + np.uint8(1)
        taken = ((nth_free == wanted[:, None]) & free).ravel().nonzero()[0]
        rows = taken >> 3
        places = np.full(buckets.size, -1, np.int64)
        places[order[rows]] = (chosen[rows] << 3) + (taken & 7)
        done = places >= 0
        self._keys.reshape(-1)[places[done]] = fingerprints[done]
        add_at(self._fill, places[done] >> _SEGMENT_PLACES_BITS, 1)
        return places

    def _make_room(self, fingerprints: Fingerprints) -> None:
        """Splits the segments that would be too full."""
        while True:
            segments, coming = _runs(self._bases(fingerprints) >> _BUCKETS_BITS)
            full = segments[self._fill[segments] + coming > _MAX_FILL]
            if not full.size:
                return
            for segment in full.tolist():
                self._split(segment)

    def _split(self, segment: int) -> None:
        """Moves the blocks of a segment whose next bit is set to the same places of a new one."""
        bits = self._local_bits[segment]
        if bits == self._bits:
            self._directory = np.repeat(self._directory, 2)
            self._bits += 1
        other = self._new_segment()
        keys, codes = self._segment(segment)
        other_keys, other_codes = self._segment(other)
        moving = (keys >> np.uint64(63 - bits)) & np.uint64(1)
        np.multiply(keys, moving, out=other_keys)
        np.multiply(codes, moving.astype(np.uint32), out=other_codes)
        keys -= other_keys
        codes -= other_codes
        num_moved = int(moving.sum())
        self._fill[segment] -= num_moved
        self._fill[other] = num_moved
        prefix = self._prefixes[segment] << 1
        self._prefixes[segment] = prefix
        self._prefixes.append(prefix + 1)
        self._local_bits[segment] = bits + 1
        self._local_bits.append(bits + 1)
        reach = self._bits - bits - 1
        self._directory[(prefix + 1) << reach : (prefix + 2) << reach] = other << _BUCKETS_BITS

    def _new_segment(self) -> int:
        segment = self._num_segments
        if segment == self._fill.size:
            self._keys = _doubled(self._keys)
            self.codes = _doubled(self.codes)
            self._fill = _doubled(self._fill)
        self._num_segments += 1
        return segment

    def _segment(self, segment: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        first = segment * _SEGMENT_BUCKETS
        keys = self._keys[first : first + _SEGMENT_BUCKETS].reshape(-1)
        return keys, self.codes[segment * SEGMENT_PLACES : (segment + 1) * SEGMENT_PLACES]


def rank_in_runs(values: NDArray[np.generic]) -> NDArray[np.int64]:
    """For each element the number of equal ones right before it: 0 where a run begins."""
    numbers = np.arange(values.size)
    begins = np.zeros(values.size, np.int64)
    changes = (values[1:] != values[:-1]).nonzero()[0] + 1
    begins[changes] = changes
    return numbers - np.maximum.accumulate(begins) if values.size else numbers


def _runs(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The values of runs of equal elements, and the runs' lengths."""
    edges = (values[1:] != values[:-1]).nonzero()[0] + 1
    begins = np.concatenate((_ZERO, edges))
    return values[begins], np.concatenate((edges, [values.size])) - begins


def add_at(counts: NDArray[np.int64], indices: NDArray[np.int64], amount: int) -> None:
    """Adds to counts, as often as each index is there."""
    if indices.size < _FEW:
        np.add.at(counts, indices, amount)
        return
    sums = np.bincount(indices)
    counts[: sums.size] += amount * sums


def _second_buckets(fingerprints: Fingerprints, bases: Places) -> Places:
    return bases + ((fingerprints >> _SECOND_SHIFT) & _BUCKET_MASK).view(np.int64)


def _zeros(shape: tuple[int, ...], dtype: type[Item]) -> NDArray[Item]:
    """An array whose memory is taken from the system only when it is written; what is never written costs nothing."""
    length = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, length, **_LAZILY)
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError):
        return np.zeros(shape, dtype)  # where address space is limited
    return np.frombuffer(memory, dtype).reshape(shape)


def _doubled(array: NDArray[Item]) -> NDArray[Item]:
    """The array with as much again, zeros, at its end."""
    grown = _zeros((2 * array.shape[0], *array.shape[1:]), array.dtype.type)
    grown[: array.shape[0]] = array
    return grown
