"""Kvstores in this process over real gRPC, and their clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from support.fleet.kvstore_node import FakeWorker, Kvstore, Replica, eventually
from support.processes import ports

from baton.kvstore.config import KvstoreConfig
from baton.kvstore.server import serve
from baton.rpc.channel import open_channel


@pytest.fixture
async def start_kvstore() -> AsyncIterator:
    """Starts kvstores: `await start_kvstore(redis_url=...)`."""
    running = []

    async def start(**settings):
        defaults = {"listen": f"127.0.0.1:{ports.free_ports(1)[0]}", "lease_ms": 60_000}
        if "redis_url" not in settings:
            defaults["store"] = "memory"
        config = replace(KvstoreConfig(), **{**defaults, **settings})
        stop = asyncio.Event()
        kvstore = Kvstore(config, stop, asyncio.create_task(serve(config, stop)))
        running.append(kvstore)
        async with open_channel(config.listen) as channel:
            async with asyncio.timeout(15):
                while channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
                    if kvstore.task.done():
                        kvstore.task.result()
                    await asyncio.sleep(0.02)
        return kvstore

    yield start
    for kvstore in running:
        kvstore.stop.set()
    await asyncio.gather(*(kvstore.task for kvstore in running))


@pytest.fixture
async def connect() -> AsyncIterator:
    """Connects workers and routers: `await connect.worker(kvstore, ...)`, `await connect.replica(kvstore)`."""
    async with contextlib.AsyncExitStack() as cleanup:

        class Connect:
            async def worker(self, kvstore, **fields):
                worker = await FakeWorker(kvstore.address, **fields).connect()
                cleanup.push_async_callback(worker.close)
                return worker

            async def replica(self, kvstore, replica=None, **fields):
                replica = replica or Replica(kvstore.address, **fields)
                replica.address, replica.num_heartbeats = kvstore.address, 0
                task = asyncio.create_task(replica.follow())
                replica.task = task

                async def end():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

                cleanup.push_async_callback(end)
                await eventually(lambda: replica.num_heartbeats or task.done(), "the first heartbeat")
                return replica

        yield Connect()
