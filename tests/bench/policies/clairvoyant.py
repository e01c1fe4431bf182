"""An approximate upper bound of all placements: the whole fleet as one worker that rejects the largest requests.

One device with the speed and memory of all can do whatever they can: it runs their steps one after the other in the
time that they take in parallel, and computes no block twice. The bound is offline: it knows the whole trace and the
length of every request, and rejects the share of the largest requests that keeps most others within their limits. It
is generous: one large step reads the weights once, but each worker would read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.policies import PEERS

from baton.services.simulate.cell import Cell, arrivals_of, policy_factory, summary_of
from baton.services.simulate.cluster.metrics import Record, Summary
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.cluster.simulation import Simulation
from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.workloads import Arrival

_LEFT_OUT = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
_GOOD_ENOUGH = 0.01


def pooled(cluster: ClusterSettings) -> ClusterSettings:
    """Returns a cluster of one worker with the resources of all."""
    count, device, engine = len(cluster.roles), cluster.device, cluster.engine
    return replace(
        cluster,
        roles=("decode",),
        num_blocks=cluster.num_blocks * count,
        device=replace(
            device,
            base=device.base / count,
            per_prefill_token=device.per_prefill_token / count,
            per_prefill_pair=device.per_prefill_pair / count,
            per_decode_request=device.per_decode_request / count,
            per_context_token=device.per_context_token / count,
        ),
        engine=replace(
            engine,
            max_num_requests=engine.max_num_requests * count,
            max_num_batched_tokens=engine.max_num_batched_tokens * count,
            max_queue_depth=engine.max_queue_depth * count,
        ),
        max_queue_depth=cluster.max_queue_depth * count,
    )


def run_bound(cell: Cell) -> Summary:
    """Returns the best of several runs, each without a different share of the largest requests."""
    texts = Texts(cell.cluster.block_size)
    arrivals = arrivals_of(cell, texts)
    best: Summary | None = None
    for share in _LEFT_OUT:
        summary = _without(cell, texts, arrivals, share)
        if best is None or summary.goodput_per_second > best.goodput_per_second:
            best = summary
        if summary.good_share > 1 - share - _GOOD_ENOUGH:
            break  # all admitted requests are good, so rejecting more gains nothing
    assert best is not None, "there is at least one run"
    return best


def _without(cell: Cell, texts: Texts, arrivals: Sequence[Arrival], share: float) -> Summary:
    device = cell.cluster.device

    def seconds(arrival: Arrival) -> float:
        context = arrival.prompt.num_tokens + arrival.num_output_tokens / 2
        decode = device.per_decode_request + device.per_context_token * context
        return device.prompt_seconds(arrival.prompt.num_tokens) + arrival.num_output_tokens * decode

    largest = sorted(arrivals, key=seconds, reverse=True)[: round(share * len(arrivals))]
    left_out = {arrival.output_content for arrival in largest}
    kept = [arrival for arrival in arrivals if arrival.output_content not in left_out]
    simulation = Simulation(pooled(cell.cluster), policy_factory(PEERS["least_loaded"]), texts.namespace, cell.seed)
    served = iter(simulation.run(kept, cell.drain_seconds).records)
    records = [
        Record(one.time, one.prompt.num_tokens, error="LEFT_OUT") if one.output_content in left_out else next(served)
        for one in arrivals
    ]
    return summary_of(replace(cell, policy="bound"), arrivals, records)
