"""Adapts between recency and frequency: texts that come once do not displace those that return.

The ARC policy of N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Sizes are in
slots, because a state of a recurrent layer takes several.

list           blocks                                   leave by
recent         findable, not used since they came       use (to frequent), evict (to recent_gone)
frequent       findable, used since, or came back       evict (to frequent_gone)
recent_gone    evicted, known by their hashes alone     expect (the block comes back to frequent), the bound
frequent_gone  evicted, known by their hashes alone     expect (the same), the bound

The bounds: recent and recent_gone are at most as large as host memory, and all four at most twice that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from baton.worker.core import BlockHash


class Arc:
    """Implements EvictionPolicy."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._target = 0.0  # slots that `recent` should have: grows with blocks that return to it, and shrinks
        self._recent = _Blocks()
        self._frequent = _Blocks()
        self._recent_gone = _Blocks()
        self._frequent_gone = _Blocks()
        self._returning: dict[BlockHash, bool] = {}  # expected blocks: whether they were evicted not long ago
        self._tie_evicts_recent = False  # the expected block had left `frequent`

    def expect(self, block_hash: BlockHash) -> None:
        """Adapts the target if the block was evicted not long ago."""
        recent, frequent = self._recent_gone, self._frequent_gone
        self._tie_evicts_recent = block_hash in frequent
        self._returning[block_hash] = block_hash in recent or block_hash in frequent
        if block_hash in recent:
            gain = max(1.0, frequent.num_slots / recent.num_slots) * recent.size(block_hash)
            self._target = min(self._target + gain, self._num_slots)
            recent.remove(block_hash)
        elif block_hash in frequent:
            loss = max(1.0, recent.num_slots / frequent.num_slots) * frequent.size(block_hash)
            self._target = max(self._target - loss, 0.0)
            frequent.remove(block_hash)

    def abandon(self, block_hash: BlockHash) -> None:
        self._returning.pop(block_hash)

    def add(self, block_hash: BlockHash, num_slots: int) -> None:
        blocks = self._frequent if self._returning.pop(block_hash) else self._recent
        blocks.add(block_hash, num_slots)
        self._bound()

    def use(self, block_hash: BlockHash) -> None:
        if block_hash in self._recent:
            self._frequent.add(block_hash, self._recent.remove(block_hash))
        else:
            self._frequent.touch(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        """Makes the block the last of its list. It was not used: it only left the device."""
        (self._recent if block_hash in self._recent else self._frequent).touch(block_hash)

    def victims(self) -> Iterator[BlockHash]:
        left = self._recent.num_slots
        recent, frequent = iter(self._recent), iter(self._frequent)
        while True:
            too_many = left > self._target or (self._tie_evicts_recent and left == self._target)
            block_hash = next(recent, None) if left and too_many else None
            if block_hash is None:
                block_hash = next(frequent, None) or next(recent, None)
            if block_hash is None:
                return
            if block_hash in self._recent:
                left -= self._recent.size(block_hash)
            yield block_hash

    def evict(self, block_hash: BlockHash) -> None:
        if block_hash in self._recent:
            self._recent_gone.add(block_hash, self._recent.remove(block_hash))
        else:
            self._frequent_gone.add(block_hash, self._frequent.remove(block_hash))
        self._bound()

    def clear(self) -> None:
        """Forgets all blocks, also those that were evicted, and what it has learned."""
        for blocks in (self._recent, self._frequent, self._recent_gone, self._frequent_gone):
            blocks.clear()
        self._target = 0.0

    def _bound(self) -> None:
        recent, gone = self._recent, self._recent_gone
        while gone.num_slots and recent.num_slots + gone.num_slots > self._num_slots:
            gone.drop_first()
        kept = recent.num_slots + self._frequent.num_slots + gone.num_slots
        while self._frequent_gone.num_slots and kept + self._frequent_gone.num_slots > 2 * self._num_slots:
            self._frequent_gone.drop_first()


class _Blocks:
    """Blocks in the order of their last use, with their slots."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._sizes: OrderedDict[BlockHash, int] = OrderedDict()  # the least recently used first

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._sizes

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._sizes)

    def size(self, block_hash: BlockHash) -> int:
        return self._sizes[block_hash]

    def add(self, block_hash: BlockHash, num_slots: int) -> None:
        self._sizes[block_hash] = num_slots
        self.num_slots += num_slots

    def remove(self, block_hash: BlockHash) -> int:
        num_slots = self._sizes.pop(block_hash)
        self.num_slots -= num_slots
        return num_slots

    def touch(self, block_hash: BlockHash) -> None:
        self._sizes.move_to_end(block_hash)

    def drop_first(self) -> None:
        _, num_slots = self._sizes.popitem(last=False)
        self.num_slots -= num_slots

    def clear(self) -> None:
        self._sizes.clear()
        self.num_slots = 0
