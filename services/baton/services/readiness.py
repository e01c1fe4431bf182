"""Whether a service on this machine is ready: gRPC health, or HTTP GET /ready."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.address import split_address
from baton.services.tandem import Probe

_PROBE_SECONDS = 2.0


async def is_ready(probe: Probe, address: str) -> bool:
    """One probe of `host:port`. Whatever fails is not ready."""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            return await (_http_ready(address) if probe is Probe.HTTP_READY else _grpc_serving(address))
    except (OSError, TimeoutError):
        return False


async def _grpc_serving(address: str) -> bool:
    host, port = split_address(address, "address")
    # A plain connect first: gRPC's own attempts would back off, and cost more.
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    async with grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
            answer = await check(health_pb2.HealthCheckRequest(), timeout=_PROBE_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    serving: bool = answer.status == health_pb2.HealthCheckResponse.SERVING
    return serving


async def _http_ready(address: str) -> bool:
    host, port = split_address(address, "address")
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n".encode())
        status_line = await reader.readline()
    finally:
        writer.close()
    return status_line.split(b" ")[1:2] == [b"200"]
