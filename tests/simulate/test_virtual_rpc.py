import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.services.simulate.virtual.loop import LoopTimeline
from baton.services.simulate.virtual.rpc import Link, VirtualChannel
from baton.v1 import index_pb2


class EndlessServer:
    """Answers once, and then waits for ever."""

    def __init__(self):
        self.has_ended = False

    async def watch(self, request, context) -> AsyncIterator[bytes]:
        try:
            yield index_pb2.WatchResponse(heartbeat=index_pb2.WatchHeartbeat(num_messages=1)).SerializeToString()
            await asyncio.Event().wait()
        finally:
            self.has_ended = True


@pytest.fixture
def timeline():
    timeline = LoopTimeline()
    yield timeline
    timeline.close()


@pytest.fixture
def server():
    return EndlessServer()


def begin(link, server):
    return VirtualChannel(link, server).unary_stream("Watch")(index_pb2.WatchRequest())


@pytest.mark.parametrize("end", [Link.heal, Link.cut])
def test_a_server_is_notified_of_a_cancelled_call_when_a_stalled_link_heals_or_is_cut(timeline, server, end):
    async def scenario():
        link = Link()
        call = begin(link, server)
        await call.read()
        link.is_stalled = True
        call.cancel()
        await asyncio.sleep(1.0)
        assert not server.has_ended
        end(link)
        await asyncio.sleep(0.01)
        assert server.has_ended
        assert link.calls == []

    timeline.loop.run_until_complete(scenario())


def test_a_cut_ends_both_sides(timeline, server):
    async def scenario():
        link = Link()
        call = begin(link, server)
        await call.read()
        link.cut()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await asyncio.sleep(0.01)
        assert server.has_ended

    timeline.loop.run_until_complete(scenario())
