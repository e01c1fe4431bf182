"""What callers see of a server of ours when they or it are set up wrong."""

import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2

from baton.rpc.channel import open_channel
from baton.rpc.errors import Unavailable
from baton.rpc.server.server import RpcServer

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"


@pytest.fixture
async def channel():
    async with RpcServer("127.0.0.1:0", ()) as server:
        await server.set_ready(True)
        channel = open_channel(f"127.0.0.1:{server.port}")
        yield channel
        await channel.close()


@pytest.mark.parametrize("data", [b"\xff" * 50, b"\x0a\x03\xff\xfe\xfd", b"\x0a\xff"])
async def test_bytes_that_are_no_such_message_are_the_callers_error(channel, data, caplog):
    with pytest.raises(grpc.aio.AioRpcError) as of_unary:
        await channel.unary_unary(CHECK)(data, timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as of_stream:
        await channel.unary_stream(WATCH)(data, timeout=5).read()
    for raised, method in ((of_unary, CHECK), (of_stream, WATCH)):
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert f"the request of {method} cannot be decoded" in raised.value.details()
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_next_request_is_served_as_ever(channel):
    with pytest.raises(grpc.aio.AioRpcError):
        await channel.unary_unary(CHECK)(b"\xff", timeout=5)
    answer = await channel.unary_unary(CHECK)(health_pb2.HealthCheckRequest().SerializeToString(), timeout=5)
    assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_port_in_use_is_named_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"cannot listen on grpc_listen={address}"):
            async with RpcServer(address, (), field="grpc_listen"):
                raise AssertionError("it listens")
