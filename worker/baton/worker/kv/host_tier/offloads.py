"""Which cached blocks are copied to host memory, and when. Sees every cached block come and go; copies nothing.

Blocks are copied ahead of their eviction, so that evicting costs nothing: the coldest first, until so many blocks can
be had that lose nothing (`target`). A block that goes before its copy began is copied at the last moment, ahead of the
step that overwrites it. Copies out are ordered with steps, and with nothing else: where a block goes to somebody who
writes it out of that order (a peer, a restore), a copy under way is void, and none begins.
"""

from __future__ import annotations

from collections import OrderedDict

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockHash, BlockId, HostSlot
from baton.worker.kv.host_tier.slots import HostTier

# What is copied ahead of time takes this part of the room in one step: most of it is for what must be copied now, and
# reading many blocks at once would show between two tokens.
_STEPS_TO_FILL = 8


class Offloads:
    """Cached blocks that nobody holds: `clean` with a copy in host memory or on its way, or `dirty`."""

    def __init__(self, tier: HostTier, target: int) -> None:
        self.tier = tier
        self.room = 0  # blocks that the executor can copy out now without waiting; kept by who asks it
        self.num_dropped = 0  # blocks that went without a copy
        self._target = target
        self._dirty: OrderedDict[BlockId, BlockHash] = OrderedDict()  # the next to evict first
        self._clean: dict[BlockHash, BlockId] = {}
        self._begun: list[tuple[BlockId, HostSlot]] = []
        self._block_of: dict[HostSlot, BlockId] = {}  # of copies that have not landed
        self._slot_of: dict[BlockId, HostSlot] = {}  # the last one, where a block has several

    def cached(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """Nobody holds the block any more; it can be found."""
        if block_hash in self.tier:
            self._clean[block_hash] = block_id
        else:
            self._dirty[block_id] = block_hash

    def held(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """Somebody holds the block again."""
        if self._clean.pop(block_hash, None) is None:
            del self._dirty[block_id]

    def evicted(self, block_id: BlockId, block_hash: BlockHash, in_order: bool) -> None:
        """The block goes to a new holder, who writes it in the order of steps, or not."""
        if self._clean.pop(block_hash, None) is not None:
            self.tier.touch(block_hash)
            return
        del self._dirty[block_id]
        if not (in_order and self._begin(block_id, block_hash)):
            self.num_dropped += 1

    def overwritten(self, block_id: BlockId) -> None:
        """The block's new holder does not write it in the order of steps: a copy under way may come to nothing."""
        slot = self._slot_of.get(block_id)
        block_hash = None if slot is None else self.tier.void(slot)
        if block_hash is not None:
            self.num_dropped += 1
            self._lose(block_hash)

    def take(self, num_empty: int) -> list[tuple[BlockId, HostSlot]]:
        """The copies to start now, ahead of the next step."""
        for _ in range(-(-self.room // _STEPS_TO_FILL)):
            if not self._dirty or num_empty + len(self._clean) >= self._target:
                break
            block_id, block_hash = next(iter(self._dirty.items()))
            if not self._begin(block_id, block_hash):
                break
            del self._dirty[block_id]
            self._clean[block_hash] = block_id
        begun, self._begun = self._begun, []
        return begun

    def landed(self, slot: HostSlot) -> bool:
        """The copy into the slot is complete. False: it was for nothing."""
        self._end_copy(slot)
        return self.tier.landed(slot)

    def failed(self, slot: HostSlot) -> None:
        """The copy into the slot will never be complete."""
        self._end_copy(slot)
        self._lose(self.tier.fail(slot))

    def reset(self) -> None:
        """Nothing is cached any more, here and in host memory. Copies that were begun go on."""
        self._dirty.clear()
        self._clean.clear()
        self.tier.reset()

    def audit(self, cached: dict[BlockId, BlockHash]) -> None:
        """Raises DataLoss unless exactly these blocks are clean or dirty, and each rightly so."""
        known = {**self._dirty, **{block_id: block_hash for block_hash, block_id in self._clean.items()}}
        if known != cached or len(known) != len(self._dirty) + len(self._clean):
            raise DataLoss(f"{len(cached)} blocks are cached, {len(self._dirty)} dirty, {len(self._clean)} clean")
        if any(block_hash in self.tier for block_hash in self._dirty.values()):
            raise DataLoss("a block in host memory counts as dirty")
        if not all(block_hash in self.tier for block_hash in self._clean):
            raise DataLoss("a block that is not in host memory counts as clean")

    def _begin(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        begun = self.tier.begin(block_hash) if self.room > 0 else None
        if begun is None:
            return False
        self.room -= 1
        self._lose(begun.evicted)
        self._begun.append((block_id, begun.slot))
        self._block_of[begun.slot] = block_id
        self._slot_of[block_id] = begun.slot
        return True

    def _end_copy(self, slot: HostSlot) -> None:
        block_id = self._block_of.pop(slot)
        if self._slot_of.get(block_id) == slot:
            del self._slot_of[block_id]

    def _lose(self, block_hash: BlockHash | None) -> None:
        """The block is not in host memory any more."""
        block_id = None if block_hash is None else self._clean.pop(block_hash, None)
        if block_id is not None and block_hash is not None:
            self._dirty[block_id] = block_hash
            self._dirty.move_to_end(block_id, last=False)  # what was copied was among the coldest
