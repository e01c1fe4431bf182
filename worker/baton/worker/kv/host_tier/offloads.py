"""Decides which cached blocks are copied to host memory, and when. Is notified of every change; copies nothing.

Blocks are copied before their eviction, so that an eviction costs nothing: the coldest first, until `target` blocks can
be evicted without loss. A block that is evicted before its copy began is copied at the last moment, before the step
that overwrites it. Copies to the host are ordered only with steps: if a block goes to a holder that writes it outside
that order (a peer, a restore), a copy in progress is void, and none begins.

A state of a recurrent layer takes several blocks, which are copied together; it is known by the first of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockHash, BlockId, HostSlot
from baton.worker.kv.host_tier.slots import HostTier
from baton.worker.kv.host_tier.uses import BlockUses

# Early copies use this part of a step's capacity: most of it is for copies that cannot wait, and reading many blocks
# at once would delay the next token.
_STEPS_TO_FILL = 8


class Offloads:
    """Cached blocks that are not held:

    `clean` ones have a copy in host memory, or one in progress; `rare` ones get none, because fewer than `min_uses`
    requests have had them, or because none is expected to continue there; others are `dirty`.
    """

    def __init__(self, tier: HostTier, target: int, min_uses: int = 1) -> None:
        self.tier = tier
        self.capacity = 0  # blocks that the executor can copy now without waiting; set by the caller of `take`
        self.num_dropped = 0  # blocks evicted without a copy, which should have one
        self._target = target
        self._dirty: OrderedDict[BlockId, BlockHash] = OrderedDict()  # the next to evict first
        self._clean: dict[BlockHash, BlockId] = {}
        self._rare: dict[BlockId, BlockHash] = {}
        self._others: dict[BlockId, Sequence[BlockId]] = {}  # further blocks of those that are states
        self._num_clean = 0  # blocks of all that are clean
        self._uses = BlockUses(min_uses) if min_uses > 1 else None
        self._begun: list[tuple[BlockId, HostSlot]] = []
        self._block_of: dict[HostSlot, BlockId] = {}  # of copies that have not landed
        self._slot_of: dict[BlockId, HostSlot] = {}  # the last one, if a block has several

    def used(self, block_hashes: Iterable[BlockHash]) -> None:
        """Records that a request has these blocks: it computed, received or found them."""
        if self._uses is not None:
            self._uses.add(block_hashes)

    def cached(
        self, block_id: BlockId, block_hash: BlockHash, others: Sequence[BlockId] = (), *, expected: bool = True
    ) -> None:
        """Records that a findable block is no longer held. `others`: further blocks of a state.

        `expected`: a request may continue behind it.
        """
        if others:
            self._others[block_id] = others
        if block_hash in self.tier:
            self._add_clean(block_id, block_hash)
        elif expected and (self._uses is None or self._uses.are_enough(block_hash)):
            self._dirty[block_id] = block_hash
        else:
            self._rare[block_id] = block_hash

    def held(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """Records that a block is held again."""
        if self._pop_clean(block_hash) is not None:
            self.tier.use(block_hash)
        elif self._rare.pop(block_id, None) is None:
            del self._dirty[block_id]
        self._others.pop(block_id, None)

    def evicted(self, block_id: BlockId, block_hash: BlockHash, in_order: bool) -> None:
        """Records that a block has a new holder. `in_order`: only steps will write it."""
        if self._pop_clean(block_hash) is not None:
            self.tier.touch(block_hash)
        elif self._rare.pop(block_id, None) is None:
            del self._dirty[block_id]
            if not (in_order and self._begin(block_id, block_hash)):
                self.num_dropped += len(self._blocks(block_id))
        self._others.pop(block_id, None)

    def overwritten(self, block_id: BlockId) -> None:
        """Records that the new holder writes the block out of step order: a copy in progress may be void."""
        slot = self._slot_of.get(block_id)
        block_hash = None if slot is None else self.tier.void(slot)
        if block_hash is not None:
            self.num_dropped += 1
            self._lose(block_hash)

    def take(self, num_empty: int) -> list[tuple[BlockId, HostSlot]]:
        """Returns the copies to start now, before the next step."""
        urgent = self.capacity - -(-self.capacity // _STEPS_TO_FILL)
        while self._dirty and self.capacity > urgent and num_empty + self._num_clean < self._target:
            block_id, block_hash = next(iter(self._dirty.items()))
            if not self._begin(block_id, block_hash):
                break
            del self._dirty[block_id]
            self._add_clean(block_id, block_hash)
        begun, self._begun = self._begun, []
        return begun

    def load(self, block_hash: BlockHash, num_slots: int) -> tuple[HostSlot, ...] | None:
        """Returns slots for a block that neither the device nor host memory has. None: too many are in use."""
        begun = self.tier.begin(block_hash, num_slots)
        if begun is None:
            return None
        for evicted in begun.evicted:
            self._lose(evicted)
        return begun.slots

    def load_failed(self, slots: Sequence[HostSlot]) -> None:
        """Records that such slots were not filled."""
        for slot in slots:
            self._lose(self.tier.fail(slot))

    def landed(self, slot: HostSlot) -> bool:
        """Records that the copy into the slot is complete: a state's is when all its are. False: it was void."""
        self._end_copy(slot)
        return self.tier.landed(slot)

    def failed(self, slot: HostSlot) -> None:
        """Records that the copy into the slot has failed."""
        self._end_copy(slot)
        self._lose(self.tier.fail(slot))

    def reset(self) -> None:
        """Forgets all cached blocks, here and in host memory. Copies in progress continue."""
        self._dirty.clear()
        self._clean.clear()
        self._rare.clear()
        self._others.clear()
        self._num_clean = 0
        if self._uses is not None:
            self._uses.clear()
        self.tier.reset()

    def audit(self, cached: Mapping[BlockId, BlockHash], others: Mapping[BlockId, Sequence[BlockId]]) -> None:
        """Raises DataLoss unless exactly these blocks, and states, are clean, dirty or rare, correctly."""
        dirty, clean, rare = self._dirty, self._clean, self._rare
        known = {**dirty, **rare, **{block_id: block_hash for block_hash, block_id in clean.items()}}
        if known != cached or len(known) != len(dirty) + len(clean) + len(rare):
            raise DataLoss(f"{len(cached)} blocks are cached, {len(dirty)} dirty, {len(clean)} clean, {len(rare)} rare")
        if any(block_hash in self.tier for block_hash in (*dirty.values(), *rare.values())):
            raise DataLoss("a block in host memory counts as dirty or rare")
        if not all(block_hash in self.tier for block_hash in self._clean):
            raise DataLoss("a block that is not in host memory counts as clean")
        num_clean = sum(len(self._blocks(block_id)) for block_id in clean.values())
        if self._others != others or num_clean != self._num_clean:
            raise DataLoss(f"{len(others)} states are cached, {num_clean} blocks are clean; {self._num_clean} count so")

    def _begin(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        block_ids = self._blocks(block_id)
        begun = self.tier.begin(block_hash, len(block_ids)) if self.capacity >= len(block_ids) else None
        if begun is None:
            return False
        self.capacity -= len(block_ids)
        for evicted in begun.evicted:
            self._lose(evicted)
        self._begun += zip(block_ids, begun.slots, strict=True)
        self._block_of.update(zip(begun.slots, block_ids, strict=True))
        self._slot_of.update(zip(block_ids, begun.slots, strict=True))
        return True

    def _blocks(self, block_id: BlockId) -> list[BlockId]:
        return [block_id, *self._others.get(block_id, ())]

    def _add_clean(self, block_id: BlockId, block_hash: BlockHash) -> None:
        self._clean[block_hash] = block_id
        self._num_clean += len(self._blocks(block_id))

    def _pop_clean(self, block_hash: BlockHash) -> BlockId | None:
        block_id = self._clean.pop(block_hash, None)
        if block_id is not None:
            self._num_clean -= len(self._blocks(block_id))
        return block_id

    def _end_copy(self, slot: HostSlot) -> None:
        block_id = self._block_of.pop(slot)
        if self._slot_of.get(block_id) == slot:
            del self._slot_of[block_id]

    def _lose(self, block_hash: BlockHash | None) -> None:
        """Records that the block is no longer in host memory."""
        block_id = None if block_hash is None else self._pop_clean(block_hash)
        if block_id is not None and block_hash is not None:
            self._dirty[block_id] = block_hash
            self._dirty.move_to_end(block_id, last=False)  # a copied block was among the coldest
