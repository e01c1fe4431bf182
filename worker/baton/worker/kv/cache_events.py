"""Changes of what a cache holds, in order, for the index. Knows no blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton.worker.core import BlockHash, Tier
from baton.worker.kv.group_keys import split_key


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """Blocks that became findable."""

    block_hashes: bytes  # 16 bytes a block
    tier: Tier = Tier.DEVICE
    groups: tuple[int, ...] = ()  # that hold them now, and no others do; empty: all


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """Blocks that were removed from this tier."""

    block_hashes: bytes  # 16 bytes a block
    tier: Tier = Tier.DEVICE


class CacheEvents:
    """The changes of one tier since they were last taken, for a cache of one group. Equal neighbours share an event."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._changes: list[tuple[bool, tuple[int, ...], bytearray]] = []  # (stored, groups, hashes)
        self.removes = False  # some of the changes are removals

    def stored(self, *keys: BlockHash) -> None:
        """Records that blocks became findable."""
        self._record(True, (), keys)

    def removed(self, *keys: BlockHash) -> None:
        """Records that blocks are no longer findable."""
        self._record(False, (), keys)
        self.removes |= bool(keys)

    def take(self) -> list[StoredEvent | RemovedEvent]:
        """Returns the changes since the last call, in order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        self.removes = False
        return [
            StoredEvent(bytes(hashes), self._tier, groups) if stored else RemovedEvent(bytes(hashes), self._tier)
            for stored, groups, hashes in changes
        ]

    def clear(self) -> None:
        self._changes.clear()
        self.removes = False

    def by_groups(self, keys: Collection[BlockHash]) -> Mapping[tuple[int, ...], bytes]:
        """Returns the hashes of what can be found now, by the groups that hold them; (): all groups."""
        return {(): b"".join(keys)}

    def _record(self, stored: bool, groups: tuple[int, ...], block_hashes: Sequence[BlockHash]) -> None:
        if not block_hashes:
            return
        if not self._changes or self._changes[-1][:2] != (stored, groups):
            self._changes.append((stored, groups, bytearray()))
        self._changes[-1][2].extend(b"".join(block_hashes))


class GroupEvents(CacheEvents):
    """The changes of a cache of several groups: an event has the groups that hold a hash now."""

    def __init__(self, tier: Tier, num_groups: int) -> None:
        super().__init__(tier)
        self._num_groups = num_groups
        self._groups_of: dict[BlockHash, frozenset[int]] = {}

    def stored(self, *keys: BlockHash) -> None:
        """Records that blocks became findable in their groups."""
        for key in keys:
            block_hash, group = split_key(key)
            self._hold(block_hash, self._groups_of.get(block_hash, frozenset()) | {group})

    def removed(self, *keys: BlockHash) -> None:
        """Records that blocks are no longer findable in their groups."""
        for key in keys:
            block_hash, group = split_key(key)
            self._hold(block_hash, self._groups_of[block_hash] - {group})
        self.removes |= bool(keys)

    def clear(self) -> None:
        """Drops the changes, and what is findable."""
        super().clear()
        self._groups_of.clear()

    def by_groups(self, keys: Collection[BlockHash]) -> Mapping[tuple[int, ...], bytes]:
        """Returns the hashes of what can be found now, by the groups that hold them; (): all groups."""
        found: dict[tuple[int, ...], list[bytes]] = {}
        for block_hash, groups in self._groups_of.items():
            found.setdefault(self._named(groups), []).append(block_hash)
        return {groups: b"".join(hashes) for groups, hashes in found.items()}

    def _hold(self, block_hash: BlockHash, groups: frozenset[int]) -> None:
        if groups:
            self._groups_of[block_hash] = groups
        else:
            del self._groups_of[block_hash]
        self._record(bool(groups), self._named(groups), (block_hash,))

    def _named(self, groups: frozenset[int]) -> tuple[int, ...]:
        return () if len(groups) in (0, self._num_groups) else tuple(sorted(groups))


def events_of(tier: Tier, num_groups: int) -> CacheEvents:
    """Returns the record of a tier's changes."""
    return CacheEvents(tier) if num_groups == 1 else GroupEvents(tier, num_groups)
