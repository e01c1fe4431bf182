"""Which blocks are on disk, and which leave first, so that their bytes stay bounded. Reads and writes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from baton.worker.core import BlockHash


class DiskIndex:
    """Blocks by their keys, the least recently used first. Bytes count from the moment that a write begins."""

    def __init__(self, capacity: int, sizes: Mapping[BlockHash, int]) -> None:
        """`capacity`: bytes. `sizes`: of the files that are there already, in the order of their use."""
        self.num_bytes = sum(sizes.values())
        self._capacity = capacity
        self._sizes: OrderedDict[BlockHash, int] = OrderedDict(sizes)
        self._writing: dict[BlockHash, int] = {}

    def __contains__(self, key: BlockHash) -> bool:
        """Returns whether the block can be read."""
        return key in self._sizes

    def __len__(self) -> int:
        """Blocks that can be read."""
        return len(self._sizes)

    def size(self, key: BlockHash) -> int:
        """Returns the bytes of a block that can be read."""
        return self._sizes[key]

    def shrink(self) -> list[BlockHash]:
        """Evicts what exceeds the capacity. Returns the blocks whose files are to be removed."""
        evicted = []
        while self.num_bytes > self._capacity and self._sizes:
            key, size = self._sizes.popitem(last=False)
            self.num_bytes -= size
            evicted.append(key)
        return evicted

    def begin(self, key: BlockHash, size: int) -> list[BlockHash] | None:
        """Begins a write. Returns the blocks that make room for it; None: it has no room, or is here already."""
        if key in self._sizes or key in self._writing or size + sum(self._writing.values()) > self._capacity:
            return None
        self._writing[key] = size
        self.num_bytes += size
        return self.shrink()

    def end(self, key: BlockHash, *, succeeded: bool) -> None:
        """Ends a write. Ignores those from before a reset."""
        size = self._writing.pop(key, None)
        if size is None:
            return
        if succeeded:
            self._sizes[key] = size
        else:
            self.num_bytes -= size

    def touch(self, key: BlockHash) -> None:
        """Records that the block was used. Ignores others."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def lose(self, key: BlockHash) -> bool:
        """Records that the block cannot be read. Returns whether it was here."""
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self.num_bytes -= size
        return True

    def reset(self) -> list[BlockHash]:
        """Forgets everything, also the writes in progress. Returns the blocks whose files are to be removed."""
        known = [*self._sizes, *self._writing]
        self._sizes.clear()
        self._writing.clear()
        self.num_bytes = 0
        return known
