"""A router over real gRPC, with scripted workers and a real kvstore."""

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from support.fleet.fleet_node import state
from support.fleet.kvstore_node import blocks, eventually
from support.fleet.router_views import DECODE, PREFILL

from baton.rpc.channel import open_channel
from baton.v1 import router_pb2, types_pb2


async def only_on(router, worker_id, prompt):
    """A placement where one worker may be named only."""
    others = [name for name in await router.workers() if name != worker_id]
    return await router.place(1000, prompt, excluded_worker_ids=others)


async def first_models(router):
    call = router.stub.WatchModels(router_pb2.WatchModelsRequest())
    try:
        async with asyncio.timeout(5):
            return call, (await call.read()).models
    except TimeoutError:
        call.cancel()
        raise


async def test_places_on_the_worker_that_published_the_prefix(world):
    one, two = await world.worker(state("w1")), await world.worker(state("w2"))
    kvstore = await world.kvstore()
    router = await world.router(one, two, kvstore=kvstore)
    publisher = await world.publisher(kvstore, "w2", blocks=set(range(50)))
    await world.publisher(kvstore, "w1")
    await router.until_indexed(w2=50)
    placed = await router.place(1000, blocks(*range(60)))
    assert placed.decode.worker_id == "w2"
    assert placed.decode_cached_tokens == 50 * 16
    await publisher.store(*range(50, 60))
    await router.until_indexed(w2=60)
    assert (await only_on(router, "w2", blocks(*range(60)))).decode_cached_tokens == 60 * 16
    await publisher.remove(*range(60))
    await router.until_indexed(w2=0)
    assert (await only_on(router, "w2", blocks(30))).decode_cached_tokens == 0


async def test_a_dead_worker_is_detected_at_once_and_returns(world):
    one, two = await world.worker(state("w1")), await world.worker(state("w2"))
    router = await world.router(one, two)
    seconds = []
    for epoch in (2, 3, 4):  # the quickest of them counts: a busy machine may be late
        port = one.port
        await one.stop()
        began = time.monotonic()
        await router.until_alive(1)
        seconds.append(time.monotonic() - began)
        for _ in range(4):
            assert (await router.place()).decode.worker_id == "w2"
        entry = (await router.workers())["w1"]
        assert not entry.alive
        assert entry.problem
        one = await world.worker(state("w1", epoch=epoch), port)
        await router.until_alive(2)
        assert (await router.workers())["w1"].state.epoch == epoch
    assert min(seconds) < 0.3


async def test_a_worker_that_hangs_is_dead_after_three_intervals(world):
    worker = await world.worker(state("w1"))
    router = await world.router(worker, state_interval_ms=100)
    seconds = []
    for _ in range(3):  # the quickest of them counts: a busy machine may be late
        worker.silent = True
        began = time.monotonic()
        await router.until_alive(0)
        seconds.append(time.monotonic() - began)
        assert "no state for 0.3 s" in (await router.workers())["w1"].problem
        worker.silent = False
        await router.until_alive(1)
    assert 0.2 < min(seconds) < 1.5


async def test_a_new_epoch_ends_the_old_entries_without_waiting_for_the_kvstore(world):
    worker = await world.worker(state("w1"))
    kvstore = await world.kvstore()
    router = await world.router(worker, kvstore=kvstore)
    publisher = await world.publisher(kvstore, "w1", blocks=set(range(50)))
    await router.until_indexed(w1=50)
    worker.publish(state("w1", epoch=2))
    await router.until_indexed(w1=0)
    publisher.epoch, publisher.sequence, publisher.blocks = 2, 0, {1}
    await publisher.snapshot()
    await publisher.store(2)
    await router.until_indexed(w1=2)
    assert (await router.place(1000, blocks(1, 2))).decode_cached_tokens == 32


async def test_without_its_kvstore_a_router_uses_its_index_and_follows_the_next_one(world):
    worker = await world.worker(state("w1"))
    kvstore = await world.kvstore()
    router = await world.router(worker, kvstore=kvstore)
    publisher = await world.publisher(kvstore, "w1", blocks=set(range(50)))
    await router.until_indexed(w1=50)
    await kvstore.end()
    await asyncio.sleep(0.2)
    assert (await router.place(1000, blocks(*range(50)))).decode_cached_tokens == 50 * 16
    again = await world.kvstore(kvstore.address)
    await router.until_indexed(w1=0)  # the new one has not heard the worker yet: nobody vouches for it
    publisher.blocks |= {77}
    await world.publisher(again, "w1", blocks=publisher.blocks, sequence=5)
    await router.until_indexed(w1=51)


async def test_a_worker_that_the_kvstore_forgets_has_no_entries(world):
    worker = await world.worker(state("w1"))
    kvstore = await world.kvstore(lease_ms=300)
    router = await world.router(worker, kvstore=kvstore)
    publisher = await world.publisher(kvstore, "w1", blocks=set(range(50)))
    await router.until_indexed(w1=50)
    await publisher.close()
    await router.until_indexed(w1=0)


async def test_a_restarted_router_is_complete_within_a_second(world):
    worker = await world.worker(state("w1"))
    kvstore = await world.kvstore()
    await world.publisher(kvstore, "w1", blocks=set(range(20_000)))
    seconds = []
    for _ in range(3):  # the quickest of them counts: a busy machine may be late
        router = await world.router(worker, kvstore=kvstore)
        began = time.monotonic()
        await router.until_indexed(w1=20_000)
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 1


async def test_a_burst_of_64_with_one_prefix_spreads_and_shares(world):
    workers = [await world.worker(state(f"w{number}")) for number in range(4)]
    kvstore = await world.kvstore()
    router = await world.router(*workers, kvstore=kvstore)
    await world.publisher(kvstore, "w0", blocks=set(range(100)))
    await router.until_indexed(w0=100)
    prompt = blocks(*range(106))
    placed = await asyncio.gather(*(router.place(1700, prompt, request_id=f"r{n}") for n in range(64)))
    used = [one.decode.worker_id for one in placed]
    assert set(used) == {"w0", "w1", "w2", "w3"}
    assert max(map(used.count, used)) <= 32
    assert sum(one.decode_cached_tokens > 0 for one in placed) >= 60
    in_flight = {name: entry.num_in_flight for name, entry in (await router.workers()).items()}
    assert sum(in_flight.values()) == 64 + sum(one.HasField("prefill") for one in placed)
    outcomes = [router_pb2.PlacementOutcome(placement_id=one.placement_id) for one in placed]
    await router.stub.Report(router_pb2.ReportRequest(outcomes=outcomes))
    assert all(entry.num_in_flight == 0 for entry in (await router.workers()).values())


async def test_a_mismatched_pair_is_not_used_and_is_reported(world):
    decode = await world.worker(state("d", DECODE, num_running=60))
    prefill = await world.worker(state("p", PREFILL, digest=b"x" * 16))
    router = await world.router(decode, prefill)
    assert not (await router.place(8000)).HasField("prefill")
    problem = (await router.workers())["p"].problem
    assert (b"x" * 16).hex() in problem
    assert (b"d" * 16).hex() in problem


async def test_models_are_sent_at_once_and_at_every_change(world):
    worker = await world.worker(state("w1"))
    router = await world.router(worker)
    call, models = await first_models(router)
    assert [model.name for model in models] == ["m"]
    await worker.stop()
    async with asyncio.timeout(10):
        assert list((await call.read()).models) == []
    await world.worker(state("w1", name="other"), worker.port)
    async with asyncio.timeout(5):
        assert [model.name for model in (await call.read()).models] == ["other"]
    call.cancel()


async def test_cordon_and_uncordon(world):
    router = await world.router(await world.worker(state("w1")), await world.worker(state("w2")))
    await router.stub.Cordon(router_pb2.CordonRequest(worker_id="w1"))
    assert (await router.workers())["w1"].cordoned
    assert {(await router.place()).decode.worker_id for _ in range(4)} == {"w2"}
    await router.stub.Uncordon(router_pb2.UncordonRequest(worker_id="w1"))
    assert not (await router.workers())["w1"].cordoned
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await router.stub.Cordon(router_pb2.CordonRequest(worker_id="nobody"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_errors_have_their_status_and_no_worker_listening_is_no_hang(world):
    router = await world.router("127.0.0.1:1")
    for fields, code in (
        ({}, grpc.StatusCode.UNAVAILABLE),
        ({"model": "x"}, grpc.StatusCode.UNAVAILABLE),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.place(**fields)
        assert error.value.code() is code
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await router.stub.Explain(router_pb2.ExplainRequest())
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (entry,) = (await router.workers()).values()
    assert not entry.alive
    assert "UNAVAILABLE" in entry.problem


async def test_it_serves_health_reflection_and_error_details(world):
    router = await world.router("127.0.0.1:1")
    async with open_channel(router.address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=5)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        told = {service.name for service in (await call.read()).list_services_response.service}
        assert {"baton.v1.RouterService", "baton.v1.RouterPeerService", "grpc.health.v1.Health"} <= told
        call.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await router.stub.Explain(router_pb2.ExplainRequest())
    detail = types_pb2.ErrorDetail()
    assert any(packed.Unpack(detail) for packed in rpc_status.from_call(error.value).details)
    assert detail.field == "placement_id"


async def test_full_queues_are_refused_with_a_retry_time(world):
    worker = await world.worker(state("w1", num_running=64, queue_depth=4))
    router = await world.router(worker, max_queue_depth=4)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await router.place()
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    worker.publish(queue_depth=0, num_running=1)

    async def placed():
        try:
            return await router.place()
        except grpc.aio.AioRpcError:
            return None

    await eventually(placed, "room again")


async def test_explains_a_placement_by_request_and_by_id(world):
    router = await world.router(await world.worker(state("w1")))
    placed = await router.place(request_id="why")
    explained = await router.stub.Explain(router_pb2.ExplainRequest(request_id="why"))
    assert explained.response.candidates[0].decode_worker_id == "w1"
    explained.response.ClearField("candidates")
    assert explained.response == placed


async def test_an_end_with_open_streams_is_quick(world):
    router = await world.router(await world.worker(state("w1")))
    call, _ = await first_models(router)
    async with asyncio.timeout(8):
        await router.end()
    call.cancel()
