"""A sketch of a prompt: some or all of its block hashes, to find how many blocks it shares with another prompt."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from baton.rpc.block_hash import HASH_BYTES


class Sketch(NamedTuple):
    """Hashes of some of a prompt's blocks. They are chained: equal hashes mean that all blocks before are equal."""

    counts: Sequence[int]  # how many blocks end with each, growing
    hashes: bytes  # 16 bytes each

    @property
    def first_block(self) -> bytes:
        """The prompt's first hash, or empty."""
        return self.hashes[:HASH_BYTES]

    @property
    def last_block(self) -> bytes:
        """The prompt's last hash, or empty."""
        return self.hashes[-HASH_BYTES:]

    def common_blocks(self, block_hashes: bytes) -> int:
        """Returns the number of blocks that two prompts begin with, at least what the sketch proves."""
        counts, hashes = self.counts, self.hashes
        low, high = 0, len(counts)
        if high and counts[-1] * HASH_BYTES > len(block_hashes):
            high = bisect_right(counts, len(block_hashes) // HASH_BYTES)
        if high:  # mostly all of it
            end, own = counts[high - 1] * HASH_BYTES, high * HASH_BYTES
            if block_hashes[end - HASH_BYTES : end] == hashes[own - HASH_BYTES : own]:
                return counts[high - 1]
            high -= 1
        while low < high:
            middle = (low + high + 1) // 2
            end, own = counts[middle - 1] * HASH_BYTES, middle * HASH_BYTES
            if block_hashes[end - HASH_BYTES : end] == hashes[own - HASH_BYTES : own]:
                low = middle
            else:
                high = middle - 1
        return counts[low - 1] if low else 0

    def thinned(self, max_hashes: int) -> Sketch:
        """Keeps at most `limit` hashes, evenly spread, always with the first and the last."""
        count = len(self.counts)
        if count <= max_hashes:
            return self
        places = sorted({round(place * (count - 1) / (max_hashes - 1)) for place in range(max_hashes)})
        hashes = b"".join(self.hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES] for place in places)
        return Sketch([self.counts[place] for place in places], hashes)


def sketch_of(block_hashes: bytes) -> Sketch:
    """Keeps the whole prompt."""
    return Sketch(range(1, len(block_hashes) // HASH_BYTES + 1), block_hashes)
