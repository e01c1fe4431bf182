from __future__ import annotations

from baton.worker.core import BlockHash
from baton.worker.kv.block_pool import BlockPool
from baton.worker.kv.residency import ResidencyMeter


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "little")) for number in numbers]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_blocks_life_is_measured_from_its_storing_to_its_eviction():
    clock = Clock()
    meter = ResidencyMeter(1.0, clock)
    pool = BlockPool(1, residency=meter)
    block_ids = pool.allocate(1)
    pool.store(block_ids, hashes(1))
    pool.free(block_ids)
    for clock.now in (3.0, 10.0):
        pool.touch(pool.lookup(hashes(1)))
        pool.free(block_ids)
    clock.now = 14.0
    assert pool.allocate(1) == block_ids
    times = meter.times
    assert (times.lifetime.count, times.lifetime.sum) == (1, 14.0)
    assert (times.idle_before_evict.count, times.idle_before_evict.sum) == (1, 4.0)
    assert (times.reuse_gap.count, times.reuse_gap.sum) == (2, 10.0)


def test_a_sample_follows_every_nth_block():
    meter = ResidencyMeter(0.25, Clock())
    pool = BlockPool(40, residency=meter)
    for number in range(40):
        block_ids = pool.allocate(1)
        pool.store(block_ids, hashes(number))
        pool.free(block_ids)
    assert pool.allocate(40) is not None
    assert meter.times.lifetime.count == 10


def test_a_reset_is_no_eviction():
    meter = ResidencyMeter(1.0, Clock())
    pool = BlockPool(2, residency=meter)
    block_ids = pool.allocate(2)
    pool.store(block_ids, hashes(1, 2))
    pool.free(block_ids)
    pool.reset()
    assert pool.allocate(2) is not None
    assert meter.times.lifetime.count == 0
