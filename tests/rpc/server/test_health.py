"""grpc.health.v1 as clients and probes use it, in plain text and over mTLS."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.network.tls_rig import dial_as, make_certs, tls_of

from baton.rpc.channel import Dial
from baton.rpc.identity.identity import OPERATOR, ROUTER
from baton.rpc.server.server import RpcServer
from baton.services.up.readiness import is_ready
from baton.services.up.tandem import Probe

NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(params=["plain text", "mTLS"])
def ends(request, tmp_path):
    """A server's TLS, and how its probes dial."""
    if request.param == "plain text":
        return None, Dial()
    folder = make_certs(tmp_path)
    return tls_of(folder, ROUTER), dial_as(folder, OPERATOR, ROUTER)


async def test_a_watcher_gets_every_change(ends):
    tls, dial = ends
    async with RpcServer("127.0.0.1:0", [], 0, tls=tls) as server, dial(f"127.0.0.1:{server.port}") as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(20):
            assert (await call.read()).status == NOT_SERVING
            await server.set_ready(True)
            assert (await call.read()).status == SERVING
            await server.set_ready(False)
            assert (await call.read()).status == NOT_SERVING
        call.cancel()


async def test_readiness_is_checked_with_the_servers_protocol(ends):
    tls, dial = ends
    async with RpcServer("127.0.0.1:0", [], 0, tls=tls) as server:
        address = f"127.0.0.1:{server.port}"
        assert not await is_ready(Probe.GRPC_HEALTH, address, dial)
        await server.set_ready(True)
        assert await is_ready(Probe.GRPC_HEALTH, address, dial)
        assert await is_ready(Probe.GRPC_HEALTH, address) is (tls is None)
