"""The streams from the workers: passes their states to the fleet. Reconnects by itself."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc

from baton.router.discovery.addresses import Discovery
from baton.router.discovery.endpoints import Endpoints, EndpointState, followed
from baton.router.fleet.fleet import Fleet
from baton.rpc.channel import open_channel
from baton.rpc.errors import problem_of
from baton.v1 import worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 0.5
_MISSED_INTERVALS = 3


class WorkerWatch:
    """One task for each worker that discovery names, for as long as `run` runs."""

    def __init__(
        self,
        fleet: Fleet,
        discovery: Discovery,
        interval_seconds: float,
        dial: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._fleet = fleet
        self._discovery = discovery
        self._interval_seconds = interval_seconds
        self._dial = dial
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Watches all workers until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                async for found in self._discovery.watch():
                    self._follow(found, group)
        finally:
            self._tasks.clear()

    def _follow(self, found: Endpoints, group: asyncio.TaskGroup) -> None:
        addresses = followed(self._tasks.keys(), found)
        for address in sorted(addresses - self._tasks.keys()):
            self._fleet.add(address)
            self._tasks[address] = group.create_task(self._keep_watching(address))
        for address in self._tasks.keys() - addresses:
            self._tasks.pop(address).cancel()
            self._fleet.remove(address)
        for address in addresses:
            self._fleet.set_terminating(address, found[address] is EndpointState.TERMINATING)

    async def _keep_watching(self, address: str) -> None:
        backoff = _MIN_BACKOFF_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            problem = await self._watch(address)
            self._fleet.lose(address, problem)
            if asyncio.get_running_loop().time() - began > _MAX_BACKOFF_SECONDS:
                backoff = _MIN_BACKOFF_SECONDS
            await asyncio.sleep(backoff * random.uniform(0.8, 1.2))
            backoff = min(_MAX_BACKOFF_SECONDS, backoff * 2)

    async def _watch(self, address: str) -> str:
        """Reads one stream to its end and returns why it ended."""
        timeout = self._interval_seconds * _MISSED_INTERVALS
        request = worker_pb2.WatchStateRequest(max_interval_ms=round(self._interval_seconds * 1000))
        async with self._dial(address) as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.WatchState(request)
            try:
                while True:
                    async with asyncio.timeout(timeout):
                        response = await call.read()
                    if not isinstance(response, worker_pb2.WatchStateResponse):
                        return "it ended the stream"
                    self._fleet.update(address, response.state)
            except TimeoutError:
                return f"no state for {timeout:.1f} s"
            except grpc.aio.AioRpcError as error:
                return problem_of(error)
            except Exception as error:
                _log.exception("the state of the worker at %s could not be taken", address)
                return f"its state could not be taken: {type(error).__name__}"
            finally:
                call.cancel()
