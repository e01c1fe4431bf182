"""Which worker holds which block, as one bit mask a block. Knows no stream and no liveness.

A worker has a slot, one bit of every mask. Dropping a worker makes its slot dead at once; the bits are cleared
afterwards in small pieces (`clean`), and only then is the slot given away again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.rpc.block_hash import HASH_BYTES
from baton.v1 import kv_pb2

_HASH = struct.Struct(f"{HASH_BYTES}s")

Tier: TypeAlias = kv_pb2.KvTier.ValueType


@dataclass(slots=True)
class _Holding:
    """One worker's entries."""

    slot: int
    epoch: int
    sequence: int
    tiers: dict[Tier, set[bytes]] = field(default_factory=dict)

    def is_elsewhere(self, block: bytes, tier: Tier) -> bool:
        return any(block in blocks for other, blocks in self.tiers.items() if other != tier)

    def __len__(self) -> int:
        return sum(map(len, list(self.tiers.values())))


class PrefixIndex:
    """All workers' blocks, for lookups of whole prompts."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}  # block -> slots of its holders
        self._holdings: dict[str, _Holding] = {}
        self._arriving: dict[str, _Holding] = {}  # snapshots whose end is still to come
        self._dying: list[_Holding] = []
        self._slots: list[str | None] = []  # worker of each slot; None: nobody's
        self._free_slots: list[int] = []
        self._live = 0  # mask of the slots that count

    def __len__(self) -> int:
        """Distinct blocks, those of dead slots included until cleaned."""
        return len(self._masks)

    @property
    def num_dying_blocks(self) -> int:
        """Entries of dropped workers that are still to be cleaned."""
        return sum(map(len, self._dying))

    @property
    def worker_ids(self) -> Sequence[str]:
        """Workers that have entries."""
        return tuple(self._holdings)

    def num_blocks(self, worker_id: str) -> int:
        """Entries of one worker, its tiers counted apart."""
        holding = self._holdings.get(worker_id)
        return len(holding) if holding is not None else 0

    def epoch(self, worker_id: str) -> int | None:
        """Of a worker's entries. None: it has none."""
        holding = self._holdings.get(worker_id)
        return holding.epoch if holding is not None else None

    def lookup(self, block_hashes: bytes) -> dict[str, int]:
        """How many of the first blocks each worker holds without a gap; workers that hold none are left out."""
        masks, alive = self._masks, self._live
        if not alive:
            return {}
        ended: list[tuple[int, int]] = []  # slots, and the depth at which they end
        depth = 0
        for depth, (block,) in enumerate(_HASH.iter_unpack(block_hashes)):
            found = masks.get(block, 0) & alive
            if found != alive:
                if depth:
                    ended.append((alive & ~found, depth))
                alive = found
                if not alive:
                    break
        else:
            ended.append((alive, len(block_hashes) // HASH_BYTES))
        slots = self._slots
        return {
            worker_id: depth
            for mask, depth in ended
            for slot in _bits(mask)
            if depth and (worker_id := slots[slot]) is not None
        }

    def apply(self, batch: kv_pb2.KvEventBatch) -> bool:
        """Takes a worker's next batch. False: it is not the next one, and the worker's entries are dropped."""
        holding = self._holdings.get(batch.worker_id)
        if holding is None or (holding.epoch, holding.sequence + 1) != (batch.epoch, batch.sequence):
            self.drop(batch.worker_id)
            return False
        for event in batch.events:
            if event.HasField("stored"):
                self._store(holding, event.stored.tier, event.stored.block_hashes)
            elif event.HasField("removed"):
                self._remove(holding, event.removed.tier, event.removed.block_hashes)
        holding.sequence = batch.sequence
        return True

    def receive(self, part: kv_pb2.KvSnapshot) -> bool:
        """Takes a part of a worker's snapshot; the last one makes it count. False: the part does not belong here."""
        if part.first:
            self._begin(part)
        arriving = self._arriving.get(part.worker_id)
        if arriving is None or (arriving.epoch, arriving.sequence) != (part.epoch, part.barrier):
            self.drop(part.worker_id)
            return False
        self._store(arriving, part.tier, part.block_hashes)
        if part.last:
            del self._arriving[part.worker_id]
            self._retire(self._holdings.pop(part.worker_id, None))
            self._holdings[part.worker_id] = arriving
            self._live |= 1 << arriving.slot
        return True

    def drop(self, worker_id: str) -> int:
        """A worker's entries count no more, from now on; returns how many they were."""
        holding = self._holdings.pop(worker_id, None)
        self._retire(holding)
        self._retire(self._arriving.pop(worker_id, None))
        return len(holding) if holding is not None else 0

    def clean(self, max_blocks: int) -> bool:
        """Clears bits of dropped workers, so many at most. False: nothing is left to clean."""
        while self._dying and max_blocks > 0:
            holding = self._dying[-1]
            max_blocks -= self._clear_some(holding, max_blocks)
            if not holding.tiers:
                self._dying.pop()
                self._free_slots.append(holding.slot)
        return bool(self._dying)

    def _begin(self, part: kv_pb2.KvSnapshot) -> None:
        known = self._holdings.get(part.worker_id)
        if known is not None and known.epoch != part.epoch:
            self._retire(self._holdings.pop(part.worker_id))
        self._retire(self._arriving.pop(part.worker_id, None))
        slot = self._take_slot(part.worker_id)
        self._arriving[part.worker_id] = _Holding(slot, part.epoch, part.barrier)

    def _take_slot(self, worker_id: str) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._slots[slot] = worker_id
            return slot
        self._slots.append(worker_id)
        return len(self._slots) - 1

    def _retire(self, holding: _Holding | None) -> None:
        if holding is not None:
            self._live &= ~(1 << holding.slot)
            self._slots[holding.slot] = None
            self._dying.append(holding)

    def _store(self, holding: _Holding, tier: Tier, block_hashes: bytes) -> None:
        masks, bit = self._masks, 1 << holding.slot
        blocks = holding.tiers.setdefault(tier, set())
        for (block,) in _HASH.iter_unpack(block_hashes):
            known = masks.get(block)
            # A block with one holder shares the slot's own integer; so do equal keys of the dict and the set.
            masks[block] = bit if known is None else known | bit
            blocks.add(block)

    def _remove(self, holding: _Holding, tier: Tier, block_hashes: bytes) -> None:
        blocks = holding.tiers.get(tier, set())
        several_tiers = len(holding.tiers) > 1
        for (block,) in _HASH.iter_unpack(block_hashes):
            if block in blocks:
                blocks.remove(block)
                if not (several_tiers and holding.is_elsewhere(block, tier)):
                    self._clear(block, 1 << holding.slot)

    def _clear(self, block: bytes, bit: int) -> None:
        rest = self._masks[block] & ~bit
        if rest:
            self._masks[block] = rest
        else:
            del self._masks[block]

    def _clear_some(self, holding: _Holding, max_blocks: int) -> int:
        tier, blocks = next(iter(holding.tiers.items()), (kv_pb2.KV_TIER_UNSPECIFIED, set()))
        bit = 1 << holding.slot
        num_cleared = min(max_blocks, len(blocks))
        for _ in range(num_cleared):
            block = blocks.pop()
            if self._masks.get(block, 0) & bit:
                self._clear(block, bit)
        if not blocks:
            holding.tiers.pop(tier, None)
        return num_cleared


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
