"""Publishers of an index, its reader as a process, and a Redis server, for the benchmark of the index."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil
import redis
from support.processes import ports
from support.redis.program import redis_program

from baton.rpc.channel import open_channel
from baton.v1 import index_pb2, kv_pb2

BATCH_BLOCKS = 32  # as the router applies them at once
_PUBLISH = "/baton.v1.IndexService/Publish"


class Publisher:
    """A worker's publishing stream with prepared messages."""

    def __init__(self, worker_id: str, num_blocks: int, draw: np.random.Generator) -> None:
        self.worker_id = worker_id
        self._draw = draw
        self._num_blocks = num_blocks
        self.sequence = 0

    async def join(self, address: str) -> None:
        """Sends the hello, and a snapshot if it is requested."""
        self._channel = open_channel(address)
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(_PUBLISH)()
        hello = index_pb2.PublishHello(worker_id=self.worker_id, epoch=1, sequence=self.sequence, term=time.time_ns())
        response = await self.ask(index_pb2.PublishRequest(hello=hello))
        if response.snapshot_wanted:
            hashes = self._draw.bytes(16 * self._num_blocks)
            stride = 16 * 4096
            for at in range(0, max(1, len(hashes)), stride):
                part = kv_pb2.KvSnapshot(
                    worker_id=self.worker_id, epoch=1, barrier=self.sequence, block_hashes=hashes[at : at + stride],
                    tier=kv_pb2.KV_TIER_DEVICE, first=at == 0, last=at + stride >= len(hashes),
                )  # fmt: skip
                await self._call.write(index_pb2.PublishRequest(snapshot=part).SerializeToString())
            await self._hear()

    def batches(self, count: int) -> list[bytes]:
        """Returns encoded batches that store new blocks."""
        encoded = []
        for _ in range(count):
            self.sequence += 1
            stored = kv_pb2.BlocksStored(block_hashes=self._draw.bytes(16 * BATCH_BLOCKS), tier=kv_pb2.KV_TIER_DEVICE)
            batch = kv_pb2.KvEventBatch(
                worker_id=self.worker_id, epoch=1, sequence=self.sequence, events=[kv_pb2.KvEvent(stored=stored)]
            )
            encoded.append(index_pb2.PublishRequest(batch=batch).SerializeToString())
        return encoded

    async def send(self, messages: list[bytes]) -> None:
        """Sends prepared messages and waits until all are applied."""
        for encoded in messages:
            await self._call.write(encoded)
        heartbeat = index_pb2.PublishHeartbeat(wants_answer=True)
        response = await self.ask(index_pb2.PublishRequest(heartbeat=heartbeat))
        assert response.acknowledged_sequence == self.sequence

    async def beat(self) -> None:
        """Sends heartbeats like an idle worker."""
        for number in itertools.count():
            heartbeat = index_pb2.PublishHeartbeat(wants_answer=number % 3 == 0)
            await self._call.write(index_pb2.PublishRequest(heartbeat=heartbeat).SerializeToString())
            if heartbeat.wants_answer:
                await self._hear()
            await asyncio.sleep(0.35)

    async def ask(self, request: index_pb2.PublishRequest) -> index_pb2.PublishResponse:
        await self._call.write(request.SerializeToString())
        return await self._hear()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _hear(self) -> index_pb2.PublishResponse:
        return index_pb2.PublishResponse.FromString(await self._call.read())


class Reader:
    """index_reader.py as a process."""

    def __init__(self, address: str) -> None:
        self.process = psutil.Popen(
            [sys.executable, str(Path(__file__).with_name("index_reader.py")), address], stdout=subprocess.PIPE
        )

    async def until(self, condition: Callable[[dict[str, float]], bool], seconds: float) -> dict[str, float]:
        """Returns the first status that meets the condition."""
        async with asyncio.timeout(seconds):
            while True:
                line = await asyncio.to_thread(self.process.stdout.readline)
                status: dict[str, float] = json.loads(line)
                if condition(status):
                    return status

    def end(self) -> None:
        self.process.kill()
        self.process.wait(5)
        self.process.stdout.close()


@contextmanager
def redis_server() -> Iterator[tuple[redis.Redis, str]]:
    """Runs a Redis server. Yields a client and the URL."""
    (port,) = ports.free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        words = [redis_program(), "--port", str(port), "--save", "", "--dir", folder]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        client = redis.Redis(port=port)
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        try:
            yield client, f"redis://127.0.0.1:{port}/0"
        finally:
            client.close()
            process.terminate()
            process.wait(10)


@asynccontextmanager
async def joined(address: str, publishers: list[Publisher]) -> AsyncIterator[None]:
    """Connects publishers to a kvstore, and sends their heartbeats within the block."""
    async with asyncio.timeout(60):
        while True:
            try:
                await publishers[0].join(address)
                break
            except grpc.aio.AioRpcError:
                await publishers[0].close()
                await asyncio.sleep(0.1)
    for publisher in publishers[1:]:
        await publisher.join(address)
    beats = [asyncio.create_task(publisher.beat()) for publisher in publishers]
    try:
        yield
    finally:
        for task in beats:
            task.cancel()
        await asyncio.gather(*beats, return_exceptions=True)
        for publisher in publishers:
            await publisher.close()
