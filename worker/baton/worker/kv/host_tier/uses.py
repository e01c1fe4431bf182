"""Counts how many requests have had a block, also while it is nowhere. Forgets those that were not used for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from baton.worker.core import BlockHash

_MOST = 1 << 16  # blocks


class BlockUses:
    """Uses by block, up to the number that matters."""

    def __init__(self, enough: int, most: int = _MOST) -> None:
        self._enough = enough
        self._most = most
        self._counts: OrderedDict[BlockHash, int] = OrderedDict()  # the next to forget first

    def add(self, block_hashes: Iterable[BlockHash]) -> None:
        """Counts one more request for each block."""
        counts = self._counts
        for block_hash in block_hashes:
            counts[block_hash] = min(counts.pop(block_hash, 0) + 1, self._enough)
        while len(counts) > self._most:
            counts.popitem(last=False)

    def are_enough(self, block_hash: BlockHash) -> bool:
        """Returns whether enough requests have had the block."""
        return self._counts.get(block_hash, 0) >= self._enough

    def clear(self) -> None:
        """Forgets all counts."""
        self._counts.clear()
