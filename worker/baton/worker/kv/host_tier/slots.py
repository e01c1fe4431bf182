"""Slots of host memory for copies of cached blocks: what is in each, and which is evicted first. Copies nothing.

state    findable  leaves by
empty    no        begin (to filling)
filling  no        landed (to kept), fail (to empty), void (to void)
kept     yes       begin of another (evicted, in the policy's order; never while pinned), reset (to empty or void)
void     no        the end of its copy: landed, fail or the last unpin (to empty)

A slot is void while a copy may still write or read it, though its contents are not needed.

A state of a recurrent layer takes several slots, one for each of its blocks. They are kept and evicted together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockHash, HostSlot, Tier
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent, events_of
from baton.worker.kv.host_tier.eviction.interface import EvictionPolicy
from baton.worker.kv.host_tier.eviction.lru import Lru


class Begun(NamedTuple):
    """The slots for a copy, and the blocks that were evicted from them."""

    slots: tuple[HostSlot, ...]
    evicted: list[BlockHash]


class HostTier:
    """Tracks the slots. Every method except audit is O(1) a slot."""

    def __init__(self, num_slots: int, num_groups: int = 1, policy: EvictionPolicy | None = None) -> None:
        """`policy`: None evicts the least recently used block."""
        self.num_slots = num_slots
        self._policy = policy or Lru(num_slots)
        self._kept: dict[BlockHash, tuple[HostSlot, ...]] = {}
        self._filling: dict[BlockHash, tuple[HostSlot, ...]] = {}
        self._hash_of: dict[HostSlot, BlockHash] = {}  # of the slots of these that no copy has filled yet
        self._void: set[HostSlot] = set()
        self._pins: dict[HostSlot, int] = {}  # number of restores and writes to disk that read the slot
        self._num_used = 0  # slots from this one on were never used
        self._empty: list[HostSlot] = []  # slots before it that are empty
        self.on_kept: Callable[[BlockHash], None] | None = None  # called with each block that becomes findable
        self._events = events_of(Tier.HOST, num_groups)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Returns whether the block is here, or being copied."""
        return block_hash in self._kept or block_hash in self._filling

    @property
    def num_kept(self) -> int:
        """Blocks that are findable; a state counts as one."""
        return len(self._kept)

    @property
    def num_kept_slots(self) -> int:
        """Slots that the findable blocks fill."""
        return self._num_used - len(self._empty) - len(self._void) - len(self._hash_of)

    def begin(self, block_hash: BlockHash, count: int = 1) -> Begun | None:
        """Returns `count` slots for a copy of a block. None: copies are in progress in too many slots."""
        assert block_hash not in self, f"block {block_hash.hex()} is in host memory already"
        self._policy.expect(block_hash)
        evicted = self._evictable(count - len(self._empty) - (self.num_slots - self._num_used))
        if evicted is None:
            self._policy.abandon(block_hash)
            return None
        for known in evicted:
            self._empty += self._kept.pop(known)
            self._policy.evict(known)
            self._events.removed(known)
        slots = tuple(self._take_slot() for _ in range(count))
        self._filling[block_hash] = slots
        self._hash_of.update(dict.fromkeys(slots, block_hash))
        return Begun(slots, evicted)

    def landed(self, slot: HostSlot) -> bool:
        """Records that the copy into the slot is complete. False: it is void.

        The block is findable when all its slots have landed.
        """
        if slot in self._void:
            self._empty_void(slot)
            return False
        block_hash = self._hash_of.pop(slot)
        slots = self._filling[block_hash]
        if self._hash_of.keys().isdisjoint(slots):
            self._kept[block_hash] = self._filling.pop(block_hash)
            self._policy.add(block_hash, len(slots))
            if self.on_kept is not None:
                self.on_kept(block_hash)
            self._events.stored(block_hash)
        return True

    def fail(self, slot: HostSlot) -> BlockHash | None:
        """Records that the copy into the slot has failed. Returns the block that is therefore not here."""
        block_hash = None if slot in self._void else self._abandon(self._hash_of[slot])
        self._empty_void(slot)
        return block_hash

    def void(self, slot: HostSlot) -> BlockHash | None:
        """Records that a block may change while it is copied. Returns the block that is therefore not here."""
        return None if slot in self._void else self._abandon(self._hash_of[slot])

    def lookup(self, block_hashes: Sequence[BlockHash]) -> list[HostSlot]:
        """Returns the slots of the first of these blocks, up to one that is not here."""
        slots: list[HostSlot] = []
        for block_hash in block_hashes:
            found = self._kept.get(block_hash)
            if found is None:
                break
            slots += found
        return slots

    def use(self, block_hash: BlockHash) -> None:
        """Records that a request has the block, here or on the device. Ignores blocks that are not findable here."""
        if block_hash in self._kept:
            self._policy.use(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        """Records that the device has evicted the block. Ignores blocks that are not findable here."""
        if block_hash in self._kept:
            self._policy.touch(block_hash)

    def pin(self, slots: Sequence[HostSlot]) -> None:
        """Records that a restore, or a write to disk, reads slots that lookup found."""
        for slot in slots:
            self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slots: Sequence[HostSlot]) -> None:
        """Records that this has ended."""
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] == 0:
                del self._pins[slot]
                if slot in self._void:
                    self._empty_void(slot)

    def reset(self) -> None:
        """Forgets the contents of every slot, and pending events. Copies in progress continue, and are void."""
        for block_hash in list(self._filling):
            self._abandon(block_hash)
        for slot in chain.from_iterable(self._kept.values()):
            if slot in self._pins:
                self._void.add(slot)
            else:
                self._empty.append(slot)
        self._kept.clear()
        self._policy.clear()
        self._events.clear()

    def take_events(self) -> list[StoredEvent | RemovedEvent]:
        """Returns the changes of what is findable since the last call, in order."""
        return self._events.take()

    def cached_hashes(self) -> bytes:
        """Returns the hashes of everything findable in some group, 16 bytes a block."""
        return b"".join(self.cached_by_groups().values())

    def cached_by_groups(self) -> Mapping[tuple[int, ...], bytes]:
        """Returns the hashes of everything findable, 16 bytes a block, by the groups that hold it; (): all groups."""
        return self._events.by_groups(self._kept.keys())

    def audit(self, reading: Sequence[Sequence[HostSlot]]) -> None:
        """Raises DataLoss if the slots are inconsistent, or differ from those that restores read."""
        kept, filling = (list(chain.from_iterable(held.values())) for held in (self._kept, self._filling))
        slots = [*self._empty, *kept, *filling, *self._void]
        if len(set(slots)) != len(slots) or sorted(slots) != list(range(self._num_used)):
            raise DataLoss(
                f"{len(set(slots))} of {self._num_used} used host slots are accounted for {len(slots)} times"
            )
        if {slot: known for known, held in self._filling.items() for slot in held} != self._hash_of:
            raise DataLoss("the host slots that are being filled and their blocks differ")
        if self._kept.keys() & self._filling.keys():
            raise DataLoss("a block is in host memory and also being copied there")
        counts: dict[HostSlot, int] = {}
        for restore in reading:
            for slot in restore:
                counts[slot] = counts.get(slot, 0) + 1
        if counts != self._pins:
            raise DataLoss(f"{len(self._pins)} host slots are pinned, the restores read {len(counts)}")
        if stray := counts.keys() - set(kept) - self._void:
            raise DataLoss(f"a restore reads host slot {min(stray)}, which holds no block")

    def _evictable(self, count: int) -> list[BlockHash] | None:
        """Returns the next blocks to evict, in at least `count` slots. None: restores read too many of them."""
        found: list[BlockHash] = []
        if count <= 0:
            return found
        for known in self._policy.victims():
            slots = self._kept[known]
            if slots[0] not in self._pins:
                found.append(known)
                count -= len(slots)
                if count <= 0:
                    return found
        return None

    def _take_slot(self) -> HostSlot:
        if self._empty:
            return self._empty.pop()
        self._num_used += 1
        return HostSlot(self._num_used - 1)

    def _abandon(self, block_hash: BlockHash) -> BlockHash:
        """Ends a copy that is useless. Its slots are void until what is in progress there has ended."""
        self._policy.abandon(block_hash)
        for slot in self._filling.pop(block_hash):
            if self._hash_of.pop(slot, None) is None:
                self._empty.append(slot)
            else:
                self._void.add(slot)
        return block_hash

    def _empty_void(self, slot: HostSlot) -> None:
        self._void.remove(slot)
        self._empty.append(slot)
