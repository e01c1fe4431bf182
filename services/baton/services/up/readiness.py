"""Whether a service on this machine is ready: gRPC health, or HTTP GET /ready."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.address import split_address
from baton.rpc.channel import Dial
from baton.services.up.tandem import Probe

_PROBE_SECONDS = 2.0
_PLAIN = Dial()


async def is_ready(probe: Probe, address: str, dial: Dial = _PLAIN, edge_ca: str = "") -> bool:
    """Probes `host:port` once. Any failure means not ready. `edge_ca`: the CA's file, if HTTP is over TLS."""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            if probe is Probe.HTTP_READY:
                return await _http_ready(address, edge_ca)
            return await _grpc_serving(address, dial)
    except (OSError, TimeoutError):
        return False


async def _grpc_serving(address: str, dial: Dial) -> bool:
    host, port = split_address(address, "address")
    # A connect without gRPC first, whose own attempts would back off, and cost more.
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    async with dial(address) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
            answer = await check(health_pb2.HealthCheckRequest(), timeout=_PROBE_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    serving: bool = answer.status == health_pb2.HealthCheckResponse.SERVING
    return serving


async def _http_ready(address: str, edge_ca: str) -> bool:
    host, port = split_address(address, "address")
    context = None
    if edge_ca:
        context = ssl.create_default_context(cafile=edge_ca)
        context.check_hostname = False  # the address listened on need not be a name that clients use
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n".encode())
        status_line = await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()  # TLS sends its close first
    return status_line.split(b" ")[1:2] == [b"200"]
