"""gRPC within a process: the same answers, errors and ends as over a socket, which is the oracle."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from baton.rpc.channel import open_channel
from baton.rpc.errors import NoCapacity, error_from_rpc
from baton.rpc.in_process import InProcessServer
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc


class Control(control_pb2_grpc.ControlServiceServicer):
    async def Drain(self, request, context):  # noqa: N802
        if request.timeout_ms == 1:
            raise NoCapacity("full", field="timeout_ms", retry_after_ms=7)
        if request.timeout_ms == 2:
            raise ZeroDivisionError("a defect")
        if request.timeout_ms == 3:
            await asyncio.sleep(30)
        return control_pb2.DrainResponse(num_requests=request.timeout_ms)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self):
        self.num_ended = 0
        self.ended = asyncio.Event()

    async def GenerateStream(self, requests, context):  # noqa: N802
        context.add_done_callback(lambda _: self.count())
        async for request in requests:
            if request.ping == 99:
                raise NoCapacity("no more", retry_after_ms=5)
            yield worker_pb2.GenerateStreamResponse(pong=request.ping)

    def count(self):
        self.num_ended += 1
        self.ended.set()


@pytest.fixture(params=["process", "socket"])
async def side(request):
    """A channel to the services, and the worker's servicer."""
    control, worker = Control(), Worker()
    if request.param == "process":
        server = InProcessServer()
        control_pb2_grpc.add_ControlServiceServicer_to_server(control, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        channel = server.connect()
        yield channel, worker
        await channel.close()
        return
    services = (
        Service("baton.v1.ControlService", control, control_pb2_grpc.add_ControlServiceServicer_to_server),
        Service("baton.v1.WorkerService", worker, worker_pb2_grpc.add_WorkerServiceServicer_to_server),
    )
    async with RpcServer("127.0.0.1:0", services) as server:
        channel = open_channel(f"127.0.0.1:{server.port}")
        yield channel, worker
        await channel.close()


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value, "the service")


async def test_a_call_is_answered(side):
    stub = control_pb2_grpc.ControlServiceStub(side[0])
    assert (await stub.Drain(control_pb2.DrainRequest(timeout_ms=9), timeout=5)).num_requests == 9


async def test_errors_keep_their_code_field_and_delay(side):
    error = await failure(control_pb2_grpc.ControlServiceStub(side[0]).Drain(control_pb2.DrainRequest(timeout_ms=1)))
    assert isinstance(error, NoCapacity)
    assert (error.message, error.field, error.retry_after_ms) == ("full", "timeout_ms", 7)


async def test_a_defect_is_an_internal_error_without_its_message(side):
    error = await failure(control_pb2_grpc.ControlServiceStub(side[0]).Drain(control_pb2.DrainRequest(timeout_ms=2)))
    assert error.code is grpc.StatusCode.INTERNAL
    assert "a defect" not in error.message


async def test_a_late_answer_is_a_deadline(side):
    stub = control_pb2_grpc.ControlServiceStub(side[0])
    error = await failure(stub.Drain(control_pb2.DrainRequest(timeout_ms=3), timeout=0.05))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_unknown_method_is_unimplemented(side):
    call = side[0].unary_unary("/baton.v1.Nothing/Here", bytes, bytes)
    with pytest.raises(Exception, match=r"(?i)unimplemented|has the method") as caught:
        await call(b"")
    assert caught.value is not None


async def test_a_stream_answers_each_message_in_order(side):
    channel, worker = side
    call = worker_pb2_grpc.WorkerServiceStub(channel).GenerateStream()
    answers = aiter(call)
    for number in range(1, 40):
        await call.write(worker_pb2.GenerateStreamRequest(ping=number))
        assert (await anext(answers)).pong == number
    await call.done_writing()
    with pytest.raises(StopAsyncIteration):
        await anext(answers)
    async with asyncio.timeout(5):
        await worker.ended.wait()
    assert worker.num_ended == 1


async def test_a_streams_error_reaches_its_reader(side):
    call = worker_pb2_grpc.WorkerServiceStub(side[0]).GenerateStream()
    await call.write(worker_pb2.GenerateStreamRequest(ping=99))
    error = await failure(anext(aiter(call)))
    assert (type(error), error.message, error.retry_after_ms) == (NoCapacity, "no more", 5)


async def test_a_cancelled_stream_ends_at_the_servicer(side):
    channel, worker = side
    call = worker_pb2_grpc.WorkerServiceStub(channel).GenerateStream()
    await call.write(worker_pb2.GenerateStreamRequest(ping=1))
    await anext(aiter(call))
    call.cancel()
    async with asyncio.timeout(5):
        await worker.ended.wait()
    with contextlib.suppress(asyncio.CancelledError), pytest.raises((asyncio.InvalidStateError, grpc.aio.AioRpcError)):
        await call.write(worker_pb2.GenerateStreamRequest(ping=2))
