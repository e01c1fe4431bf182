"""Slots of host memory for copies of cached blocks: what is in each, and which is evicted first. Copies nothing.

state    findable  leaves by
empty    no        begin (to filling)
filling  no        landed (to kept), fail (to empty), void (to void)
kept     yes       begin of another (evicted, least recently used first; never while pinned), reset (to empty or void)
void     no        the end of its copy: landed, fail or the last unpin (to empty)

A slot is void while a copy may still write or read it, though its contents are not needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockHash, HostSlot, Tier
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent, events_of


class Begun(NamedTuple):
    """A slot for a copy, and the block that was evicted from it."""

    slot: HostSlot
    evicted: BlockHash | None


class HostTier:
    """Tracks the slots. Every method except audit is O(1) a slot."""

    def __init__(self, num_slots: int, num_groups: int = 1) -> None:
        self.num_slots = num_slots
        self._kept: OrderedDict[BlockHash, HostSlot] = OrderedDict()  # the next to evict first
        self._filling: dict[BlockHash, HostSlot] = {}
        self._hash_of: dict[HostSlot, BlockHash] = {}  # of the slots that are being filled
        self._void: set[HostSlot] = set()
        self._pins: dict[HostSlot, int] = {}  # number of restores that read the slot
        self._num_used = 0  # slots from this one on were never used
        self._empty: list[HostSlot] = []  # slots before it that are empty
        self._events = events_of(Tier.HOST, num_groups)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Returns whether the block is here, or being copied."""
        return block_hash in self._kept or block_hash in self._filling

    @property
    def num_kept(self) -> int:
        """Blocks that are findable."""
        return len(self._kept)

    def begin(self, block_hash: BlockHash) -> Begun | None:
        """Returns a slot for a copy of a block. None: copies are in progress in all slots."""
        assert block_hash not in self, f"block {block_hash.hex()} is in host memory already"
        evicted: BlockHash | None = None
        if self._empty:
            slot = self._empty.pop()
        elif self._num_used < self.num_slots:
            slot = HostSlot(self._num_used)
            self._num_used += 1
        else:
            evicted = next((known for known, slot in self._kept.items() if slot not in self._pins), None)
            if evicted is None:
                return None
            slot = self._kept.pop(evicted)
            self._events.removed(evicted)
        self._filling[block_hash] = slot
        self._hash_of[slot] = block_hash
        return Begun(slot, evicted)

    def landed(self, slot: HostSlot) -> bool:
        """Records that the copy into the slot is complete. False: it is void."""
        block_hash = self._end_filling(slot)
        if block_hash is None:
            return False
        self._kept[block_hash] = slot
        self._events.stored(block_hash)
        return True

    def fail(self, slot: HostSlot) -> BlockHash | None:
        """Records that the copy into the slot has failed. Returns the block that is therefore not here."""
        block_hash = self._end_filling(slot)
        if block_hash is not None:
            self._empty.append(slot)
        return block_hash

    def void(self, slot: HostSlot) -> BlockHash | None:
        """Records that a block may change while it is copied. Returns the block that is therefore not here."""
        block_hash = self._end_filling(slot) if slot not in self._void else None
        self._void.add(slot)
        return block_hash

    def lookup(self, block_hashes: Sequence[BlockHash]) -> list[HostSlot]:
        """Returns the slots of the first of these blocks, up to one that is not here."""
        slots: list[HostSlot] = []
        for block_hash in block_hashes:
            slot = self._kept.get(block_hash)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def touch(self, block_hash: BlockHash) -> None:
        """Records that the block was used: it is evicted last. Ignores blocks that are not here."""
        if block_hash in self._kept:
            self._kept.move_to_end(block_hash)

    def pin(self, slots: Sequence[HostSlot]) -> None:
        """Records that a restore reads slots that lookup found."""
        for slot in slots:
            self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slots: Sequence[HostSlot]) -> None:
        """Records that the restore has ended."""
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] == 0:
                del self._pins[slot]
                if slot in self._void:
                    self._void.remove(slot)
                    self._empty.append(slot)

    def reset(self) -> None:
        """Forgets the contents of every slot, and pending events. Copies in progress continue, and are void."""
        self._void.update(self._filling.values())
        self._filling.clear()
        self._hash_of.clear()
        for slot in self._kept.values():
            if slot in self._pins:
                self._void.add(slot)
            else:
                self._empty.append(slot)
        self._kept.clear()
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
        slots = [*self._empty, *self._kept.values(), *self._filling.values(), *self._void]
        if len(set(slots)) != len(slots) or sorted(slots) != list(range(self._num_used)):
            raise DataLoss(
                f"{len(set(slots))} of {self._num_used} used host slots are accounted for {len(slots)} times"
            )
        if {slot: block_hash for block_hash, slot in self._filling.items()} != self._hash_of:
            raise DataLoss("the host slots that are being filled and their blocks differ")
        if self._kept.keys() & self._filling.keys():
            raise DataLoss("a block is in host memory and also being copied there")
        counts: dict[HostSlot, int] = {}
        for restore in reading:
            for slot in restore:
                counts[slot] = counts.get(slot, 0) + 1
        if counts != self._pins:
            raise DataLoss(f"{len(self._pins)} host slots are pinned, the restores read {len(counts)}")
        if stray := counts.keys() - set(self._kept.values()) - self._void:
            raise DataLoss(f"a restore reads host slot {min(stray)}, which holds no block")

    def _end_filling(self, slot: HostSlot) -> BlockHash | None:
        if slot in self._void:
            self._void.remove(slot)
            self._empty.append(slot)
            return None
        block_hash = self._hash_of.pop(slot)
        del self._filling[block_hash]
        return block_hash
