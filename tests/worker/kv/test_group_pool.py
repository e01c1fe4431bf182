"""A pool shared by two groups, full and window: held blocks, and events for the index."""

from __future__ import annotations

import random

from baton.worker.core import BlockHash, BlockId
from baton.worker.kv.block_pool import BlockPool
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.kv.group_keys import keys_in

FULL, WINDOW = 0, 1


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "little")) for number in numbers]


def packed(*numbers: int) -> bytes:
    return b"".join(hashes(*numbers))


def hold(pool: BlockPool, group: int, *numbers: int) -> list[BlockId]:
    """Allocates and stores a block in one group for each hash."""
    block_ids = pool.allocate(len(numbers))
    assert block_ids is not None
    pool.store(block_ids, keys_in(group, hashes(*numbers)))
    return block_ids


def test_groups_find_blocks_of_their_own():
    pool = BlockPool(8, num_groups=2)
    full, window = hold(pool, FULL, 1, 2, 3), hold(pool, WINDOW, 2, 3)
    assert not set(full) & set(window)
    assert pool.lookup(keys_in(FULL, hashes(1, 2, 3))) == full
    assert pool.lookup(keys_in(WINDOW, hashes(2, 3))) == window
    assert pool.lookup(keys_in(WINDOW, hashes(1, 2, 3))) == []


def test_an_event_names_the_groups_that_hold_a_block_from_then_on():
    pool = BlockPool(8, num_groups=2)
    hold(pool, FULL, 1, 2)
    hold(pool, WINDOW, 2)
    assert pool.take_events() == [StoredEvent(packed(1, 2), groups=(0,)), StoredEvent(packed(2))]
    assert pool.cached_by_groups() == {(0,): packed(1), (): packed(2)}


def test_a_block_is_removed_when_its_last_group_loses_it():
    pool = BlockPool(3, num_groups=2)
    full, window = hold(pool, FULL, 1), hold(pool, WINDOW, 1)
    pool.take_events()
    pool.free(window)
    assert pool.allocate(2) is not None  # the empty one, and the window's
    assert pool.has_evicted
    assert pool.take_events() == [StoredEvent(packed(1), groups=(0,))]
    pool.free(full)
    assert pool.allocate(1) == full
    assert pool.take_events() == [RemovedEvent(packed(1))]
    assert pool.cached_by_groups() == {}


def test_blocks_freed_by_a_window_serve_any_group():
    """The window's early blocks are freed while the full group's stay held; the pool's count is that of all groups."""
    pool = BlockPool(10, num_groups=2)
    full, window = hold(pool, FULL, 1, 2, 3, 4), hold(pool, WINDOW, 1, 2, 3, 4)
    pool.free(window[:3])
    audit = pool.audit()
    assert (audit.num_held_blocks, audit.num_cached_blocks, audit.num_empty_blocks) == (5, 3, 2)
    pool.check_references([full, window[3:]], [])
    more = pool.allocate(5)
    assert more is not None
    assert set(window[:3]) < set(more)
    pool.check_references([full, window[3:], more], [])
    pool.audit()


def test_replayed_events_give_the_blocks_of_each_group():
    rng = random.Random(3)
    pool = BlockPool(40, num_groups=2)
    held: list[list[BlockId]] = []
    known: dict[bytes, tuple[int, ...]] = {}
    for _ in range(400):
        if held and rng.random() < 0.5:
            pool.free(held.pop(rng.randrange(len(held))))
        elif pool.num_free >= 4:
            start, group = rng.randrange(60), rng.randrange(2)
            held.append(hold(pool, group, *range(start, start + rng.randint(1, 4))))
        pool.audit()
        for event in pool.take_events():
            for one in (event.block_hashes[i : i + 16] for i in range(0, len(event.block_hashes), 16)):
                if isinstance(event, StoredEvent):
                    known[one] = event.groups
                else:
                    del known[one]
    found = {
        (key, groups)
        for groups, joined in pool.cached_by_groups().items()
        for key in (joined[i : i + 16] for i in range(0, len(joined), 16))
    }
    assert found == set(known.items())
    assert len({groups for _, groups in found}) == 3


def test_a_reset_forgets_every_group():
    pool = BlockPool(8, num_groups=2)
    hold(pool, FULL, 1)
    hold(pool, WINDOW, 1)
    pool.reset()
    assert pool.take_events() == []
    assert pool.cached_by_groups() == {}
    hold(pool, WINDOW, 1)
    assert pool.take_events() == [StoredEvent(packed(1), groups=(1,))]
