"""Each cost on its own, in seconds."""

import pytest
from support.fleet.router_views import BOTH, DECODE, PREFILL, demand, snapshot

from baton.router.placement import costs
from baton.router.requests.in_flight import PendingLoad

FLOOR = 0.0202  # one request's step at the test's rates


def alone(decode, **asked):
    return costs.decode_alone(decode, demand(**asked), FLOOR)


def local(decode, **asked):
    return costs.local(decode, demand(**asked), alone(decode, **asked))


def remote(decode, prefill, **asked):
    return costs.remote(decode, prefill, demand(**asked), alone(decode, **asked))


def test_an_idle_worker_costs_the_prefill_and_nothing_else():
    assert local(snapshot()) == pytest.approx((0, 0.4, 0, 0, 0, 0, 0, 0))


def test_a_whole_hit_still_computes_one_token():
    assert local(snapshot(cached=4000)).prefill == pytest.approx(0.0001)


def test_prompts_before_this_one_are_waited_for_in_flight_ones_too():
    assert local(snapshot(num_pending_prefill_tokens=5000)).queue == pytest.approx(0.5)
    assert local(snapshot(pending=PendingLoad(0, 2500, 0, 1))).queue == pytest.approx(0.25)


def test_a_full_batch_is_waited_for():
    # 64 places of 100 tokens at 0.0328 s a step: one is free every 51 ms, and two requests are before this one.
    assert local(snapshot(num_running=64, queue_depth=1)).queue == pytest.approx(2 * 100 * 0.0328 / 64)


def test_other_decodes_stall_only_during_a_local_prefill():
    busy = snapshot("d", DECODE, num_running=10)
    there = snapshot("p", PREFILL)
    stalled = 10 * 0.4 * costs.echo(busy, demand())
    assert local(busy).decode - remote(busy, there).decode == pytest.approx(stalled)
    assert 10 * 0.4 < stalled < 10 * 0.4 * 1.5


def test_a_worker_of_both_roles_slows_its_own_decodes_when_it_prefills_for_others():
    decode = snapshot("d", DECODE)
    both = snapshot("b", BOTH, num_running=5)
    assert remote(decode, both).decode == pytest.approx(5 * 0.4 * costs.echo(both, demand()))
    assert remote(decode, snapshot("p", PREFILL, num_running=5)).decode == 0


def test_a_transfer_hides_behind_the_prefill_but_for_its_last_layer():
    moved = 4000 * 131_072 / 1e10
    assert remote(snapshot("d"), snapshot("p", PREFILL)).transfer == pytest.approx(moved / 32 + 0.002)


def test_blocks_cached_at_the_prefill_worker_are_still_transferred():
    moved = 4000 * 131_072 / 1e10
    cost = remote(snapshot("d"), snapshot("p", PREFILL, cached=4000))
    assert cost.transfer == pytest.approx(moved - 0.0001 + 0.002)


def test_blocks_cached_at_the_decode_worker_are_not_transferred():
    moved = 1000 * 131_072 / 1e10
    cost = remote(snapshot("d", cached=3000), snapshot("p", PREFILL, cached=4000))
    assert cost.transfer == pytest.approx(moved - 0.0001 + 0.002)


def test_missing_blocks_cost_the_recomputation():
    enough = snapshot(num_free_blocks=4100 // 16 + 1)
    assert local(enough).memory == 0
    assert local(snapshot(num_free_blocks=0)).memory == pytest.approx(0.41)


def test_the_total_is_the_sum():
    cost = remote(snapshot("d", num_running=3, num_free_blocks=1), snapshot("p", BOTH, num_running=1))
    assert cost.total == pytest.approx(cost.queue + cost.prefill + cost.transfer + cost.decode + cost.memory)
    assert cost.to_first_token == pytest.approx(cost.queue + cost.prefill + cost.transfer)
