"""The worker's KV blocks: which are held, which are reusable, which are evicted first. Knows nothing of tensors.

state    references  findable   leaves by
empty    0           no         allocate, lease
cached   0           yes        touch (to held), allocate or lease (evicted, least recently freed first)
held     1 or more   maybe      free by its last holder: to cached if findable, else to empty
leased   0           no         settle (to held), free_lease (to empty); never reused before

A state of a recurrent layer takes several blocks, which are joined: the first one is held, found and evicted for all.
Cached states take a limited part of the pool; beyond it, the least recently freed one is evicted before other blocks.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockHash, BlockId, Tier
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent, events_of
from baton.worker.kv.group_keys import is_key, split_key
from baton.worker.kv.host_tier.offloads import Offloads
from baton.worker.kv.residency import ResidencyMeter

_POOL_PARTS = 512  # an eviction takes at least one of so many parts of the pool
_NO_BLOCKS: tuple[BlockId, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """The number of blocks in each state. Every block is in exactly one."""

    num_blocks: int
    num_held_blocks: int  # by requests, cached or not
    num_leased_blocks: int  # a remote peer may write them
    num_cached_blocks: int  # not held, reusable
    num_empty_blocks: int
    num_indexed_blocks: int = field(default=0, compare=False)  # of the cached ones, those of the first group; by audits


class BlockPool:
    """Allocates blocks and tracks their contents. Every method is O(1) a block.

    All groups of the cache use these blocks; hashes here are keys of group_keys. `offloads` receives every cached block
    that is added or removed, `residency` every block that becomes findable, is found, or is evicted.
    """

    def __init__(
        self,
        num_blocks: int,
        offloads: Offloads | None = None,
        num_groups: int = 1,
        residency: ResidencyMeter | None = None,
        most_cached_joined: int | None = None,  # blocks of cached states; None: any number
    ) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._empty: list[BlockId] = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # the next to evict first
        self._num_references = [0] * num_blocks
        self._leased: set[BlockId] = set()
        self._joined: dict[BlockId, tuple[BlockId, ...]] = {}  # by the first block of a state, the others
        self._cached_joined: OrderedDict[BlockId, None] = OrderedDict()  # those of _cached
        self._num_cached_joined = 0  # their other blocks
        self._most_cached_joined = num_blocks if most_cached_joined is None else most_cached_joined
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, BlockId] = {}
        self._events = events_of(Tier.DEVICE, num_groups)
        self._offloads = offloads
        self._residency = residency
        # An eviction takes so many blocks, which are one event for the index. Host copies are evicted block by block.
        self._evicted_together = max(1, num_blocks // _POOL_PARTS) if offloads is None else 1

    @property
    def num_free(self) -> int:
        """Blocks that allocate could return now, including cached ones."""
        return len(self._empty) + len(self._cached) + self._num_cached_joined

    @property
    def has_evicted(self) -> bool:
        """Whether blocks stopped being findable since the last take_events."""
        return self._events.removes

    @property
    def num_empty(self) -> int:
        """Blocks that allocate would return first."""
        return len(self._empty)

    def allocate(self, count: int, in_order: bool = True) -> list[BlockId] | None:
        """Holds `count` blocks for the caller, and evicts cached ones if needed. None: there are too few.

        `in_order`: only steps that are launched from now on write them.
        """
        if count > self.num_free:
            return None
        block_ids = self._take(count, in_order)
        references = self._num_references
        for block_id in block_ids:
            references[block_id] = 1
        return block_ids

    def join(self, block_ids: Sequence[BlockId]) -> BlockId:
        """Makes held blocks one state. Returns its first block, by which it is known from then on."""
        first, *others = block_ids
        if others:
            for block_id in others:
                self._num_references[block_id] = 0
            self._joined[first] = tuple(others)
        return first

    def pages_of(self, block_id: BlockId) -> list[BlockId]:
        """Returns the blocks of a state, or the block."""
        return [block_id, *self._joined.get(block_id, _NO_BLOCKS)]

    def lookup(self, block_hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Returns the blocks of the longest cached prefix. Touch them before the next allocation."""
        block_ids: list[BlockId] = []
        find = self._block_of.get
        for block_hash in block_hashes:
            block_id = find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        """Holds blocks that lookup found."""
        references, cached, offloads = self._num_references, self._cached, self._offloads
        for block_id in block_ids:
            if references[block_id] == 0:
                del cached[block_id]
                if block_id in self._joined:
                    self._uncache_joined(block_id)
                if offloads is not None:
                    offloads.held(block_id, self._hash(block_id))
            references[block_id] += 1
        if offloads is not None:
            offloads.used(map(self._hash, block_ids))
        if self._residency is not None:
            self._residency.used(block_ids)

    def count_unheld(self, block_ids: Sequence[BlockId]) -> int:
        """Returns how many of these blocks, and of their states', are not held: touching them takes as many."""
        references, joined = self._num_references, self._joined
        if not joined:
            return [references[block_id] for block_id in block_ids].count(0)
        return sum(1 + len(joined.get(block_id, ())) for block_id in block_ids if references[block_id] == 0)

    def free(self, block_ids: Sequence[BlockId], *, first: bool = False) -> None:
        """Ends one hold. The last block is evicted first, so a prefix is kept longer than its continuations.

        `first`: they are evicted before all others.
        """
        references, hash_of, offloads = self._num_references, self._hash_of, self._offloads
        put_empty, cached = self._empty.append, self._cached
        for block_id in reversed(block_ids):
            count = references[block_id] - 1
            assert count >= 0, f"block {block_id} is freed but not held"
            references[block_id] = count
            if count:
                continue
            block_hash = hash_of[block_id]
            if block_hash is None:
                put_empty(block_id)
                self._empty += self._joined.pop(block_id, _NO_BLOCKS)
                continue
            cached[block_id] = None
            if block_id in self._joined:
                self._cache_joined(block_id, first=first)
            if first:
                cached.move_to_end(block_id, last=False)
            if offloads is not None:
                offloads.cached(block_id, block_hash, self._joined.get(block_id, _NO_BLOCKS), expected=not first)
        if self._num_cached_joined > self._most_cached_joined:
            self._evict_joined()

    def store(self, block_ids: Sequence[BlockId], block_hashes: Sequence[BlockHash]) -> None:
        """Makes held, full blocks findable. If a hash is already cached, the existing block is kept."""
        assert len(block_ids) == len(block_hashes), f"{len(block_ids)} blocks and {len(block_hashes)} hashes"
        assert all(map(self._num_references.__getitem__, block_ids)), "a block is stored but not held"
        hash_of, block_of = self._hash_of, self._block_of
        clean = len(set(block_hashes)) == len(block_hashes) and block_of.keys().isdisjoint(block_hashes)
        if not clean or any(map(hash_of.__getitem__, block_ids)):
            fresh: dict[BlockHash, BlockId] = {}
            for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
                if hash_of[block_id] is None and block_hash not in block_of:
                    fresh.setdefault(block_hash, block_id)
            block_ids, block_hashes = list(fresh.values()), list(fresh)
        block_of.update(zip(block_hashes, block_ids, strict=True))
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            hash_of[block_id] = block_hash
        self._events.stored(*block_hashes)
        if self._offloads is not None:
            self._offloads.used(block_hashes)
        if self._residency is not None:
            self._residency.stored(block_ids)

    def lease(self, count: int) -> list[BlockId] | None:
        """Takes blocks that a remote peer may write until settle or free_lease. None: there are too few."""
        if count > self.num_free:
            return None
        block_ids = self._take(count, in_order=False)
        self._leased.update(block_ids)
        return block_ids

    def settle(self, block_ids: Sequence[BlockId]) -> None:
        """Turns leased blocks into held ones: the peer has finished, and their contents are valid."""
        self._end_lease(block_ids)
        references = self._num_references
        for block_id in block_ids:
            references[block_id] = 1

    def evict_ahead(self, wanted: int, at_most: int) -> None:
        """Evicts at most `at_most` cached blocks until `wanted` are empty, for a lease that is expected."""
        count = min(wanted - len(self._empty), at_most, len(self._cached) + self._num_cached_joined)
        if count > 0:
            self._empty[:0] = reversed(self._evict(count, in_order=False))

    def free_lease(self, block_ids: Sequence[BlockId]) -> None:
        """Turns leased blocks into empty ones: the peer can no longer write them."""
        self._end_lease(block_ids)
        self._empty.extend(block_ids)

    def reset(self) -> None:
        """Forgets all contents, and pending events. Holds and leases stay."""
        for block_id in self._cached:
            self._empty += self.pages_of(block_id)
            self._joined.pop(block_id, None)
        self._cached.clear()
        self._cached_joined.clear()
        self._num_cached_joined = 0
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks
        self._events.clear()
        if self._residency is not None:
            self._residency.forget()
        if self._offloads is not None:
            self._offloads.reset()

    def take_events(self) -> list[StoredEvent | RemovedEvent]:
        """Returns the changes of what is findable since the last call, in order."""
        return self._events.take()

    def cached_hashes(self) -> bytes:
        """Returns the hashes of everything findable in some group, 16 bytes a block."""
        return b"".join(self.cached_by_groups().values())

    def cached_by_groups(self) -> Mapping[tuple[int, ...], bytes]:
        """Returns the hashes of everything findable, 16 bytes a block, by the groups that hold it; (): all groups."""
        return self._events.by_groups(self._block_of.keys())

    def count(self) -> PoolAudit:
        """Counts the blocks in each state by the free lists. O(1)."""
        num_leased, num_empty = len(self._leased), len(self._empty)
        num_cached = len(self._cached) + self._num_cached_joined
        num_held = self.num_blocks - num_leased - num_cached - num_empty
        return PoolAudit(self.num_blocks, num_held, num_leased, num_cached, num_empty)

    def audit(self) -> PoolAudit:
        """Counts the blocks in each state. Raises DataLoss if the pool is inconsistent."""
        self._check_free_lists()
        self._check_hashes()
        if self._offloads is not None:
            states = {block_id: self._joined[block_id] for block_id in self._cached_joined}
            self._offloads.audit({block_id: self._hash(block_id) for block_id in self._cached}, states)
        num_held = sum(
            1 + len(self._joined.get(BlockId(number), ())) for number, count in enumerate(self._num_references) if count
        )
        num_leased, num_empty = len(self._leased), len(self._empty)
        num_cached = len(self._cached) + self._num_cached_joined
        counted = num_held + num_leased + num_cached + num_empty
        if counted != self.num_blocks:
            raise DataLoss(f"{counted} blocks are accounted for, expected {self.num_blocks}")
        num_indexed = sum(split_key(self._hash(block_id))[1] == 0 for block_id in self._cached)
        return PoolAudit(self.num_blocks, num_held, num_leased, num_cached, num_empty, num_indexed)

    def check_references(self, holds: Sequence[Sequence[BlockId]], leases: Sequence[Sequence[BlockId]]) -> None:
        """Raises DataLoss unless exactly these lists of blocks are held and leased."""
        counts = [0] * self.num_blocks
        for block_ids in holds:
            for block_id in block_ids:
                counts[block_id] += 1
        for number, (counted, known) in enumerate(zip(counts, self._num_references, strict=True)):
            if counted != known:
                raise DataLoss(f"block {number} has {known} references, its holders are {counted}")
        leased = [block_id for block_ids in leases for block_id in block_ids]
        if len(leased) != len(self._leased) or set(leased) != self._leased:
            raise DataLoss(f"{len(self._leased)} blocks are leased, the open leases name {len(leased)}")

    def _end_lease(self, block_ids: Sequence[BlockId]) -> None:
        assert self._leased.issuperset(block_ids), f"of {len(block_ids)} blocks of a lease some are not leased"
        self._leased.difference_update(block_ids)

    def _take(self, count: int, in_order: bool) -> list[BlockId]:
        """Takes empty blocks first, the last freed one before others; then evicts."""
        num_empty = min(count, len(self._empty))
        first = len(self._empty) - num_empty
        block_ids = self._empty[first:][::-1]
        del self._empty[first:]
        if self._offloads is not None and not in_order:
            for block_id in block_ids:
                self._offloads.overwritten(block_id)
        missing = count - num_empty
        if missing > 0:
            num_cached = len(self._cached) + self._num_cached_joined
            evicted = self._evict(min(max(missing, self._evicted_together), num_cached), in_order)
            block_ids += evicted[:missing]
            self._empty += reversed(evicted[missing:])
        return block_ids

    def _evict(self, count: int, in_order: bool) -> list[BlockId]:
        """Evicts at least `count` blocks, and the rest of the last one's state."""
        if not self._cached_joined:
            return self._evict_these(list(itertools.islice(self._cached, count)), in_order)
        block_ids: list[BlockId] = []
        left = count
        for block_id in self._cached:
            if left <= 0:
                break
            block_ids.append(block_id)
            left -= 1 + len(self._joined.get(block_id, _NO_BLOCKS))
        return self._evict_these(block_ids, in_order)

    def _evict_joined(self) -> None:
        """Evicts the states that were freed least recently, until the others are few enough."""
        over, block_ids = self._num_cached_joined - self._most_cached_joined, []
        for block_id in self._cached_joined:
            if over <= 0:
                break
            block_ids.append(block_id)
            over -= len(self._joined[block_id])
        self._empty += reversed(self._evict_these(block_ids, in_order=True))

    def _cache_joined(self, block_id: BlockId, *, first: bool) -> None:
        self._cached_joined[block_id] = None
        self._num_cached_joined += len(self._joined[block_id])
        if first:
            self._cached_joined.move_to_end(block_id, last=False)

    def _uncache_joined(self, block_id: BlockId) -> None:
        del self._cached_joined[block_id]
        self._num_cached_joined -= len(self._joined[block_id])

    def _evict_these(self, block_ids: list[BlockId], in_order: bool) -> list[BlockId]:
        """Evicts cached blocks. Returns them, with those of their states."""
        cached, hash_of = self._cached, self._hash_of
        removed = cast(list[BlockHash], list(map(hash_of.__getitem__, block_ids)))  # cached blocks have hashes
        for block_id in block_ids:
            del cached[block_id]
            hash_of[block_id] = None
        deque(map(self._block_of.__delitem__, removed), maxlen=0)
        self.num_evicted += len(block_ids)
        self._events.removed(*removed)
        if self._residency is not None:
            self._residency.evicted(block_ids)
        if self._offloads is not None:
            for block_id, block_hash in zip(block_ids, removed, strict=True):
                self._offloads.evicted(block_id, block_hash, in_order)
        all_ids = self._parted(block_ids) if self._joined else block_ids
        if self._offloads is not None and not in_order:
            for block_id in all_ids:
                self._offloads.overwritten(block_id)
        return all_ids

    def _parted(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Ends the states among these evicted blocks. Returns all their blocks."""
        pages: list[BlockId] = []
        for block_id in block_ids:
            if block_id in self._cached_joined:
                self._uncache_joined(block_id)
            pages += (block_id, *self._joined.pop(block_id, _NO_BLOCKS))
        return pages

    def _hash(self, block_id: BlockId) -> BlockHash:
        block_hash = self._hash_of[block_id]
        assert block_hash is not None, f"cached block {block_id} has no hash"
        return block_hash

    def _check_free_lists(self) -> None:
        joined = [block_id for others in self._joined.values() for block_id in others]
        if len({*joined, *self._empty, *self._cached, *self._leased}) != len(joined) + sum(
            map(len, (self._empty, self._cached, self._leased))
        ):
            raise DataLoss("a block of a state is also free or leased")
        if any(self._num_references[block_id] or self._hash_of[block_id] is not None for block_id in joined):
            raise DataLoss("a further block of a state has references or a hash of its own")
        if self._cached_joined.keys() != self._cached.keys() & self._joined.keys():
            raise DataLoss(f"{len(self._cached_joined)} states are listed as cached, others are")
        for name, block_ids in (("empty", self._empty), ("cached", self._cached), ("leased", self._leased)):
            if len(set(block_ids)) != len(block_ids):
                raise DataLoss(f"a block is {name} twice")
            for block_id in block_ids:
                if self._num_references[block_id] != 0:
                    raise DataLoss(f"block {block_id} is {name} and has {self._num_references[block_id]} references")
                if (self._hash_of[block_id] is not None) != (name == "cached"):
                    raise DataLoss(f"block {block_id} is {name}, its hash is {self._hash_of[block_id]!r}")

    def _check_hashes(self) -> None:
        for block_hash, block_id in self._block_of.items():
            if not is_key(block_hash) or self._hash_of[block_id] != block_hash:
                raise DataLoss(f"block {block_id} is found as {block_hash!r} but holds {self._hash_of[block_id]!r}")
        num_hashed = sum(1 for block_hash in self._hash_of if block_hash is not None)
        if num_hashed != len(self._block_of):
            raise DataLoss(f"{num_hashed} blocks have a hash, {len(self._block_of)} can be found")
