"""Reports of many placements: others have their turns meanwhile, and nothing of them is lost."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from support.fleet.fleet_node import state
from support.fleet.placer_world import World

from baton.router.grpc.servicer import RouterServicer
from baton.router.metrics import RouterMetrics
from baton.v1 import router_pb2

COUNT = 100


@pytest.fixture
def world():
    return World(state("w1"), state("w2"))


@pytest.fixture
def servicer(world):
    news = SimpleNamespace(router_id="r1")
    return RouterServicer(world.fleet, world.placer, world.index, RouterMetrics(CollectorRegistry()), news)


@pytest.fixture
def report(world):
    """All of a hundred placements."""
    ids = [world.place(request_id=str(number)).placement_id for number in range(COUNT)]
    return router_pb2.ReportRequest(
        outcomes=[router_pb2.PlacementOutcome(placement_id=one, num_output_tokens=10) for one in ids]
    )


async def test_other_tasks_run_while_many_reports_are_handled(world, servicer, report):
    reporting = asyncio.create_task(servicer.Report(report, None))
    left = []
    while not reporting.done():
        await asyncio.sleep(0)
        left.append(len(world.placer.in_flight))
    assert left[-1] == 0
    assert len(set(left)) >= 10, "it ends a few at a time"


async def test_a_report_whose_caller_has_gone_counts_completely(world, servicer, report):
    reporting = asyncio.create_task(servicer.Report(report, None))
    await asyncio.sleep(0)
    assert 0 < len(world.placer.in_flight) < COUNT
    reporting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reporting
    assert len(world.placer.in_flight) == 0
