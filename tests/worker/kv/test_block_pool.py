from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockHash, BlockId
from baton.worker.kv.block_pool import BlockPool
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def hold(pool: BlockPool, *numbers: int) -> list[BlockId]:
    """Allocates and stores one block for each hash number."""
    block_ids = pool.allocate(len(numbers))
    assert block_ids is not None
    for block_id, number in zip(block_ids, numbers, strict=True):
        pool.store([block_id], [hash_of(number)])
    return block_ids


def test_a_freed_block_stays_findable_until_it_is_reused():
    pool = BlockPool(2)
    block_ids = hold(pool, 1)
    pool.free(block_ids)
    assert pool.lookup([hash_of(1)]) == block_ids
    assert pool.allocate(2) is not None
    assert pool.lookup([hash_of(1)]) == []


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    pool = BlockPool(3)
    head, middle, tail = hold(pool, 1, 2, 3)
    pool.free([head, middle, tail])
    assert pool.allocate(1) == [tail]
    assert pool.allocate(1) == [middle]
    assert pool.lookup([hash_of(1), hash_of(2), hash_of(3)]) == [head]


def test_the_least_recently_freed_prefix_goes_first():
    pool = BlockPool(2)
    old, new = hold(pool, 1), hold(pool, 2)
    pool.free(old)
    pool.free(new)
    pool.touch(old)
    pool.free(old)
    assert pool.allocate(1) == new


def test_a_large_pool_evicts_several_blocks_and_publishes_them_once():
    pool = BlockPool(2048)
    pool.free(hold(pool, *range(2048)))
    pool.take_events()

    def num_evicted() -> int:
        assert pool.allocate(1) is not None
        return sum(len(event.block_hashes) // 16 for event in pool.take_events() if isinstance(event, RemovedEvent))

    assert [num_evicted() for _ in range(5)] == [4, 0, 0, 0, 4]
    assert pool.num_free == 2048 - 5
    pool.audit()


def test_empty_blocks_are_used_before_cached_ones():
    pool = BlockPool(2)
    pool.free(hold(pool, 1))
    assert pool.allocate(1) is not None
    assert pool.num_evicted == 0
    assert pool.lookup([hash_of(1)])


def test_evicting_a_shared_block_waits_for_its_last_reader():
    pool = BlockPool(1)
    block_ids = hold(pool, 1)
    pool.touch(block_ids)
    pool.free(block_ids)
    assert pool.allocate(1) is None
    pool.free(block_ids)
    assert pool.allocate(1) == block_ids


def test_an_allocation_that_does_not_fit_takes_nothing():
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_a_leased_block_is_never_reused_before_its_end():
    pool = BlockPool(2)
    leased = pool.lease(1)
    assert leased is not None
    assert pool.allocate(2) is None
    pool.free_lease(leased)
    assert pool.allocate(2) is not None


def test_a_settled_lease_is_held_like_any_other_block():
    pool = BlockPool(1)
    leased = pool.lease(1)
    assert leased is not None
    pool.settle(leased)
    pool.store(leased[:1], [hash_of(7)])
    pool.free(leased)
    assert pool.audit().num_cached_blocks == 1


def test_early_eviction_takes_the_oldest_blocks_up_to_the_requested_number():
    pool = BlockPool(6)
    for number in range(5):
        pool.free(hold(pool, number))
    pool.evict_ahead(wanted=4, at_most=2)
    assert pool.count().num_empty_blocks == 3
    assert [len(pool.lookup([hash_of(number)])) for number in range(5)] == [0, 0, 1, 1, 1]
    pool.evict_ahead(wanted=4, at_most=2)
    pool.evict_ahead(wanted=4, at_most=2)
    assert pool.audit().num_empty_blocks == 4
    assert pool.num_free == 6
    pool.evict_ahead(wanted=100, at_most=100)
    assert pool.audit().num_cached_blocks == 0


def test_many_blocks_are_stored_but_for_those_that_are_known():
    pool = BlockPool(8)
    known = hold(pool, 2)
    pool.take_events()
    block_ids = pool.allocate(4)
    assert block_ids is not None
    pool.store(block_ids, [hash_of(number) for number in (1, 2, 3, 4)])
    assert pool.lookup([hash_of(number) for number in (1, 2, 3, 4)]) == [block_ids[0], *known, *block_ids[2:]]
    pool.store(block_ids[:1], [hash_of(9)])  # it holds something else
    assert pool.lookup([hash_of(9)]) == []
    (event,) = pool.take_events()
    assert event == StoredEvent(b"".join(hash_of(number) for number in (1, 3, 4)))
    with pytest.raises(AssertionError, match="not held"):
        pool.store([BlockId(7)], [hash_of(7)])
    pool.audit()


def test_the_first_of_two_equal_blocks_stays_the_findable_one():
    pool = BlockPool(2)
    first, second = hold(pool, 1), hold(pool, 1)
    assert pool.lookup([hash_of(1)]) == first
    pool.free(second)
    assert pool.audit().num_empty_blocks == 1
    pool.free(first)
    assert pool.audit().num_cached_blocks == 1


def test_of_equal_blocks_that_are_stored_together_the_first_is_findable():
    pool = BlockPool(3)
    block_ids = pool.allocate(3)
    assert block_ids is not None
    pool.store(block_ids, [hash_of(1), hash_of(2), hash_of(1)])
    assert pool.lookup([hash_of(1), hash_of(2)]) == block_ids[:2]
    assert pool.take_events() == [StoredEvent(hash_of(1) + hash_of(2))]
    pool.free(block_ids)
    audit = pool.audit()
    assert (audit.num_cached_blocks, audit.num_empty_blocks) == (2, 1)


def test_lookup_stops_at_the_first_unknown_block():
    pool = BlockPool(3)
    block_ids = hold(pool, 1, 3)
    assert pool.lookup([hash_of(1), hash_of(2), hash_of(3)]) == block_ids[:1]


def test_events_have_each_change_once_and_in_order():
    pool = BlockPool(2)
    pool.free(hold(pool, 1, 2))
    hold(pool, 3)
    assert pool.take_events() == [
        StoredEvent(hash_of(1) + hash_of(2)),
        RemovedEvent(hash_of(2)),
        StoredEvent(hash_of(3)),
    ]
    assert pool.take_events() == []


def test_reset_forgets_hashes_and_events_but_keeps_holders():
    pool = BlockPool(3)
    held = hold(pool, 1)
    pool.free(hold(pool, 2))
    pool.reset()
    assert pool.take_events() == []
    assert pool.cached_hashes() == b""
    assert pool.audit().num_held_blocks == 1
    pool.free(held)
    assert pool.audit().num_empty_blocks == 3


def test_the_audit_names_a_block_with_the_wrong_number_of_holders():
    pool = BlockPool(2)
    block_ids = hold(pool, 1)
    with pytest.raises(DataLoss, match=f"block {block_ids[0]} has 1 references, its holders are 0"):
        pool.check_references([], [])


def test_the_audit_finds_an_unknown_lease():
    pool = BlockPool(2)
    pool.lease(1)
    with pytest.raises(DataLoss, match="1 blocks are leased, the open leases name 0"):
        pool.check_references([], [])


class NaivePool:
    """The same promises, kept by walking lists."""

    def __init__(self, num_blocks: int) -> None:
        self.holders = dict.fromkeys(range(num_blocks), 0)
        self.leased: set[int] = set()
        self.content: dict[int, int] = {}  # block -> findable hash number
        self.freed: list[int] = []  # cached blocks, the oldest first

    def empty(self) -> list[int]:
        return [b for b, n in self.holders.items() if n == 0 and b not in self.leased and b not in self.content]

    def taken(self, block_ids: list[BlockId]) -> None:
        """Checks the blocks that the pool allocated, and updates the model."""
        num_empty = len(self.empty())
        evicted = self.freed[: max(0, len(block_ids) - num_empty)]
        assert set(block_ids) - set(self.empty()) == set(evicted)
        assert all(self.holders[b] == 0 and b not in self.leased for b in block_ids)
        for block_id in evicted:
            del self.content[block_id]
            self.freed.remove(block_id)

    def find(self, number: int) -> int | None:
        return next((b for b, n in self.content.items() if n == number), None)


class PoolMachine(RuleBasedStateMachine):
    """Random verbs on a pool and its naive twin."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.naive = NaivePool(num_blocks)
        self.holds: list[list[BlockId]] = []
        self.leases: list[list[BlockId]] = []
        self.known: set[bytes] = set()

    @rule(count=st.integers(0, 5), first=st.integers(0, 30))
    def allocate(self, count: int, first: int) -> None:
        free = len(self.naive.empty()) + len(self.naive.freed)
        block_ids = self.pool.allocate(count)
        assert (block_ids is None) == (count > free)
        if block_ids is None:
            return
        self.naive.taken(block_ids)
        for number, block_id in enumerate(block_ids, first):
            self.naive.holders[block_id] = 1
            self.pool.store([block_id], [hash_of(number)])
            if self.naive.find(number) is None:
                self.naive.content[block_id] = number
        self.holds.append(block_ids)

    @rule(first=st.integers(0, 30), count=st.integers(1, 5))
    def lookup_and_touch(self, first: int, count: int) -> None:
        expected: list[int] = []
        for number in range(first, first + count):
            block_id = self.naive.find(number)
            if block_id is None:
                break
            expected.append(block_id)
        found = self.pool.lookup([hash_of(number) for number in range(first, first + count)])
        assert found == expected
        assert self.pool.count_unheld(found) == sum(self.naive.holders[b] == 0 for b in found)
        self.pool.touch(found)
        for block_id in found:
            self.naive.holders[block_id] += 1
            if block_id in self.naive.freed:
                self.naive.freed.remove(block_id)
        self.holds.append(found)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_ids = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.free(block_ids)
        for block_id in reversed(block_ids):
            self.naive.holders[block_id] -= 1
            if self.naive.holders[block_id] == 0 and block_id in self.naive.content:
                self.naive.freed.append(block_id)

    @rule(count=st.integers(1, 4))
    def lease(self, count: int) -> None:
        free = len(self.naive.empty()) + len(self.naive.freed)
        block_ids = self.pool.lease(count)
        assert (block_ids is None) == (count > free)
        if block_ids is not None:
            self.naive.taken(block_ids)
            self.naive.leased.update(block_ids)
            self.leases.append(block_ids)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), good=st.booleans())
    def end_lease(self, data: st.DataObject, good: bool) -> None:
        block_ids = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.naive.leased.difference_update(block_ids)
        if good:
            self.pool.settle(block_ids)
            self.naive.holders.update(dict.fromkeys(block_ids, 1))
            self.holds.append(block_ids)
        else:
            self.pool.free_lease(block_ids)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.naive.content.clear()
        self.naive.freed.clear()
        self.known.clear()

    @invariant()
    def the_pool_agrees_with_its_twin_and_its_events(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_references(self.holds, self.leases)
        audit = self.pool.audit()
        assert audit.num_cached_blocks == len(self.naive.freed)
        assert audit.num_empty_blocks == len(self.naive.empty())
        for event in self.pool.take_events():
            hashes = {event.block_hashes[i : i + 16] for i in range(0, len(event.block_hashes), 16)}
            assert hashes.isdisjoint(self.known) == isinstance(event, StoredEvent)
            self.known = self.known | hashes if isinstance(event, StoredEvent) else self.known - hashes
        cached = self.pool.cached_hashes()
        assert {cached[i : i + 16] for i in range(0, len(cached), 16)} == self.known
        assert self.known == {bytes(hash_of(number)) for number in self.naive.content.values()}


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolAgainstItsNaiveTwin = PoolMachine.TestCase
