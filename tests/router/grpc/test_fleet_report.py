"""GetFleet over real gRPC: workers, outcomes of placements, and the latest placements."""

from __future__ import annotations

import itertools

import pytest
from support.fleet.fleet_node import state
from support.fleet.router_views import DECODE, PREFILL

from baton.router.grpc.fleet_report import bounds_of
from baton.v1 import router_pb2


async def fleet_of(router, max_placements=10):
    return await router.stub.GetFleet(router_pb2.GetFleetRequest(max_placements=max_placements), timeout=5)


async def report(router, placement_id, **fields):
    outcome = router_pb2.PlacementOutcome(placement_id=placement_id, **fields)
    await router.stub.Report(router_pb2.ReportRequest(outcomes=[outcome]), timeout=5)


def counted(histogram):
    """The bucket's lower and upper bound of each value that was counted."""
    bounds = [0.0, *histogram.bounds, float("inf")]
    return [(bounds[at], bounds[at + 1]) for at, count in enumerate(histogram.counts) for _ in range(count)]


def test_bounds_grow_evenly_over_their_decades():
    bounds = bounds_of(range(-3, 3))
    assert (bounds[0], bounds[-1]) == (pytest.approx(0.001), pytest.approx(1000.0))
    assert all(1.1 < after / before < 1.2 for before, after in itertools.pairwise(bounds))


async def test_a_router_without_traffic_reports_its_workers(world):
    router = await world.router(await world.worker(state("d", DECODE)), await world.worker(state("p", PREFILL)))
    fleet = await fleet_of(router)
    assert {entry.state.worker_id: entry.alive for entry in fleet.workers} == {"d": True, "p": True}
    assert fleet.router_id
    assert (fleet.totals.num_placed, list(fleet.placed), list(fleet.reported)) == (0, [], [])


async def test_placements_are_counted_and_the_newest_come_first(world):
    router = await world.router(await world.worker(state("w1")))
    placed = [await router.place(100 + at, request_id=f"r{at}", tenant="acme") for at in range(3)]
    times = router_pb2.RequestTimes(place_us=2_000, mean_itl_us=20_000, decode_us=180_000)
    await report(
        router, placed[1].placement_id, num_cached_tokens=32, num_output_tokens=10, first_token_us=48_000, times=times
    )
    await report(router, placed[1].placement_id, num_cached_tokens=32)  # again: counts once
    await report(router, placed[0].placement_id, worker_failed=True)
    fleet = await fleet_of(router, max_placements=2)
    assert [one.request_id for one in fleet.placed] == ["r2", "r1"]
    assert [one.request_id for one in fleet.reported] == ["r0", "r1"]
    ended = fleet.reported[1]
    assert (ended.num_prompt_tokens, ended.decode_worker_id, ended.prefill_worker_id) == (101, "w1", "")
    assert (ended.tenant, ended.outcome.times.decode_us) == ("acme", 180_000)
    assert not fleet.placed[0].HasField("outcome")
    totals = fleet.totals
    assert (totals.num_placed, totals.num_failed, totals.num_in_flight) == (3, 1, 1)
    assert (totals.num_prompt_tokens, totals.num_cached_tokens, totals.num_output_tokens) == (101, 32, 10)
    ((low, high),) = counted(totals.ttft_seconds)
    assert low < 0.05 <= high * 1.0001
    assert len(counted(totals.itl_seconds)) == 9


async def test_refusals_are_counted_and_placements_only_returned_on_request(world):
    router = await world.router(await world.worker(state("w1")))
    await router.place()
    with pytest.raises(Exception, match="served are: m"):
        await router.place(model="other")
    fleet = await fleet_of(router, max_placements=0)
    assert (fleet.totals.num_placed, fleet.totals.num_refused) == (1, 1)
    assert not fleet.placed
