"""Clients of a kvstore: a scripted worker, and a replica that checks its messages."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import grpc

from baton.kvstore.config import KvstoreConfig
from baton.rpc.channel import open_channel
from baton.v1 import index_pb2, index_pb2_grpc, kv_pb2


async def eventually(condition, what, seconds=20.0):
    """Waits for a condition, plain or async."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        answer = condition()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return answer
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


def block(number):
    return number.to_bytes(16, "little")


def blocks(*numbers):
    return b"".join(map(block, numbers))


def stored(*numbers, tier=kv_pb2.KV_TIER_DEVICE):
    return kv_pb2.KvEvent(stored=kv_pb2.BlocksStored(block_hashes=blocks(*numbers), tier=tier))


def removed(*numbers, tier=kv_pb2.KV_TIER_DEVICE):
    return kv_pb2.KvEvent(removed=kv_pb2.BlocksRemoved(block_hashes=blocks(*numbers), tier=tier))


@dataclass
class FakeWorker:
    """A worker's publishing side, scripted step by step."""

    address: str
    worker_id: str = "w1"
    epoch: int = 7
    sequence: int = 0
    blocks: set = field(default_factory=set)
    term: int = 0
    kept: list = field(default_factory=list)  # encoded batches that it can send again

    async def connect(self):
        self._channel = open_channel(self.address)
        self._call = index_pb2_grpc.IndexServiceStub(self._channel).Publish()
        return self

    async def close(self):
        self._call.cancel()
        await self._channel.close()

    async def hello(self):
        hello = index_pb2.PublishHello(
            worker_id=self.worker_id, epoch=self.epoch, sequence=self.sequence, term=self.term,
            first_kept=self.sequence - len(self.kept) + 1 if self.kept else 0,
        )  # fmt: skip
        return await self.ask(hello=hello)

    async def join(self):
        """Sends a hello, and a snapshot if the kvstore requests it. Returns whether it did."""
        response = await self.hello()
        if response.snapshot_wanted:
            await self.snapshot()
        return response.snapshot_wanted

    async def snapshot(self, part_blocks=1000):
        numbers = sorted(self.blocks)
        starts = range(0, max(1, len(numbers)), part_blocks)
        for start in starts:
            part = kv_pb2.KvSnapshot(
                worker_id=self.worker_id, epoch=self.epoch, barrier=self.sequence, tier=kv_pb2.KV_TIER_DEVICE,
                block_hashes=blocks(*numbers[start : start + part_blocks]),
                first=start == 0, last=start == starts[-1],
            )  # fmt: skip
            await self.send(snapshot=part)
        return await self.hear()

    async def store(self, *numbers):
        self.blocks.update(numbers)
        return await self.batch(stored(*numbers))

    async def remove(self, *numbers):
        self.blocks.difference_update(numbers)
        return await self.batch(removed(*numbers))

    async def batch(self, *events):
        self.sequence += 1
        batch = kv_pb2.KvEventBatch(worker_id=self.worker_id, epoch=self.epoch, sequence=self.sequence, events=events)
        return await self.send_batch(batch)

    async def send_batch(self, batch):
        """Sends a batch. Returns the response, which comes at once after a gap, else after a heartbeat."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.send(batch=batch)
        response = await self.heartbeat()
        if response.snapshot_wanted:
            await self.hear()
        return response

    async def heartbeat(self):
        return await self.ask(heartbeat=index_pb2.PublishHeartbeat(wants_answer=True))

    async def keep_beating(self):
        while True:
            beat = asyncio.ensure_future(self.heartbeat())
            try:
                await asyncio.shield(beat)
            except asyncio.CancelledError:  # a cancelled read would end the stream
                await beat
                raise
            await asyncio.sleep(0.05)

    async def ask(self, **message):
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.send(**message)
        return await self.hear()  # raises the error of an ended stream

    async def send(self, **message):
        await self._call.write(index_pb2.PublishRequest(**message))

    async def hear(self):
        async with asyncio.timeout(5):
            response = await self._call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(f"the stream ended: {await self._call.code()} {await self._call.details()}")
        return response


class Replica:
    """A router's side: the blocks of each worker by a stream, with a router's checks."""

    def __init__(self, address, own_only=False):
        self.address = address
        self.own_only = own_only
        self.workers = {}  # id -> (epoch, sequence, blocks)
        self.silent = set()
        self._arriving = {}
        self.num_heartbeats = 0
        self.kinds = []

    def positions(self):
        return [
            index_pb2.WorkerPosition(worker_id=name, epoch=epoch, sequence=sequence)
            for name, (epoch, sequence, _) in self.workers.items()
        ]

    async def follow(self):
        async with open_channel(self.address) as channel:
            request = index_pb2.WatchRequest(known=self.positions(), own_only=self.own_only)
            async for response in index_pb2_grpc.IndexServiceStub(channel).Watch(request):
                self.take(response)

    def take(self, response):
        kind = response.WhichOneof("message")
        self.kinds.append(kind or "batches")
        if kind == "snapshot":
            part = response.snapshot
            if part.first:
                self._arriving[part.worker_id] = set()
            self._arriving[part.worker_id] |= split(part.block_hashes)
            if part.last:
                self.workers[part.worker_id] = (part.epoch, part.barrier, self._arriving.pop(part.worker_id))
        elif kind == "forgotten":
            self.workers.pop(response.forgotten.worker_id, None)
        elif kind == "silent":
            self.silent.add(response.silent.worker_id)
        elif kind == "heard":
            self.silent.discard(response.heard.worker_id)
        elif kind == "heartbeat":
            self.num_heartbeats += 1
        for batch in response.batches:
            self._take_batch(batch)

    def _take_batch(self, batch):
        epoch, sequence, held = self.workers[batch.worker_id]
        if batch.epoch == epoch and batch.sequence <= sequence:
            return
        assert (batch.epoch, batch.sequence) == (epoch, sequence + 1)
        for event in batch.events:
            held |= split(event.stored.block_hashes)
            held -= split(event.removed.block_hashes)
        self.workers[batch.worker_id] = (epoch, batch.sequence, held)

    def held(self, worker_id="w1"):
        """Returns the blocks that a router would count."""
        entry = self.workers.get(worker_id)
        if entry is None or worker_id in self.silent:
            return None
        return {int.from_bytes(one, "little") for one in entry[2]}


def split(packed):
    return {packed[start : start + 16] for start in range(0, len(packed), 16)}


@dataclass
class Kvstore:
    """A running kvstore."""

    config: KvstoreConfig
    stop: asyncio.Event
    task: asyncio.Task

    @property
    def address(self):
        return self.config.listen

    async def end(self):
        self.stop.set()
        await self.task
