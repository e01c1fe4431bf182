"""What became findable in a cache and what stopped being so, in order, for the index. Knows no blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.worker.core import BlockHash, Tier


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """These blocks can be found from now on."""

    block_hashes: bytes  # 16 bytes a block
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """These blocks are gone from this tier."""

    block_hashes: bytes  # 16 bytes a block
    tier: Tier = Tier.DEVICE


class CacheEvents:
    """One tier's changes since they were last taken. Neighbours of one kind share an event."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._changes: list[tuple[bool, bytearray]] = []  # (stored, hashes)
        self.removes = False  # some of them are removals

    def stored(self, *block_hashes: BlockHash) -> None:
        """The blocks can be found."""
        self._record(True, block_hashes)

    def removed(self, *block_hashes: BlockHash) -> None:
        """The blocks cannot be found any more."""
        self._record(False, block_hashes)

    def take(self) -> list[StoredEvent | RemovedEvent]:
        """What happened since the last call, in order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        self.removes = False
        return [(StoredEvent if stored else RemovedEvent)(bytes(hashes), self._tier) for stored, hashes in changes]

    def clear(self) -> None:
        """Forgets what happened."""
        self._changes.clear()
        self.removes = False

    def _record(self, stored: bool, block_hashes: Sequence[BlockHash]) -> None:
        if not block_hashes:
            return
        if not self._changes or self._changes[-1][0] is not stored:
            self._changes.append((stored, bytearray()))
        self._changes[-1][1].extend(b"".join(block_hashes))
        self.removes |= not stored
