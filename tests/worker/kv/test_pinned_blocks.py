from __future__ import annotations

from support.engine.engine_harness import BLOCK_SIZE, make_request, prompt_of

from baton.worker.core import BlockId
from baton.worker.kv.pinned_blocks import PinnedBlocks
from baton.worker.requests.state import RequestState


def make_state(num_blocks: int) -> RequestState:
    """A request that needs num_blocks in its life."""
    limit = num_blocks * BLOCK_SIZE + 1
    return RequestState(make_request(prompt_of(2)), (0, 0.0, 0), limit, frozenset(), 0.0)


def blocks(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_a_block_that_several_pin_counts_once():
    pins = PinnedBlocks(10, BLOCK_SIZE, 40)
    first, second = make_state(3), make_state(3)
    pins.set(first, blocks(0, 1, 2))
    pins.set(second, blocks(1, 2, 3))
    assert pins.num_pinned == 4
    pins.remove(first)
    assert pins.num_pinned == 3
    pins.remove(first)
    pins.remove(second)
    assert pins.num_pinned == 0


def test_setting_pins_replaces_those_before():
    pins = PinnedBlocks(10, BLOCK_SIZE, 40)
    state = make_state(3)
    pins.set(state, blocks(0, 1))
    pins.set(state, blocks(5))
    assert pins.num_pinned == 1


def test_a_request_must_fit_beside_the_blocks_pinned_by_others():
    pins = PinnedBlocks(10, BLOCK_SIZE, 40)
    holder, other = make_state(8), make_state(5)
    pins.set(holder, blocks(0, 1, 2, 3, 4, 5))
    assert pins.can_finish(holder)
    assert not pins.can_finish(other)


def test_more_blocks_are_pinned_only_if_each_other_request_can_still_finish():
    pins = PinnedBlocks(10, BLOCK_SIZE, 40)
    newcomer = make_state(4)
    assert pins.would_fit(newcomer, 4, [make_state(6), make_state(6)])
    assert not pins.would_fit(newcomer, 4, [make_state(6), make_state(7)])
    assert not pins.would_fit(newcomer, 11, [])
