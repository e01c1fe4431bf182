"""Evicts the least recently used block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from baton.worker.core import BlockHash


class Lru:
    """Implements EvictionPolicy."""

    def __init__(self, num_slots: int) -> None:
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()  # the next to evict first

    def expect(self, block_hash: BlockHash) -> None:
        """Does nothing: where a block goes does not depend on the past."""

    def abandon(self, block_hash: BlockHash) -> None:
        """Does nothing, as `expect`."""

    def add(self, block_hash: BlockHash, num_slots: int) -> None:
        self._blocks[block_hash] = None

    def use(self, block_hash: BlockHash) -> None:
        self._blocks.move_to_end(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        self._blocks.move_to_end(block_hash)

    def victims(self) -> Iterator[BlockHash]:
        return iter(self._blocks)

    def evict(self, block_hash: BlockHash) -> None:
        del self._blocks[block_hash]

    def clear(self) -> None:
        self._blocks.clear()
