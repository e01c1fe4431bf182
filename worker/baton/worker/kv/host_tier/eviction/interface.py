"""The order in which blocks leave host memory. Knows hashes and sizes; neither slots nor copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from baton.worker.core import BlockHash


class EvictionPolicy(Protocol):
    """Orders the findable blocks. A block is expected once its copy begins, and then either added or abandoned."""

    def expect(self, block_hash: BlockHash) -> None:
        """Records that a copy of the block begins. Call before `victims` for its slots."""

    def abandon(self, block_hash: BlockHash) -> None:
        """Records that an expected block is not added."""

    def add(self, block_hash: BlockHash, num_slots: int) -> None:
        """Records that an expected block is findable."""

    def use(self, block_hash: BlockHash) -> None:
        """Records that a request has a findable block."""

    def touch(self, block_hash: BlockHash) -> None:
        """Records that the device has evicted a findable block: only host memory still has it."""

    def victims(self) -> Iterator[BlockHash]:
        """Yields all findable blocks for the expected one, the next to evict first. Nothing changes meanwhile."""

    def evict(self, block_hash: BlockHash) -> None:
        """Records that a findable block left for another."""

    def clear(self) -> None:
        """Forgets all blocks."""
