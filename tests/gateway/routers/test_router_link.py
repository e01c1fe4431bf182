"""One stream to a router: batched messages, cancellation, losses, routers without streams, killed routers."""

import asyncio
import contextlib
import sys

import grpc
import psutil
import pytest
from support.fleet.fleet_node import ScriptedWorker as FleetWorker
from support.fleet.fleet_node import state
from support.gateway.scripted_services import ScriptedRouter, ScriptedWorker, until
from support.processes import ports

from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.routers.client import RouterClient, RouterTimes
from baton.gateway.routers.link import NotPlaced, RouterLink
from baton.rpc.errors import NoCapacity
from baton.v1 import router_pb2

REQUEST = router_pb2.PlaceRequest(model="m", num_prompt_tokens=100, max_tokens=10)


@pytest.fixture
async def router():
    async with ScriptedWorker("w1", lambda request: []) as worker, ScriptedRouter([worker]) as router:
        yield router


@pytest.fixture
async def link(router):
    link = RouterLink(router.address)
    yield link
    await link.close()


@pytest.fixture
async def cleanup():
    async with contextlib.AsyncExitStack() as cleanup:
        yield cleanup


async def test_requests_of_one_turn_go_in_one_message_on_one_stream(router, link):
    await asyncio.gather(*(link.place(REQUEST, 5) for _ in range(50)))
    assert [len(message.entries) for message in router.stream_messages] == [50]
    assert all(0 < entry.timeout_ms <= 5000 for entry in router.stream_messages[0].entries)
    await link.place(REQUEST, 5)
    assert router.num_streams == 1


async def test_placements_of_background_requests_wait_for_each_other_until_an_urgent_one_comes(
    router, link, monkeypatch
):
    monkeypatch.setattr("baton.gateway.routers.link._PATIENCE_SECONDS", 0.3)
    background = router_pb2.PlaceRequest(model="m", num_prompt_tokens=100, max_tokens=10, priority=1000)
    await link.place(background, 5)
    first = asyncio.create_task(link.place(background, 5))
    for _ in range(5):
        await asyncio.sleep(0.001)
    await asyncio.gather(first, *(link.place(background, 5) for _ in range(3)))
    waits = asyncio.create_task(link.place(background, 5))
    await asyncio.sleep(0)
    await link.place(REQUEST, 5)
    await waits
    assert [len(message.entries) for message in router.stream_messages] == [1, 4, 2]


async def test_a_background_placement_that_is_cancelled_while_it_waits_is_never_sent(router, link):
    background = router_pb2.PlaceRequest(model="m", priority=1000)
    await link.place(REQUEST, 5)
    waits = asyncio.create_task(link.place(background, 5))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    await asyncio.sleep(0.05)
    await link.place(REQUEST, 5)
    assert len(router.places) == 2


async def test_a_stream_that_cannot_be_written_ends(link, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(link, "_take_unsent", lambda: 1 / 0)
        with pytest.raises(NotPlaced, match="the stream was closed"):
            await link.place(REQUEST, 60)
    await link.place(REQUEST, 60)


async def test_much_goes_in_several_messages(router, link):
    request = router_pb2.PlaceRequest(model="m", block_hashes=bytes(50 << 10))
    await asyncio.gather(*(link.place(request, 20) for _ in range(5)))
    assert [len(message.entries) for message in router.stream_messages] == [2, 2, 1]


async def test_short_prompts_do_not_wait_for_long_ones(router, link):
    sizes = [90, 0, 100, 1, 110]
    requests = [router_pb2.PlaceRequest(model="m", block_hashes=bytes(size << 10)) for size in sizes]
    await asyncio.gather(*(link.place(request, 20) for request in requests))
    sent = [[len(entry.place.block_hashes) >> 10 for entry in one.entries] for one in router.stream_messages]
    assert sent == [[0, 1, 90], [100], [110]]


async def test_an_abandoned_placement_is_cancelled_at_the_router(router, link):
    router.hangs = True
    waiting = asyncio.create_task(link.place(REQUEST, 5))
    await until(lambda: router.places)
    with pytest.raises(NotPlaced, match="DEADLINE_EXCEEDED") as late:
        await link.place(REQUEST, 0.05)
    assert not late.value.refused
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: sum(one.HasField("cancel") for sent in router.stream_messages for one in sent.entries) == 2)
    router.hangs = False
    await link.place(REQUEST, 5)


@pytest.mark.parametrize("answered_first", [False, True])
async def test_an_abandoned_placement_is_released(router, answered_first):
    given_back = []
    link = RouterLink(router.address, on_unwanted=given_back.append)
    router.hangs = True
    waiting = asyncio.create_task(link.place(REQUEST, 20))
    await until(lambda: router.places)
    placed = router_pb2.PlaceResponse(placement_id=7)
    answer = router_pb2.PlaceAnswer(call_id=1, placed=placed)
    if answered_first:
        link._take(answer)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not answered_first:
        link._take(answer)
    assert given_back == [placed]
    await link.close()


async def test_cancelled_placements_are_not_sent(router, link):
    waiting = asyncio.create_task(link.place(REQUEST, 5))
    await asyncio.sleep(0)  # the stream is not open yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await link.place(REQUEST, 5)
    assert len(router.places) == 1


async def test_a_refusal_is_the_routers_own_and_a_loss_is_not(router, link):
    router.refusal = NoCapacity("all full", retry_after_ms=250)
    with pytest.raises(NotPlaced) as refused:
        await link.place(REQUEST, 5)
    assert (refused.value.refused, refused.value.error.retry_after_ms) == (True, 250)
    router.refusal, router.hangs = None, True
    waiting = asyncio.create_task(link.place(REQUEST, 5))
    await until(lambda: len(router.places) == 2)
    await router.stop()
    with pytest.raises(NotPlaced) as lost:
        await waiting
    assert (lost.value.refused, lost.value.error.code) == (False, grpc.StatusCode.UNAVAILABLE)


async def test_a_router_without_streams_is_asked_call_by_call_until_another_one_is_there(router, link):
    router.unary_only = True
    await asyncio.gather(*(link.place(REQUEST, 5) for _ in range(10)))
    assert (len(router.places), router.num_streams) == (10, 0)
    await router.stop()
    with pytest.raises(NotPlaced, match="UNAVAILABLE"):
        await link.place(REQUEST, 5)
    router.unary_only = False
    await router.start()
    async with asyncio.timeout(10):
        while not router.num_streams:
            with contextlib.suppress(NotPlaced):
                await link.place(REQUEST, 5)
            await asyncio.sleep(0.02)


async def test_a_killed_router_is_replaced_and_taken_again_when_it_is_back(cleanup):
    addresses = [f"127.0.0.1:{port}" for port in ports.free_ports(2)]
    worker = await FleetWorker(state("w1")).start()
    cleanup.push_async_callback(worker.stop)

    def end(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait(10)

    def start(address):
        words = ("router", "--listen", address, "--workers", worker.address)
        process = psutil.Popen([sys.executable, "-m", "baton.services.cli", *words])
        cleanup.callback(end, process)
        return process

    processes = {address: start(address) for address in addresses}
    times = RouterTimes(attempt=5.0, total=40.0, no_worker=40.0)
    client = RouterClient(addresses, lambda models: None, GenerationCounters(), times)
    await cleanup.enter_async_context(client)
    lost = (await client.place(REQUEST)).router.link.address
    (other,) = set(addresses) - {lost}
    waiting = [asyncio.create_task(client.place(REQUEST)) for _ in range(200)]
    await asyncio.sleep(0)
    processes[lost].kill()
    answers = await asyncio.gather(*waiting)
    assert {one.response.decode.worker_id for one in answers} == {"w1"}
    assert (await client.place(REQUEST)).router.link.address == other
    processes[lost].wait()
    start(lost)
    processes[other].kill()
    assert (await client.place(REQUEST)).router.link.address == lost
