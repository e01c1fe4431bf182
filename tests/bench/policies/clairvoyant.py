"""A bound that no placement beats by much: the whole fleet as one worker, which refuses what would cost others most.

One device as fast as all together, with all their memory, can do whatever they can: it runs their steps one after the
other in the time that they take side by side, and no block is computed twice. It knows every request's length before,
and the whole trace: it leaves out the share of the largest requests that leaves most others within their limits. It is
offline, and it is generous: one large step reads the weights once where many workers read them each.
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
    """All workers as one."""
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
    """The best of some runs, each without another share of the largest requests."""
    texts = Texts(cell.cluster.block_size)
    arrivals = arrivals_of(cell, texts)
    best: Summary | None = None
    for share in _LEFT_OUT:
        summary = _without(cell, texts, arrivals, share)
        if best is None or summary.goodput_per_second > best.goodput_per_second:
            best = summary
        if summary.good_share > 1 - share - _GOOD_ENOUGH:
            break  # all that were let in are good: to leave out more gains nothing
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
