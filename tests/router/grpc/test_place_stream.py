"""PlaceStream of a real router over real gRPC: the same answers as Place, errors apart, ends that cancel."""

import asyncio
import contextlib

import grpc
import pytest
from support.fleet.fleet_node import state
from support.fleet.kvstore_node import blocks, eventually

from baton.gateway.routers.link import NotPlaced, RouterLink
from baton.v1 import router_pb2


@contextlib.asynccontextmanager
async def linked(router):
    link = RouterLink(router.address)
    try:
        yield link
    finally:
        await link.close()


def request(number=0, **fields):
    values = {"request_id": f"r{number}", "model": "m", "num_prompt_tokens": 1000, "max_tokens": 10}
    return router_pb2.PlaceRequest(**{**values, **fields})


def entry(call_id, **fields):
    return router_pb2.PlaceEntry(call_id=call_id, place=request(call_id, **fields))


async def messages_of(call):
    async with asyncio.timeout(5):
        return await call.read()


async def test_a_thousand_at_once_are_answered_as_one_by_one(world):
    names = [f"w{number}" for number in range(4)]
    workers = [await world.worker(state(name)) for name in names]
    kvstore = await world.kvstore()
    router = await world.router(*workers, kvstore=kvstore)
    for name in names:
        await world.publisher(kvstore, name, blocks=set(range(50)))
    await router.until_indexed(**dict.fromkeys(names, 50))

    def asked(number):
        # One worker may be named only, and no two requests share blocks that no worker has, so that an answer does not
        # depend on the others or on their order: short prompts are sent first.
        length = number % 60
        fields = {
            "block_hashes": blocks(*range(min(length, 50)), *(1000 + 60 * number + at for at in range(50, length))),
            "model": "m" if number % 10 else "unknown",
            "excluded_worker_ids": [name for name in names if name != names[number % 4]],
        }
        return request(number, **fields)

    async def alone(number):
        try:
            response = await router.stub.Place(asked(number), timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details(), 0
        placed.append(response.placement_id)
        return grpc.StatusCode.OK, response.decode.worker_id, response.decode_cached_tokens

    async def on_stream(link, number):
        try:
            response = await link.place(asked(number), timeout=60)
        except NotPlaced as failed:
            return failed.error.code, failed.error.message, 0
        placed.append(response.placement_id)
        return grpc.StatusCode.OK, response.decode.worker_id, response.decode_cached_tokens

    placed = []
    expected = await asyncio.gather(*map(alone, range(1000)))
    outcomes = [router_pb2.PlacementOutcome(placement_id=one) for one in placed]
    await router.stub.Report(router_pb2.ReportRequest(outcomes=outcomes))
    async with linked(router) as link:
        told = await asyncio.gather(*(on_stream(link, number) for number in range(1000)))
    assert told == expected
    assert {code for code, _, _ in told} == {grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND}
    assert len(set(placed)) == len(placed) == 2 * 900


async def test_errors_have_their_details_and_the_stream_continues(world):
    worker = await world.worker(state("w1", num_running=64, queue_depth=4))
    router = await world.router(worker, max_queue_depth=4)
    async with linked(router) as link:
        for fields in ({}, {"model": "unknown"}, {"block_hashes": b"odd"}):
            with pytest.raises(NotPlaced) as on_stream:
                await link.place(request(**fields), timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as alone:
                await router.stub.Place(request(**fields), timeout=5)
            assert on_stream.value.error.code is alone.value.code()
            assert on_stream.value.error.message == alone.value.details()
            if not fields:
                assert on_stream.value.error.retry_after_ms
        worker.publish(queue_depth=0, num_running=1)

        async def placed():
            with contextlib.suppress(NotPlaced):
                return await link.place(request(), timeout=5)

        await eventually(placed, "room again")


async def test_a_cancel_behind_its_entry_leaves_no_placement(world):
    router = await world.router(await world.worker(state("w1")))
    call = router.stub.PlaceStream()
    cancel = router_pb2.PlaceEntry(call_id=1, cancel=router_pb2.PlaceCancel())
    await call.write(router_pb2.PlaceStreamRequest(entries=[entry(1), entry(2), cancel]))
    assert [answer.call_id for answer in (await messages_of(call)).answers] == [2]
    assert (await router.workers())["w1"].num_in_flight == 1
    call.cancel()


async def test_a_misused_call_id_ends_its_own_stream_only(world):
    router = await world.router(await world.worker(state("w1")))
    good, bad = router.stub.PlaceStream(), router.stub.PlaceStream()
    await bad.write(router_pb2.PlaceStreamRequest(entries=[entry(1), entry(1)]))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await messages_of(bad)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await good.write(router_pb2.PlaceStreamRequest(entries=[entry(1)]))
    assert (await messages_of(good)).answers[0].placed.decode.worker_id == "w1"
    await good.done_writing()
    assert await messages_of(good) is grpc.aio.EOF


async def test_a_routers_end_ends_the_stream_in_time(world):
    router = await world.router(await world.worker(state("w1")))
    async with linked(router) as link:
        await link.place(request(), timeout=5)
        async with asyncio.timeout(8):
            await router.end()
        with pytest.raises(NotPlaced) as lost:
            await link.place(request(), timeout=5)
    assert lost.value.error.code is grpc.StatusCode.UNAVAILABLE
