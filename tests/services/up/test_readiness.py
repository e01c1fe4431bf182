import asyncio

import grpc
import pytest

from baton.rpc.server.server import RpcServer
from baton.services.up.readiness import is_ready
from baton.services.up.tandem import Probe


async def test_grpc_health_decides():
    async with RpcServer("127.0.0.1:0", []) as server:
        address = f"127.0.0.1:{server.port}"
        assert not await is_ready(Probe.GRPC_HEALTH, address)
        await server.set_ready(True)
        assert await is_ready(Probe.GRPC_HEALTH, address)
        await server.set_ready(False)
        assert not await is_ready(Probe.GRPC_HEALTH, address)


async def test_a_server_without_health_is_not_ready():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert not await is_ready(Probe.GRPC_HEALTH, f"127.0.0.1:{port}")
    await server.stop(None)


@pytest.mark.parametrize(("status", "ready"), [("200 OK", True), ("503 Service Unavailable", False)])
async def test_http_ready_decides(status, ready):
    async def answer(reader, writer):
        assert (await reader.readline()).startswith(b"GET /ready ")
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await is_ready(Probe.HTTP_READY, f"127.0.0.1:{port}") is ready


@pytest.mark.parametrize("probe", list(Probe))
async def test_a_refused_connection_is_not_ready(probe, free_port):
    assert not await is_ready(probe, f"127.0.0.1:{free_port}")
