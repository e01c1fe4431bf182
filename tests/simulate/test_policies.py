"""The peers' policies on small clusters."""

import pytest
from bench.policies import DISAGGREGATION, PEERS
from support.fleet.simulate_harness import run, transcript

from baton.services.simulate.cell import policy_factory


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_serves_every_request_and_replays(name):
    factory = policy_factory(PEERS[name])
    first, second = (run("agents", rate=6.0, factory=factory, roles=("decode",) * 3) for _ in range(2))
    assert all(record.finished > 0 and not record.error for record in first.gateway.records)
    assert len({record.worker_id for record in first.gateway.records}) == 3
    assert transcript(first) == transcript(second)
    assert all(load.num_requests == load.num_prompt_tokens == 0 for load in first.router.policy._loads.values())
    assert all(load.num_waiting_tokens == 0 for load in first.router.policy._loads.values())


@pytest.mark.parametrize("name", DISAGGREGATION)
def test_requests_above_the_threshold_are_handed_over(name):
    simulation = run("poisson", factory=policy_factory(DISAGGREGATION[name]), roles=("prefill", "decode", "decode"))
    least = {"always": 0, "never": 1 << 62, "256": 256, "2048_and_0.7": 2048}[name]
    for record in simulation.gateway.records:
        assert record.finished > 0
        uncached = record.num_prompt_tokens - record.num_cached_tokens
        # The decode worker computes fewer than 64 tokens itself, whatever it is told.
        assert bool(record.prefill_worker_id) == (uncached >= max(least, 64))


def test_cache_aware_routing_finds_more_than_a_ring_does_by_turns():
    def hits(name):
        simulation = run("agents", rate=10.0, factory=policy_factory(PEERS[name]), roles=("decode",) * 3)
        return sum(record.num_cached_tokens for record in simulation.gateway.records)

    assert hits("sglang") > 1.1 * hits("round_robin")
