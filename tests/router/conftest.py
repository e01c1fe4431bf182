"""Routers served in this process over real gRPC, in front of scripted workers and a real kvstore."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.fleet.fleet_node import ScriptedWorker
from support.fleet.kvstore_node import FakeWorker, eventually
from support.processes import ports

from baton.kvstore.config import KvstoreConfig
from baton.kvstore.server import serve as serve_kvstore
from baton.router.config import RouterConfig
from baton.router.server import serve as serve_router
from baton.rpc.channel import open_channel
from baton.v1 import router_pb2, router_pb2_grpc


@dataclass
class Service:
    """A service that runs in this process."""

    address: str
    stop: asyncio.Event
    task: asyncio.Task

    async def end(self):
        self.stop.set()
        await self.task


@dataclass
class Router(Service):
    """A running router and a client of it."""

    stub: Any = None

    async def workers(self):
        response = await self.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5)
        return {entry.state.worker_id or entry.address: entry for entry in response.workers}

    async def place(self, num_prompt_tokens=1000, block_hashes=b"", **fields):
        values = {"request_id": "r", "model": "m", "max_tokens": 100}
        request = router_pb2.PlaceRequest(
            **{**values, **fields}, num_prompt_tokens=num_prompt_tokens, block_hashes=block_hashes
        )
        return await self.stub.Place(request, timeout=5)

    async def until_alive(self, count):
        async def enough():
            return sum(entry.alive for entry in (await self.workers()).values()) == count

        await eventually(enough, f"{count} workers alive")

    async def until_indexed(self, **blocks):
        async def agrees():
            workers = await self.workers()
            return all(name in workers and workers[name].num_indexed_blocks == count for name, count in blocks.items())

        await eventually(agrees, f"index holds {blocks}")


@pytest.fixture
async def world() -> AsyncIterator:
    """Starts workers, kvstores and routers; ends them all."""
    async with contextlib.AsyncExitStack() as cleanup:

        class World:
            async def worker(self, state, port=0):
                worker = await ScriptedWorker(state).start(port)
                cleanup.push_async_callback(worker.stop)
                return worker

            async def kvstore(self, address="", **settings):
                address = address or f"127.0.0.1:{ports.free_ports(1)[0]}"
                config = replace(KvstoreConfig(), listen=address, **{"store": "memory", "lease_ms": 60_000, **settings})
                return await self._run(Service, address, serve_kvstore, config)

            async def publisher(self, kvstore, worker_id, **fields):
                publisher = await FakeWorker(kvstore.address, worker_id, **{"epoch": 1, **fields}).connect()
                cleanup.push_async_callback(publisher.close)
                await publisher.join()
                return publisher

            async def router(self, *workers, kvstore=None, listen="", pace=None, **settings):
                address = listen or f"127.0.0.1:{ports.free_ports(1)[0]}"
                addresses = tuple(one if isinstance(one, str) else one.address for one in workers)
                config = RouterConfig(
                    listen=address, workers=addresses, kvstore=kvstore.address if kvstore else "", **settings
                )
                router = await self._run(Router, address, functools.partial(serve_router, pace=pace), config)
                channel = open_channel(address)
                cleanup.push_async_callback(channel.close)
                router.stub = router_pb2_grpc.RouterServiceStub(channel)
                live = sum(not isinstance(one, str) for one in workers)
                await router.until_alive(live)
                return router

            async def _run(self, kind, address, serve, config):
                stop = asyncio.Event()
                service = kind(address, stop, asyncio.create_task(serve(config, stop)))
                cleanup.push_async_callback(service.end)
                host, port = address.split(":")

                async def listens():
                    if service.task.done():
                        service.task.result()
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection(host, int(port))
                        writer.close()
                        return True
                    return False

                await eventually(listens, "listening", 30.0)
                return service

        yield World()
