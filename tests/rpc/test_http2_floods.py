"""Floods of HTTP/2 control frames on a gRPC port: few are answered, and they cost little CPU."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.server.server import RpcServer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
PING = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
TOO_MANY_PINGS = b"too_many_pings"  # in the GOAWAY
NUM_FRAMES = 100_000


async def flood(port: int, frame: bytes, frames_per_write: int) -> tuple[int, bytes]:
    """Returns the number of frames sent before the server closed, and the bytes it sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    num_sent = 0
    try:
        writer.write(PREFACE + SETTINGS)
        await writer.drain()
        await asyncio.sleep(0.2)
        while num_sent < NUM_FRAMES and not answer.done():
            writer.write(frame * frames_per_write)
            num_sent += frames_per_write
            await writer.drain()
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    try:
        return num_sent, await answer
    except ConnectionError:
        return num_sent, b""


@pytest.mark.parametrize("frames_per_write", [1, 1000])
async def test_a_flood_of_pings_ends_the_connection(frames_per_write):
    async with RpcServer("127.0.0.1:0", []) as server:
        began = time.process_time()
        num_sent, answer = await flood(server.port, PING, frames_per_write)
        seconds = time.process_time() - began  # of the client too
        assert seconds < 2.0
        if frames_per_write == 1:
            assert num_sent < 2000
            assert TOO_MANY_PINGS in answer or not answer
        await still_answers(server.port)


async def test_a_flood_of_settings_costs_little():
    async with RpcServer("127.0.0.1:0", []) as server:
        began = time.process_time()
        await flood(server.port, SETTINGS, 1000)
        assert time.process_time() - began < 2.0
        await still_answers(server.port)


async def still_answers(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
