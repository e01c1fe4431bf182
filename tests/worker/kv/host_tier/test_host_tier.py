from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockHash, BlockId, HostSlot, Tier
from baton.worker.executors.cuda.kv.staging_ring import StagingRing, runs
from baton.worker.kv.block_pool import BlockPool
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.kv.host_tier.offloads import Offloads
from baton.worker.kv.host_tier.slots import HostTier
from baton.worker.kv.host_tier.uses import BlockUses
from baton.worker.scheduling.rates import Rates
from baton.worker.scheduling.restores import RestoreCost


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def keep(tier: HostTier, *numbers: int) -> list[HostSlot]:
    """Puts blocks into host memory."""
    slots = []
    for number in numbers:
        begun = tier.begin(hash_of(number))
        assert begun is not None
        assert tier.landed(begun.slots[0])
        slots.append(begun.slots[0])
    return slots


# The slots.


def test_a_block_is_found_only_once_its_copy_has_landed():
    tier = HostTier(2)
    begun = tier.begin(hash_of(1))
    assert begun is not None
    assert hash_of(1) in tier
    assert tier.lookup([hash_of(1)]) == []
    assert tier.landed(begun.slots[0])
    assert tier.lookup([hash_of(1)]) == [*begun.slots]


def test_the_least_recently_used_block_is_evicted():
    tier = HostTier(2)
    keep(tier, 1, 2)
    tier.touch(hash_of(1))
    begun = tier.begin(hash_of(3))
    assert begun is not None
    assert begun.evicted == [hash_of(2)]
    assert tier.lookup([hash_of(1)])


def test_a_slot_that_a_restore_reads_is_not_evicted():
    tier = HostTier(1)
    slots = keep(tier, 1)
    tier.pin(slots)
    tier.pin(slots)
    assert tier.begin(hash_of(2)) is None
    tier.unpin(slots)
    assert tier.begin(hash_of(2)) is None
    tier.unpin(slots)
    assert tier.begin(hash_of(2)) is not None


def test_a_failed_copy_leaves_an_empty_slot():
    tier = HostTier(1)
    begun = tier.begin(hash_of(1))
    assert begun is not None
    assert tier.fail(begun.slots[0]) == hash_of(1)
    assert hash_of(1) not in tier
    assert tier.begin(hash_of(2)) is not None


def test_a_voided_copy_is_never_found_and_its_slot_not_reused_before_it_ends():
    tier = HostTier(1)
    begun = tier.begin(hash_of(1))
    assert begun is not None
    assert tier.void(begun.slots[0]) == hash_of(1)
    assert tier.void(begun.slots[0]) is None
    assert tier.begin(hash_of(2)) is None
    assert not tier.landed(begun.slots[0])
    assert tier.lookup([hash_of(1)]) == []
    assert tier.begin(hash_of(1)) is not None


def test_a_reset_forgets_everything_but_waits_for_the_copies_under_way():
    tier = HostTier(3)
    kept, read = keep(tier, 1, 2)
    tier.pin([read])
    begun = tier.begin(hash_of(3))
    assert begun is not None
    tier.reset()
    assert tier.cached_hashes() == b""
    assert tier.take_events() == []
    assert not any(hash_of(number) in tier for number in (1, 2, 3))
    assert tier.begin(hash_of(4)) == ((kept,), [])
    assert tier.begin(hash_of(5)) is None
    assert not tier.landed(begun.slots[0])
    tier.unpin([read])
    assert {tier.begin(hash_of(number)).slots for number in (5, 6)} == {(read,), begun.slots}  # type: ignore[union-attr]


def keep_state(tier: HostTier, number: int, count: int) -> list[HostSlot]:
    """Puts a state of `count` blocks into host memory."""
    begun = tier.begin(hash_of(number), count)
    assert begun is not None
    assert all(map(tier.landed, begun.slots))
    return list(begun.slots)


def test_a_state_is_found_only_once_all_its_copies_have_landed():
    tier = HostTier(3)
    begun = tier.begin(hash_of(1), 3)
    assert begun is not None
    for slot in begun.slots:
        assert tier.lookup([hash_of(1)]) == []
        assert tier.landed(slot)
    assert tier.lookup([hash_of(1)]) == [*begun.slots]
    assert tier.num_kept == 1
    assert tier.num_kept_slots == 3


def test_a_state_takes_the_slots_of_as_many_others_as_it_needs():
    tier = HostTier(4)
    keep(tier, 1, 2, 3)
    begun = tier.begin(hash_of(4), 3)
    assert begun is not None
    assert begun.evicted == [hash_of(1), hash_of(2)]
    assert tier.lookup([hash_of(3)])


def test_a_block_takes_the_slot_of_a_state_which_is_then_gone_as_a_whole():
    tier = HostTier(3)
    keep_state(tier, 1, 3)
    begun = tier.begin(hash_of(2))
    assert begun is not None
    assert begun.evicted == [hash_of(1)]
    assert tier.lookup([hash_of(1)]) == []
    assert tier.begin(hash_of(3), 2) is not None
    tier.audit([])


def test_a_state_that_is_too_large_beside_what_restores_read_evicts_nothing():
    tier = HostTier(3)
    tier.pin(keep(tier, 1))
    keep(tier, 2)
    assert tier.begin(hash_of(3), 3) is None
    assert tier.lookup([hash_of(2)])


@pytest.mark.parametrize("ends", ["fail", "void"])
def test_one_bad_copy_voids_the_whole_state(ends: str):
    tier = HostTier(3)
    begun = tier.begin(hash_of(1), 3)
    assert begun is not None
    first, second, third = begun.slots
    assert tier.landed(first)
    assert getattr(tier, ends)(second) == hash_of(1)
    assert hash_of(1) not in tier
    if ends == "void":
        assert not tier.landed(second)
    assert not tier.landed(third)
    tier.audit([])
    assert tier.begin(hash_of(2), 3) is not None


def test_events_name_the_tier():
    tier = HostTier(1)
    keep(tier, 1, 2)
    assert tier.take_events() == [
        StoredEvent(hash_of(1), Tier.HOST),
        RemovedEvent(hash_of(1), Tier.HOST),
        StoredEvent(hash_of(2), Tier.HOST),
    ]


def test_the_audit_sees_a_pin_that_no_restore_has():
    tier = HostTier(1)
    tier.pin(keep(tier, 1))
    with pytest.raises(DataLoss, match="1 host slots are pinned, the restores read 0"):
        tier.audit([])


# What is copied out.


def make_pool(
    num_blocks: int, num_slots: int = 8, target: int = 0, capacity: int = 100, min_uses: int = 1
) -> tuple[BlockPool, Offloads]:
    offloads = Offloads(HostTier(num_slots), target, min_uses)
    offloads.capacity = capacity
    return BlockPool(num_blocks, offloads), offloads


def cache(pool: BlockPool, *numbers: int) -> list[BlockId]:
    """Allocates, stores and frees one block for each hash number."""
    block_ids = pool.allocate(len(numbers))
    assert block_ids is not None
    for block_id, number in zip(block_ids, numbers, strict=True):
        pool.store([block_id], [hash_of(number)])
    pool.free(block_ids)
    return block_ids


def test_evicted_blocks_are_copied_out_before_the_step_that_overwrites_them():
    pool, offloads = make_pool(2)
    block_ids = cache(pool, 1, 2)
    assert pool.allocate(1) == block_ids[1:]
    assert offloads.take(pool.num_empty) == [(block_ids[1], 0)]
    assert offloads.landed(HostSlot(0))
    assert offloads.tier.lookup([hash_of(2)]) == [0]
    assert offloads.num_dropped == 0


def test_the_coldest_blocks_are_copied_before_they_are_evicted():
    pool, offloads = make_pool(4, target=2)
    block_ids = cache(pool, 1, 2, 3, 4)
    assert offloads.take(pool.num_empty) == [(block_ids[3], 0), (block_ids[2], 1)]
    assert offloads.take(pool.num_empty) == []
    assert pool.allocate(2) == [block_ids[3], block_ids[2]]
    assert offloads.take(pool.num_empty) == [(block_ids[1], 2), (block_ids[0], 3)]
    pool.audit()


def test_blocks_that_few_requests_have_had_are_not_copied():
    pool, offloads = make_pool(3, min_uses=2, target=3)
    once, found, again = cache(pool, 1, 2, 3)
    pool.touch(pool.lookup([hash_of(2)]))
    pool.free([found])
    assert offloads.take(pool.num_empty) == [(found, 0)]
    assert set(pool.allocate(2)) == {once, again}
    assert offloads.take(pool.num_empty) == []
    assert offloads.num_dropped == 0
    pool.free([once, again])
    cache(pool, 3)  # computed again, so that two requests have had it
    assert [block_id for block_id, _ in offloads.take(pool.num_empty)] != []
    pool.audit()


def test_uses_of_blocks_that_are_long_unused_are_forgotten():
    uses = BlockUses(2, most=2)
    uses.add([hash_of(1), hash_of(2)])
    uses.add([hash_of(1)])
    uses.add([hash_of(3)])
    uses.add([hash_of(2)])
    assert [uses.are_enough(hash_of(number)) for number in (1, 2, 3)] == [False, False, False]
    uses.add([hash_of(2)])
    assert uses.are_enough(hash_of(2))


def test_part_of_the_capacity_is_reserved_for_urgent_copies():
    pool, offloads = make_pool(8, target=8, capacity=17)
    cache(pool, *range(8))
    assert len(offloads.take(pool.num_empty)) == 3
    assert offloads.capacity == 14
    assert pool.allocate(8) is not None
    assert len(offloads.take(pool.num_empty)) == 5
    assert offloads.num_dropped == 0


def test_empty_blocks_need_no_copies():
    pool, offloads = make_pool(4, target=2)
    cache(pool, 1, 2)
    assert offloads.take(pool.num_empty) == []


def test_a_block_is_copied_once():
    pool, offloads = make_pool(2, target=2)
    block_ids = cache(pool, 1, 2)
    assert len(offloads.take(pool.num_empty)) == 2
    assert pool.allocate(2) is not None
    pool.free(block_ids)
    cache(pool, 1, 2)
    assert offloads.take(pool.num_empty) == []


def test_without_capacity_evicted_blocks_are_lost_and_counted():
    pool, offloads = make_pool(3, capacity=1)
    cache(pool, 1, 2, 3)
    assert pool.allocate(3) is not None
    assert len(offloads.take(pool.num_empty)) == 1
    assert offloads.num_dropped == 2


def test_a_block_that_a_peer_will_write_is_not_copied():
    pool, offloads = make_pool(1)
    cache(pool, 1)
    assert pool.lease(1) is not None
    assert offloads.take(pool.num_empty) == []
    assert offloads.num_dropped == 1


def test_a_copy_under_way_from_a_block_that_a_peer_will_write_is_void():
    pool, offloads = make_pool(1, target=1)
    cache(pool, 1)
    ((_, slot),) = offloads.take(pool.num_empty)
    assert pool.lease(1) is not None
    assert offloads.num_dropped == 1
    assert not offloads.landed(slot)
    assert offloads.tier.cached_hashes() == b""


def test_a_copy_from_an_evicted_block_is_void_when_a_peer_gets_the_block_soon_after():
    pool, offloads = make_pool(1)
    cache(pool, 1)
    block_ids = pool.allocate(1)
    ((_, slot),) = offloads.take(pool.num_empty)
    assert block_ids is not None
    pool.free(block_ids)
    assert pool.lease(1) == block_ids
    assert not offloads.landed(slot)


def test_a_copy_that_has_landed_outlives_its_block():
    pool, offloads = make_pool(1, target=1)
    cache(pool, 1)
    ((_, slot),) = offloads.take(pool.num_empty)
    assert offloads.landed(slot)
    assert pool.lease(1) is not None
    assert offloads.tier.lookup([hash_of(1)]) == [slot]


def test_a_failed_copy_is_tried_again():
    pool, offloads = make_pool(1, target=1)
    cache(pool, 1)
    ((_, slot),) = offloads.take(pool.num_empty)
    offloads.failed(slot)
    assert len(offloads.take(pool.num_empty)) == 1
    pool.audit()


def cache_state(pool: BlockPool, number: int, count: int, *, first: bool = False) -> list[BlockId]:
    """Allocates, stores and frees a state of `count` blocks."""
    block_ids = pool.allocate(count)
    assert block_ids is not None
    pool.join(block_ids)
    pool.store(block_ids[:1], [hash_of(number)])
    pool.free(block_ids[:1], first=first)
    return block_ids


def test_a_state_is_copied_whole_before_its_blocks_are_reused():
    pool, offloads = make_pool(4)
    block_ids = cache_state(pool, 1, 3)
    assert pool.allocate(2) is not None
    copies = offloads.take(pool.num_empty)
    assert [block_id for block_id, _ in copies] == block_ids
    assert len({slot for _, slot in copies}) == 3
    for _, slot in copies:
        assert offloads.landed(slot)
    assert offloads.tier.lookup([hash_of(1)]) == [slot for _, slot in copies]
    pool.audit()


def test_a_state_is_not_copied_in_parts():
    pool, offloads = make_pool(4, capacity=2)
    cache_state(pool, 1, 3)
    assert pool.allocate(2) is not None
    assert offloads.take(pool.num_empty) == []
    assert offloads.num_dropped == 3


def test_a_snapshot_where_nobody_continues_is_not_copied():
    pool, offloads = make_pool(4, target=4)
    block_ids = cache_state(pool, 1, 3, first=True)
    assert offloads.take(pool.num_empty) == []
    assert pool.allocate(4) is not None
    assert offloads.take(pool.num_empty) == []
    assert offloads.num_dropped == 0
    pool.free(block_ids)
    pool.audit()


def test_blocks_of_a_clean_state_count_as_evictable_without_loss():
    pool, offloads = make_pool(5, target=3)
    cache(pool, 1)
    cache_state(pool, 2, 3)
    cache(pool, 3)
    assert [len(offloads.take(pool.num_empty)) for _ in range(2)] == [4, 0]
    pool.audit()


def test_a_peer_that_gets_one_block_of_a_state_voids_its_copy():
    pool, offloads = make_pool(4, target=4)
    cache_state(pool, 1, 3)
    copies = offloads.take(pool.num_empty)
    assert len(copies) == 3
    fresh = pool.allocate(4)  # evicts it in order: the copy is still good
    assert fresh is not None
    pool.free(fresh)
    assert pool.lease(2) is not None  # one of them at least
    assert not any(offloads.landed(slot) for _, slot in copies)
    assert offloads.tier.num_kept == 0
    offloads.tier.audit([])


def test_more_slots_than_a_small_host_memory_has_are_never_promised():
    pool, offloads = make_pool(6, num_slots=2, target=6)
    cache(pool, 1, 2, 3, 4, 5, 6)
    assert len(offloads.take(pool.num_empty)) == 2
    pool.audit()


class OffloadMachine(RuleBasedStateMachine):
    """Random operations on a pool and its host memory, compared with a naive memory."""

    @initialize(
        num_blocks=st.integers(1, 8),
        num_slots=st.integers(1, 8),
        num_ahead=st.integers(0, 6),
        min_uses=st.integers(1, 3),
    )
    def start(self, num_blocks: int, num_slots: int, num_ahead: int, min_uses: int) -> None:
        self.offloads = Offloads(HostTier(num_slots), min(num_ahead, num_slots), min_uses)
        self.pool = BlockPool(num_blocks, self.offloads)
        self.device: dict[BlockId, int] = {}  # what each block holds
        self.slots: dict[HostSlot, int] = {}
        self.holds: list[list[BlockId]] = []
        self.leases: list[list[BlockId]] = []
        self.sizes: dict[int, int] = {}  # blocks of the states among these
        self.queued: list[tuple[BlockId, HostSlot]] = []  # copies out that the device has not read yet
        self.under_way: list[HostSlot] = []
        self.reads: list[tuple[list[HostSlot], int]] = []
        self.found: set[bytes] = set()

    @rule(count=st.integers(1, 4), first=st.integers(0, 12), capacity=st.integers(0, 4))
    def step(self, count: int, first: int, capacity: int) -> None:
        """Schedules, starts copies, launches: the device reads, and then overwrites."""
        self.offloads.capacity = capacity
        block_ids = self.pool.allocate(count) or []
        self.start_copies()
        self.read_queued()
        for number, block_id in enumerate(block_ids, first):
            self.device[block_id] = number
            self.pool.store([block_id], [hash_of(number)])
        self.holds.append(block_ids)

    @rule(number=st.integers(20, 24), size=st.integers(2, 4), capacity=st.integers(0, 4))
    def step_with_state(self, number: int, size: int, capacity: int) -> None:
        """Does the same with a state. Its blocks hold its number and their own places."""
        self.offloads.capacity = capacity
        size = self.sizes.setdefault(number, size)
        block_ids = self.pool.allocate(size)
        self.start_copies()
        self.read_queued()
        if block_ids is not None:
            self.device.update({block_id: number + 100 * place for place, block_id in enumerate(block_ids)})
            self.pool.store([self.pool.join(block_ids)], [hash_of(number)])
            self.holds.append(block_ids[:1])

    @rule(capacity=st.integers(0, 4))
    def start_copies_behind_a_step(self, capacity: int) -> None:
        self.offloads.capacity = capacity
        self.start_copies()

    def start_copies(self) -> None:
        copies = self.offloads.take(self.pool.num_empty)
        self.queued += copies
        self.under_way += [slot for _, slot in copies]

    def read_queued(self) -> None:
        for block_id, slot in self.queued:
            self.slots[slot] = self.device[block_id]
        self.queued.clear()

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), first=st.booleans())
    def free(self, data: st.DataObject, first: bool) -> None:
        self.pool.free(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))), first=first)

    @rule(first=st.integers(0, 12), count=st.integers(1, 4))
    def touch(self, first: int, count: int) -> None:
        found = self.pool.lookup([hash_of(number) for number in range(first, first + count)])
        assert [self.device[block_id] for block_id in found] == list(range(first, first + len(found)))
        self.pool.touch(found)
        self.holds.append(found)

    @rule(number=st.integers(20, 24))
    def touch_state(self, number: int) -> None:
        found = self.pool.lookup([hash_of(number)])
        for block_id in found:
            pages = self.pool.pages_of(block_id)
            assert [self.device[page] for page in pages] == [number + 100 * place for place in range(len(pages))]
            assert len(pages) == self.sizes[number]
        self.pool.touch(found)
        self.holds.append(found)

    @rule(count=st.integers(1, 3))
    def lease_and_scribble(self, count: int) -> None:
        leased = self.pool.lease(count)
        if leased is not None:
            self.device.update(dict.fromkeys(leased, -1))
            self.leases.append(leased)

    @precondition(lambda self: self.leases)
    @rule()
    def free_lease(self) -> None:
        self.pool.free_lease(self.leases.pop())

    @precondition(lambda self: self.under_way)
    @rule(good=st.booleans())
    def end_copy(self, good: bool) -> None:
        self.read_queued()
        slot = self.under_way.pop(0)
        if good:
            self.offloads.landed(slot)
        else:
            self.offloads.failed(slot)

    @rule(first=st.integers(0, 12), count=st.integers(1, 4))
    def read(self, first: int, count: int) -> None:
        slots = self.offloads.tier.lookup([hash_of(number) for number in range(first, first + count)])
        self.offloads.tier.pin(slots)
        self.reads += zip([[slot] for slot in slots], range(first, first + count), strict=False)

    @rule(number=st.integers(20, 24))
    def read_state(self, number: int) -> None:
        if slots := self.offloads.tier.lookup([hash_of(number)]):
            self.offloads.tier.pin(slots)
            self.reads.append((slots, number))

    @precondition(lambda self: self.reads)
    @rule()
    def end_read(self) -> None:
        slots, number = self.reads.pop()
        assert [self.slots[slot] for slot in slots] == [number + 100 * place for place in range(len(slots))]
        self.offloads.tier.unpin(slots)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.found.clear()

    @invariant()
    def every_findable_slot_holds_its_block(self) -> None:
        if not hasattr(self, "pool"):
            return
        tier = self.offloads.tier
        self.pool.audit()
        tier.audit([slots for slots, _ in self.reads])
        cached = tier.cached_hashes()
        hashes = [BlockHash(cached[start : start + 16]) for start in range(0, len(cached), 16)]
        assert len(hashes) == tier.num_kept <= tier.num_kept_slots <= tier.num_slots
        for block_hash in hashes:
            slots, number = tier.lookup([block_hash]), int.from_bytes(block_hash, "little")
            assert [self.slots[slot] for slot in slots] == [number + 100 * place for place in range(len(slots))]
            assert len(slots) == self.sizes.get(number, 1)
        for event in tier.take_events():
            changed = {event.block_hashes[start : start + 16] for start in range(0, len(event.block_hashes), 16)}
            assert changed.isdisjoint(self.found) == isinstance(event, StoredEvent)
            self.found = self.found | changed if isinstance(event, StoredEvent) else self.found - changed
        assert self.found == set(map(bytes, hashes))


OffloadMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestHostMemoryHoldsWhatItSays = OffloadMachine.TestCase


# What pays.


def make_cost(
    min_tokens: int = 256, prefill_rate: float = 0.0, seconds_per_block: float = 0.0, step: float = 0.0
) -> RestoreCost:
    rates = Rates()
    rates.observe(0, 1, step)
    if prefill_rate:
        rates.observe(8192, 0, 8192 / prefill_rate)
    cost = RestoreCost(rates, min_tokens)
    if seconds_per_block:
        cost.observe(1, seconds_per_block)
    return cost


def test_until_rates_are_known_short_hits_are_computed():
    assert not make_cost().pays(255, 16, 0)
    assert make_cost().pays(256, 16, 0)
    assert make_cost(prefill_rate=1000.0).pays(256, 16, 0)


def test_known_rates_decide():
    assert make_cost(prefill_rate=1000.0, seconds_per_block=0.001).pays(16, 1, 0)
    assert not make_cost(prefill_rate=1e6, seconds_per_block=0.001).pays(4096, 256, 0)


def test_a_restore_that_gains_nothing_is_not_taken():
    # An 8B model on an H200: 256 tokens from host memory came as late as computed ones, 512 tokens 1.3 times sooner.
    cost = make_cost(prefill_rate=44_000.0, seconds_per_block=50e-6, step=0.0044)
    assert not cost.pays(256, 16, 0)
    assert cost.pays(512, 32, 0)


def test_copies_ahead_count():
    cost = make_cost(prefill_rate=16000.0, seconds_per_block=0.0005)
    assert cost.pays(1600, 100, 0)
    assert not cost.pays(1600, 100, 200)


def test_a_refusal_is_not_for_ever():
    cost = make_cost(prefill_rate=16000.0, seconds_per_block=0.002)
    tries = next(number for number in range(1000) if cost.pays(1600, 100, 0))
    assert tries > 1


def test_an_operator_can_take_every_hit():
    assert make_cost(min_tokens=0, prefill_rate=1e9, seconds_per_block=1.0).pays(1, 1, 1000)


# Staging.


def test_staging_places_are_taken_round_the_ring():
    ring = StagingRing(5)
    assert ring.take(3) == [(0, 3)]
    ring.put_back(2)
    assert ring.take(4) == [(3, 2), (0, 2)]
    assert ring.num_free == 0
    ring.undo(4)
    assert ring.num_free == 4
    assert ring.take(1) == [(3, 1)]


def test_neighbouring_slots_go_together():
    assert list(runs([HostSlot(slot) for slot in (2, 3, 4, 7, 9, 10)])) == [(0, 2, 3), (3, 7, 1), (4, 9, 2)]
    assert list(runs([])) == []
