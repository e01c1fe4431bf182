"""Kvstores as processes, and publishers that follow the worker's side of the protocol, for tests of the index."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import grpc
import psutil
from support.fleet.kvstore_node import blocks, removed, stored
from support.processes import ports
from support.processes.stack import wait_until

from baton.rpc.channel import open_channel
from baton.services.up.readiness import is_ready
from baton.services.up.tandem import Probe
from baton.v1 import index_pb2, index_pb2_grpc, kv_pb2
from baton.worker.front.event_window import EventWindow

HEARTBEAT_SECONDS = 0.25
PATIENCE_SECONDS = 0.75


class Node:
    """A kvstore as a process."""

    def __init__(self, redis_url, log_path):
        (port,) = ports.free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._words = ("kvstore", "--listen", self.address, "--redis-url", redis_url, "--redis-timeout-ms", "300")
        self._log_path = log_path
        self.process = None

    def start(self):
        with self._log_path.open("ab") as log:
            words = [sys.executable, "-m", "baton.services.cli", *self._words]
            self.process = psutil.Popen(words, stdout=log, stderr=subprocess.STDOUT)

    async def until_ready(self):
        await asyncio.to_thread(
            wait_until, lambda: asyncio.run(is_ready(Probe.GRPC_HEALTH, self.address)), "the kvstore is up", 30
        )

    def end(self):
        if self.process is not None and self.process.is_running():
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(5)


class Roamer:
    """A worker's cache and its stream to any kvstore that responds, with the default window of batches."""

    def __init__(self, worker_id, addresses):
        self.worker_id = worker_id
        self.blocks = set()
        self.gone = {}  # block number -> time of its eviction
        self._addresses = list(addresses)
        self._epoch = time.time_ns()
        self._sequence = 0
        self._window = EventWindow()
        self._changed = asyncio.Event()
        self._sent = 0  # sequence

    def store(self, numbers):
        self.blocks.update(numbers)
        for number in numbers:
            self.gone.pop(number, None)
        self._note(stored(*numbers))

    def remove(self, numbers):
        self.blocks.difference_update(numbers)
        self.gone.update(dict.fromkeys(numbers, time.monotonic()))
        self._note(removed(*numbers))

    def _note(self, event):
        self._sequence += 1
        batch = kv_pb2.KvEventBatch(
            worker_id=self.worker_id, epoch=self._epoch, sequence=self._sequence, events=[event]
        )
        encoded = index_pb2.PublishRequest(batch=batch).SerializeToString()
        self._window.add(self._epoch, self._sequence, encoded)
        self._changed.set()

    async def run(self):
        while True:
            for address in self._addresses:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, EOFError):
                    await self._publish(address)
                await asyncio.sleep(0.05)

    async def _publish(self, address):
        async with open_channel(address) as channel:
            call = index_pb2_grpc.IndexServiceStub(channel).Publish()
            try:
                await self._talk(call)
            finally:
                call.cancel()

    async def _talk(self, call):
        async with asyncio.timeout(1):
            await call.wait_for_connection()
        hello = index_pb2.PublishHello(
            worker_id=self.worker_id, epoch=self._epoch, sequence=self._sequence,
            first_kept=self._window.first_kept, term=time.time_ns(),
        )  # fmt: skip
        self._sent = 0
        await call.write(index_pb2.PublishRequest(hello=hello))
        await self._hear(call)
        while True:
            for encoded in self._window.since(self._sent):
                request = index_pb2.PublishRequest.FromString(encoded)
                await call.write(request)
                self._sent = request.batch.sequence
            heartbeat = index_pb2.PublishHeartbeat(wants_answer=True)
            await call.write(index_pb2.PublishRequest(heartbeat=heartbeat))
            await self._hear(call)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._changed.wait()

    async def _hear(self, call):
        async with asyncio.timeout(PATIENCE_SECONDS):
            response = await call.read()
        if response is grpc.aio.EOF:
            raise EOFError
        if response.snapshot_wanted:
            await self._send_snapshot(call)
            await self._hear(call)
        else:
            self._window.acknowledge(response.acknowledged_sequence)
            self._sent = max(self._sent, response.acknowledged_sequence)

    async def _send_snapshot(self, call):
        part = kv_pb2.KvSnapshot(
            worker_id=self.worker_id, epoch=self._epoch, barrier=self._sequence, tier=kv_pb2.KV_TIER_DEVICE,
            block_hashes=blocks(*sorted(self.blocks)), first=True, last=True,
        )  # fmt: skip
        self._sent = self._sequence
        await call.write(index_pb2.PublishRequest(snapshot=part))
