"""The front alone, before a engine that the test plays: streams that lag, end, or come too early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from support.processes.worker_harness import submit

from baton.rpc.block_hash import hash_blocks
from baton.rpc.channel import open_channel
from baton.rpc.errors import Mismatch, ServiceError, Unavailable, status_of
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from baton.worker.front.worker_service import SERVICE_NAME, WorkerFront
from baton.worker.link.frames import Kind
from baton.worker.link.prompts import KnownPrompt, split_prompts


class FakeEngine:
    """Records the front's messages. The test sets the engine's answers."""

    def __init__(self) -> None:
        self.is_ready = True
        self.stalled = False
        self.progress = 0
        self.num_probes = 0
        self.sent: asyncio.Queue[tuple[int, int, bytes]] = asyncio.Queue()
        self.handlers: dict[int, Callable[[int, bytes], None]] = {}
        self.lose: Callable[[ServiceError], None]

    def on(self, kind: int, handler: Callable[[int, bytes], None]) -> None:
        self.handlers[kind] = handler

    def on_stall(self, hook: Callable[[bool], None]) -> None:
        self.tell_stall = hook

    def on_lost(self, hook: Callable[[ServiceError], None]) -> None:
        self.lose = hook

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        self.sent.put_nowait((kind, channel, payload))

    async def writable(self) -> None:
        return

    def probe(self) -> None:
        self.num_probes += 1

    async def expect(self, kind: int) -> tuple[int, bytes]:
        async with asyncio.timeout(5):
            got, channel, payload = await self.sent.get()
        assert got == kind, f"{Kind(got).name} came, not {Kind(kind).name}"
        return channel, payload


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def stub(engine: FakeEngine) -> AsyncIterator[worker_pb2_grpc.WorkerServiceStub]:
    front = WorkerFront(engine)
    services = (Service(SERVICE_NAME, front, WorkerFront.register),)
    server = RpcServer("127.0.0.1:0", services, grace_seconds=0.0)
    async with server, open_channel(f"127.0.0.1:{server.port}") as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)


def frame(step: int, *slots: int) -> bytes:
    return worker_pb2.GenerateStreamResponse(step=step, slots=slots, token_ids=slots).SerializeToString()


async def test_messages_reach_the_engine_behind_their_prompts(stub, engine: FakeEngine) -> None:
    model = types_pb2.ModelInfo(block_size=4, max_model_len=100)
    state = worker_pb2.WatchStateResponse(state=worker_pb2.WorkerState(model=model))
    engine.handlers[Kind.STATE](0, state.SerializeToString())
    call = stub.GenerateStream()
    request = worker_pb2.GenerateStreamRequest(submits=[submit(0, [5, 6, 7, 8, 9]), submit(1, [5])])
    await call.write(request)
    channel, _ = await engine.expect(Kind.GENERATE_OPEN)
    got, payload = await engine.expect(Kind.GENERATE_HASHED)
    hashes = hash_blocks(request.submits[0].cache_namespace, [5, 6, 7, 8], 4)
    assert got == channel
    assert split_prompts(payload) == (request.SerializeToString(), [KnownPrompt(b"", hashes), KnownPrompt()])
    aborts = worker_pb2.GenerateStreamRequest(aborts=[1])
    await call.write(aborts)
    assert await engine.expect(Kind.GENERATE) == (channel, aborts.SerializeToString())
    call.cancel()


async def test_bytes_pass_in_both_directions_and_the_close_is_reported(stub, engine: FakeEngine) -> None:
    call = stub.GenerateStream()
    request = worker_pb2.GenerateStreamRequest(aborts=[4])
    await call.write(request)
    channel, _ = await engine.expect(Kind.GENERATE_OPEN)
    assert await engine.expect(Kind.GENERATE) == (channel, request.SerializeToString())
    engine.handlers[Kind.GENERATE_PLAIN](channel, frame(1, 4))
    assert list((await call.read()).slots) == [4]
    call.cancel()
    assert await engine.expect(Kind.GENERATE_CLOSE) == (channel, b"")


async def test_a_client_that_stops_writing_ends_its_stream(stub, engine: FakeEngine) -> None:
    call = stub.GenerateStream()
    await call.done_writing()
    channel, _ = await engine.expect(Kind.GENERATE_OPEN)
    assert await engine.expect(Kind.GENERATE_CLOSE) == (channel, b"")
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_before_the_engine_is_ready_is_unavailable(stub, engine: FakeEngine) -> None:
    engine.is_ready = False
    assert await stub.GenerateStream().code() is grpc.StatusCode.UNAVAILABLE
    assert await stub.WatchState(worker_pb2.WatchStateRequest()).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_lost_engine_ends_every_stream_at_once(stub, engine: FakeEngine) -> None:
    engine.handlers[Kind.STATE](0, worker_pb2.WatchStateResponse().SerializeToString())
    calls = [stub.GenerateStream(), stub.PrefillStream()]
    for _ in calls:
        await engine.sent.get()
    watch = stub.WatchState(worker_pb2.WatchStateRequest(max_interval_ms=60_000))
    await watch.read()
    engine.lose(Unavailable("the worker's engine ended"))
    async with asyncio.timeout(10):
        for call in (*calls, watch):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert await stub.GenerateStream().code() is grpc.StatusCode.UNAVAILABLE


async def test_the_engine_may_refuse_a_peer_with_a_status(stub, engine: FakeEngine) -> None:
    call = stub.PrefillStream()
    channel, _ = await engine.expect(Kind.PREFILL_OPEN)
    engine.handlers[Kind.PREFILL](channel, worker_pb2.PrefillStreamResponse().SerializeToString())
    status = status_of(Mismatch("block_size is 16 here and 32 there")).SerializeToString()
    engine.handlers[Kind.PREFILL_CLOSE](channel, status)
    await call.read()
    assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "block_size" in await call.details()


async def test_a_slow_reader_gets_every_token_in_fewer_frames(stub, engine: FakeEngine) -> None:
    call = stub.GenerateStream()
    await call.wait_for_connection()
    channel, _ = await engine.expect(Kind.GENERATE_OPEN)
    slots = tuple(range(256))
    for step in range(1, 1001):
        engine.handlers[Kind.GENERATE_PLAIN](channel, frame(step, *slots))
    num_frames, num_tokens, step = 0, 0, 0
    while step < 1000:
        message = await call.read()
        num_frames, num_tokens, step = num_frames + 1, num_tokens + len(message.token_ids), message.step
    assert num_tokens == 256_000
    assert num_frames < 100
    call.cancel()


async def test_a_reader_too_far_behind_is_cut_and_its_requests_closed(stub, engine: FakeEngine) -> None:
    call = stub.GenerateStream()
    channel, _ = await engine.expect(Kind.GENERATE_OPEN)
    big = frame(1, *range(4000))
    for _ in range(600):
        engine.handlers[Kind.GENERATE](channel, big)
    assert await engine.expect(Kind.GENERATE_CLOSE) == (channel, b"")
    async with asyncio.timeout(5):
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_state_is_repeated_at_the_interval_and_sent_when_it_changes(stub, engine: FakeEngine) -> None:
    def state(epoch: int) -> bytes:
        return worker_pb2.WatchStateResponse(state=worker_pb2.WorkerState(epoch=epoch)).SerializeToString()

    engine.handlers[Kind.STATE](0, state(1))
    watch = stub.WatchState(worker_pb2.WatchStateRequest(max_interval_ms=100))
    async with asyncio.timeout(10):
        assert [(await watch.read()).state.epoch for _ in range(3)] == [1, 1, 1]
    slow = stub.WatchState(worker_pb2.WatchStateRequest(max_interval_ms=60_000))
    assert (await slow.read()).state.epoch == 1
    engine.handlers[Kind.STATE](0, state(2))
    async with asyncio.timeout(10):
        assert (await slow.read()).state.epoch == 2
    watch.cancel()
    slow.cancel()


async def test_a_ping_is_answered_by_the_front_and_the_engine_looked_at(stub, engine: FakeEngine) -> None:
    engine.progress = 41
    call = stub.GenerateStream()
    await call.write(worker_pb2.GenerateStreamRequest(ping=7))
    answer = await call.read()
    assert answer == worker_pb2.GenerateStreamResponse(pong=7, progress=41)
    assert engine.num_probes == 1
    both = worker_pb2.GenerateStreamRequest(aborts=[1], ping=8)
    await call.write(both)
    channel, _ = await engine.expect(Kind.GENERATE_OPEN)
    assert await engine.expect(Kind.GENERATE) == (channel, both.SerializeToString())
    call.cancel()


async def test_a_stalled_device_is_reported_on_every_stream_in_every_pong_and_in_the_state(
    stub, engine: FakeEngine
) -> None:
    engine.handlers[Kind.STATE](0, worker_pb2.WatchStateResponse().SerializeToString())
    generate, prefill = stub.GenerateStream(), stub.PrefillStream()
    for _ in range(2):
        await engine.sent.get()
    watch = stub.WatchState(worker_pb2.WatchStateRequest(max_interval_ms=60_000))
    assert not (await watch.read()).state.stalled
    engine.stalled = True
    engine.tell_stall(True)
    async with asyncio.timeout(5):
        assert (await generate.read()).stalled
        assert (await prefill.read()).WhichOneof("message") == "stalled"
        assert (await watch.read()).state.stalled
        await generate.write(worker_pb2.GenerateStreamRequest(ping=3))
        pong = await generate.read()
        assert (pong.pong, pong.stalled) == (3, True)
        assert (await stub.GenerateStream().read()).stalled
        engine.stalled = False
        engine.tell_stall(False)
        assert not (await watch.read()).state.stalled
    for call in (generate, prefill, watch):
        call.cancel()
