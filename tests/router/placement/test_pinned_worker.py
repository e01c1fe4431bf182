"""A request that only one worker may decode."""

import pytest
from support.fleet.fleet_node import state
from support.fleet.placer_world import World
from support.fleet.router_views import DECODE, PREFILL

from baton.rpc.errors import NotFound, Unavailable


def test_the_pinned_worker_decodes_however_busy_it_is():
    world = World(state("a", num_running=60), state("b"))
    assert world.place().decode.worker_id == "b"
    for _ in range(3):
        assert world.place(worker_id="a").decode.worker_id == "a"
    assert world.place().decode.worker_id == "b", "the next one is free again"


def test_others_may_still_prefill_for_it():
    world = World(state("p", role=PREFILL), state("d", role=DECODE), state("e", role=DECODE))
    placed = world.place(worker_id="e", prompt=range(100))
    assert placed.decode.worker_id == "e"
    assert placed.prefill.worker_id in ("", "p")


def test_an_unknown_worker_and_one_that_only_prefills_are_not_found():
    world = World(state("p", role=PREFILL), state("d", role=DECODE))
    for name in ("x", "p"):
        with pytest.raises(NotFound, match="are: d") as refused:
            world.place(worker_id=name)
        assert refused.value.field == "worker_id"


def test_a_worker_that_cannot_decode_now_is_unavailable():
    world = World(state("a"), state("b", draining=True))
    with pytest.raises(Unavailable, match="'b' drains"):
        world.place(worker_id="b")
    with pytest.raises(Unavailable, match="has just failed"):
        world.place(worker_id="a", excluded_worker_ids=["a"])
