"""Placements with retry over routers, reports, and routers' models."""

import asyncio
import contextlib
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from support.gateway.scripted_services import MODEL, ScriptedRouter, ScriptedWorker, until

from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.routers.client import RouterClient, RouterTimes
from baton.rpc.errors import NoCapacity, NotFound, Unavailable
from baton.v1 import router_pb2, types_pb2

TIMES = RouterTimes(attempt=0.3, total=1.0, no_worker=0.3, first_delay=0.02, report_interval=0.01)
NOWHERE = "127.0.0.1:1"


@pytest.fixture
async def worker():
    async with ScriptedWorker("w1", lambda request: []) as worker:
        yield worker


@pytest.fixture
async def routers(worker):
    async with ScriptedRouter([worker]) as first, ScriptedRouter([worker]) as second:
        yield [first, second]


def client(addresses, on_models=lambda models: None, times=TIMES):
    return RouterClient(addresses, on_models, GenerationCounters(), times)


async def test_a_placement_comes_from_one_router(routers):
    async with client([router.address for router in routers]) as router:
        for _ in range(4):
            placed = await router.place(router_pb2.PlaceRequest(model="m"))
            assert placed.response.decode.worker_id == "w1"
    assert sorted(len(router.places) for router in routers) == [0, 4]


async def test_a_lost_router_is_replaced_at_once(routers):
    times = replace(TIMES, attempt=3.0, total=10.0)
    async with client([router.address for router in routers], times=times) as router:
        await router.place(router_pb2.PlaceRequest())
        used = next(one for one in routers if one.places)
        await used.stop()
        begin = time.monotonic()
        await router.place(router_pb2.PlaceRequest())
        assert time.monotonic() - begin < times.attempt / 2


async def test_a_hanging_router_costs_one_attempt(routers):
    for router in routers:
        router.hangs = True
    async with client([router.address for router in routers]) as router:
        task = asyncio.create_task(router.place(router_pb2.PlaceRequest()))
        await until(lambda: any(one.places for one in routers))
        idle = next(one for one in routers if not one.places)
        idle.hangs = False
        assert (await task).response.decode.worker_id == "w1"


async def test_a_router_that_returns_in_time_serves_the_placement(worker):
    async with ScriptedRouter([worker]) as server, client([server.address]) as router:
        await server.stop()
        task = asyncio.create_task(router.place(router_pb2.PlaceRequest()))
        await asyncio.sleep(0.3)
        await server.start()
        assert (await task).response.decode.worker_id == "w1"


async def test_no_router_at_all_is_unavailable_in_bounded_time():
    async with client([NOWHERE, "127.0.0.1:2"]) as router:
        begin = time.monotonic()
        with pytest.raises(Unavailable, match=r"no router answered within .*127\.0\.0\.1:1: UNAVAILABLE") as caught:
            await router.place(router_pb2.PlaceRequest())
        assert time.monotonic() - begin < 10
        assert caught.value.retry_after_ms
    async with client([NOWHERE, "127.0.0.1:2"], times=replace(TIMES, total=30.0)) as router:
        begin = time.monotonic()
        with pytest.raises(Unavailable):
            await router.place(router_pb2.PlaceRequest(timeout_ms=100))
        assert time.monotonic() - begin < 10


async def test_a_full_fleet_is_reported_at_once(routers):
    for router in routers:
        router.refusal = NoCapacity("all full", retry_after_ms=250)
    async with client([router.address for router in routers]) as router:
        with pytest.raises(NoCapacity, match="all full") as caught:
            await router.place(router_pb2.PlaceRequest())
    assert caught.value.retry_after_ms == 250
    assert sum(len(router.places) for router in routers) == 1


async def test_a_new_router_without_workers_is_retried(routers):
    for router in routers:
        router.refusal = Unavailable("no live worker")
    async with client([router.address for router in routers]) as router:
        task = asyncio.create_task(router.place(router_pb2.PlaceRequest()))
        await until(lambda: all(one.places for one in routers))
        routers[0].refusal = None
        assert (await task).response.decode.worker_id == "w1"
        routers[0].refusal = Unavailable("no live worker")
        with pytest.raises(Unavailable, match="no live worker"):
            await router.place(router_pb2.PlaceRequest())


async def test_the_last_time_is_at_the_end_of_the_patience(routers):
    only = routers[0]
    only.refusal = Unavailable("no live worker")
    times = replace(TIMES, no_worker=1.0, first_delay=0.4)  # the third time would be at 1.2 s
    async with client([only.address], times=times) as router:
        begin = time.monotonic()
        with pytest.raises(Unavailable, match="no live worker"):
            await router.place(router_pb2.PlaceRequest())
        assert time.monotonic() - begin >= times.no_worker


async def test_outcomes_go_to_the_router_that_placed(routers):
    async with client([router.address for router in routers]) as router:
        placed = await router.place(router_pb2.PlaceRequest())
        used = next(one for one in routers if one.places)
        for at in range(300):
            router.report(placed, router_pb2.PlacementOutcome(placement_id=1, num_output_tokens=at))
        await until(lambda: len(used.outcomes) == 300)
        router.report(placed, router_pb2.PlacementOutcome(placement_id=2))
    # Closing sends what is left.
    assert used.outcomes[-1].placement_id == 2
    assert sum(len(one.outcomes) for one in routers) == 301


async def test_outcomes_that_a_lost_router_did_not_take_go_to_another(routers):
    counters, times = GenerationCounters(), replace(TIMES, report_retry=1.5)
    async with RouterClient([one.address for one in routers], lambda models: None, counters, times) as client:
        placed = await client.place(router_pb2.PlaceRequest())
        used = next(one for one in routers if one.places)
        other = next(one for one in routers if one is not used)
        await used.stop()
        for number in range(300):
            client.report(placed, router_pb2.PlacementOutcome(placement_id=number))
        await until(lambda: len(other.outcomes) == 300)
        await other.stop()
        client.report(placed, router_pb2.PlacementOutcome(placement_id=300))
        await until(lambda: counters.dropped_reports == 1)  # nobody took it in time
    assert not used.outcomes


async def test_outcomes_wait_for_the_only_routers_return(routers):
    only = routers[0]
    async with client([only.address]) as router:
        placed = await router.place(router_pb2.PlaceRequest())
        await only.stop()
        router.report(placed, router_pb2.PlacementOutcome(placement_id=1))
        await asyncio.sleep(0.1)  # it is tried in vain
        await only.start()
        await until(lambda: [outcome.placement_id for outcome in only.outcomes] == [1])


async def test_models_are_followed_over_a_routers_loss(routers):
    seen = []
    async with client([router.address for router in routers], lambda models: seen.append([m.name for m in models])):
        await until(lambda: seen)
        other = types_pb2.ModelInfo(name="other")
        for router in routers:
            await router.set_models([MODEL, other])
        await until(lambda: seen[-1] == ["storyteller-7m", "other"])
        num_seen = len(seen)
        await routers[0].stop()
        await routers[0].start()
        await routers[1].stop()
        await until(lambda: len(seen) > num_seen)


class AskingRouter(ScriptedRouter):
    """Calls `on_report` before it takes reports."""

    async def Report(self, request, context):  # noqa: N802
        self.on_report()
        return await super().Report(request, context)


async def test_reports_that_are_queued_during_another_wait_an_interval(worker):
    times, began = replace(TIMES, report_interval=0.05), []
    async with AskingRouter([worker]) as asking, client([asking.address], times=times) as router:
        placed = await router.place(router_pb2.PlaceRequest())

        def queue_another():
            began.append(time.monotonic())
            if len(began) < 4:
                router.report(placed, router_pb2.PlacementOutcome(placement_id=len(began)))

        asking.on_report = queue_another
        router.report(placed, router_pb2.PlacementOutcome())
        await until(lambda: len(asking.outcomes) == 4)
    assert all(later - earlier > times.report_interval / 2 for earlier, later in pairwise(began))


async def test_few_reports_wait_for_more_until_a_worker_fails(worker):
    times, began = replace(TIMES, few_reports_interval=60.0), []
    async with AskingRouter([worker]) as asking, client([asking.address], times=times) as router:
        asking.on_report = lambda: began.append(len(asking.outcomes))
        placed = await router.place(router_pb2.PlaceRequest())
        for number in range(3):
            router.report(placed, router_pb2.PlacementOutcome(placement_id=number))
            await asyncio.sleep(0.05)
        assert not began
        router.report(placed, router_pb2.PlacementOutcome(placement_id=3, worker_failed=True))
        await until(lambda: len(asking.outcomes) == 4)
    assert began == [0]


async def test_many_reports_wait_no_longer_than_an_interval(worker):
    times = replace(TIMES, few_reports_interval=60.0)
    async with AskingRouter([worker]) as asking, client([asking.address], times=times) as router:
        asking.on_report = lambda: None
        placed = await router.place(router_pb2.PlaceRequest())
        for number in range(16):
            router.report(placed, router_pb2.PlacementOutcome(placement_id=number))
        await until(lambda: len(asking.outcomes) == 16)


async def test_a_placement_that_comes_after_its_request_left_is_reported(routers):
    for router in routers:
        router.hangs = True
    async with client([routers[0].address]) as one:
        waiting = asyncio.create_task(one.place(router_pb2.PlaceRequest(model="m")))
        await until(lambda: routers[0].places)
        waiting.cancel()
        placed = router_pb2.PlaceResponse(placement_id=7)
        one._routers[0].link._take(router_pb2.PlaceAnswer(call_id=1, placed=placed))
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await until(lambda: routers[0].outcomes)
        assert {outcome.placement_id for outcome in routers[0].outcomes} == {7}


async def test_an_unknown_pinned_worker_is_refused_at_once(routers):
    for router in routers:
        router.refusal = NotFound("worker_id is 'x'; the live workers are: w1", field="worker_id")
    async with client([router.address for router in routers]) as router:
        with pytest.raises(NotFound, match="w1") as refused:
            await router.place(router_pb2.PlaceRequest(worker_id="x"))
        assert refused.value.field == "worker_id"
    assert sum(len(one.places) for one in routers) == 1
