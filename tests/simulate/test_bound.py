from dataclasses import replace

from bench.policies.clairvoyant import pooled, run_bound

from baton.services.simulate.cell import Cell, run_cell
from baton.services.simulate.cluster.metrics import LatencyLimits
from baton.services.simulate.cluster.settings import ClusterSettings


def test_all_workers_as_one_have_the_speed_and_memory_of_all():
    cluster = ClusterSettings(roles=("decode",) * 4)
    one = pooled(cluster)
    assert one.roles == ("decode",)
    assert one.num_blocks == 4 * cluster.num_blocks
    assert one.device.decode_seconds(8, 4000) == cluster.device.decode_seconds(8, 4000) / 4


def test_the_bound_is_not_beaten_and_omits_requests_that_would_fail():
    limits = LatencyLimits(ttft=0.3, itl=0.02)
    cell = Cell(ClusterSettings(roles=("decode",) * 2), "mixed", 1.3, 8.0, limits=limits)
    bound = run_bound(cell)
    assert run_cell(cell).goodput_per_second <= bound.goodput_per_second
    assert 0 < bound.good_share < 1
    assert bound.num_refused > 0
    assert run_bound(replace(cell, load=0.2)).good_share == 1.0
