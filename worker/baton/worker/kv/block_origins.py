"""The tokens and the parent of blocks that became findable, until the events of their storing are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.worker.core import BlockHash


class BlockOrigin(NamedTuple):
    """What one block holds."""

    parent: BlockHash | None  # the block before it; None: it is the first
    token_ids: Sequence[int]


class BlockOrigins:
    """Origins by hash, since the last `take`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._origins: dict[BlockHash, BlockOrigin] = {}

    def note(self, block_hashes: Sequence[BlockHash], start: int, stop: int, token_ids: Sequence[int]) -> None:
        """Records blocks [start, stop) of a chain, whose first tokens are `token_ids`."""
        size = self._block_size
        for number in range(start, stop):
            parent = block_hashes[number - 1] if number else None
            tokens = list(token_ids[number * size : (number + 1) * size])
            self._origins[block_hashes[number]] = BlockOrigin(parent, tokens)

    def take(self) -> dict[BlockHash, BlockOrigin]:
        """Returns the origins since the last call."""
        origins, self._origins = self._origins, {}
        return origins
