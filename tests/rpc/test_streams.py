"""How a server's stream ends: its handler cleans up, and nothing is left of the call."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from baton.rpc.errors import NoCapacity
from baton.rpc.server.server import RpcServer, Service

NAME = "test.Counting"
LARGE = bytes(1 << 20)


class Held:
    """What a handler's frame holds."""


class Counting:
    """Streams; `frames` are the handlers that have not gone, `open` those that have not cleaned up."""

    def __init__(self) -> None:
        self.open = 0
        self.cleaned = asyncio.Event()
        self.frames: weakref.WeakSet[Held] = weakref.WeakSet()

    async def count(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Counts to the number in the request."""
        held = Held()
        self.frames.add(held)
        self.open += 1
        try:
            for number in range(int(request)):
                yield b"%d" % number
        finally:
            await asyncio.sleep(0)  # a cleanup may wait
            self.open -= 1
            self.cleaned.set()

    async def wait(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Answers once, and waits for ever."""
        async for message in self.count(b"1", context):
            yield message
            await asyncio.Event().wait()

    async def flood(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Answers more than a client that does not read takes."""
        async for _ in self.count(b"1000", context):
            yield LARGE

    async def fail(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Answers once, and fails."""
        async for message in self.count(b"1", context):
            yield message
            raise NoCapacity("no more")


def register(servicer: Counting, server: grpc.aio.Server) -> None:
    behaviors = {"Count": servicer.count, "Wait": servicer.wait, "Flood": servicer.flood, "Fail": servicer.fail}
    methods = {name: grpc.unary_stream_rpc_method_handler(behavior) for name, behavior in behaviors.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, methods),))


@pytest.fixture
async def servicer() -> Counting:
    return Counting()


@pytest.fixture
async def channel(servicer, caplog):
    """A channel to a server of `servicer`. When it closes, no call has left a task, a frame or a line of a log."""
    gc.collect()
    gc.disable()
    try:
        async with RpcServer("127.0.0.1:0", [Service(NAME, servicer, register)]) as server:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                await channel.channel_ready()
                before = tasks()
                yield channel
            await until(lambda: not servicer.frames and servicer.open == 0)
            await until(lambda: tasks() <= before)
        assert not caplog.records
    finally:
        gc.enable()


def tasks() -> set[str]:
    return {task.get_coro().__qualname__ for task in asyncio.all_tasks() - {asyncio.current_task()}}


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not true within 5 s")


async def test_a_client_that_reads_to_the_end_gets_all_and_the_status_ok(channel, servicer):
    call = channel.unary_stream(f"/{NAME}/Count")(b"300", timeout=10)
    assert [int(message) async for message in call] == list(range(300))
    assert await call.code() == grpc.StatusCode.OK
    assert await call.details() == ""
    assert servicer.open == 0, "the handler cleans up before the client sees the end"


async def test_a_stream_of_nothing_ends_well(channel, servicer):
    call = channel.unary_stream(f"/{NAME}/Count")(b"0", timeout=10)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
    assert servicer.cleaned.is_set()


async def test_streams_of_one_channel_end_each_on_its_own(channel, servicer):
    waiting = channel.unary_stream(f"/{NAME}/Wait")(b"")
    assert await waiting.read() == b"0"
    call = channel.unary_stream(f"/{NAME}/Count")(b"3", timeout=10)
    assert len([message async for message in call]) == 3
    assert servicer.open == 1
    assert not waiting.done()
    waiting.cancel()


async def test_a_client_that_cancels_ends_a_handler_that_waits(channel, servicer):
    call = channel.unary_stream(f"/{NAME}/Wait")(b"")
    assert await call.read() == b"0"
    assert servicer.open == 1
    assert call.cancel()
    await asyncio.wait_for(servicer.cleaned.wait(), 5)
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    assert await call.code() == grpc.StatusCode.CANCELLED


async def test_a_client_that_cancels_ends_a_handler_whose_message_it_does_not_read(channel, servicer):
    call = channel.unary_stream(f"/{NAME}/Flood")(b"")
    assert await call.read() == LARGE
    await asyncio.sleep(0.2)  # the windows are full
    assert servicer.open == 1
    assert call.cancel()
    await asyncio.wait_for(servicer.cleaned.wait(), 5)


async def test_a_deadline_ends_a_handler_that_waits(channel, servicer):
    call = channel.unary_stream(f"/{NAME}/Wait")(b"", timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError):
        [message async for message in call]
    assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(servicer.cleaned.wait(), 5)


async def test_a_handler_that_fails_cleans_up_and_its_messages_arrive_before_the_status(channel, servicer):
    call = channel.unary_stream(f"/{NAME}/Fail")(b"", timeout=10)
    assert await call.read() == b"0"
    with pytest.raises(grpc.aio.AioRpcError, match="no more"):
        await call.read()
    assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await asyncio.wait_for(servicer.cleaned.wait(), 5)
