"""The streams from the other routers, whose placements count here like own ones. Reconnects by itself.

Other routers receive a placement within 20 ms and the network's delay. One second after the last message from a router,
its placements are dropped, because by then the workers' states show what really runs.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import grpc

from baton.router.discovery.addresses import Discovery
from baton.router.discovery.endpoints import followed
from baton.router.fleet.fleet import Cordon, Fleet
from baton.router.peers.news import placed_of
from baton.router.requests.in_flight import InFlight, Placed
from baton.rpc.channel import open_channel
from baton.rpc.errors import NotFound, ServiceError, error_from_rpc, problem_of
from baton.v1 import router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)

_MIN_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 0.5
_TIMEOUT_SECONDS = 1.0  # four heartbeats
_FORGET_SECONDS = 1.0
_ASK_SECONDS = 1.0


class Peers:
    """One task for each other router that discovery names, for as long as `run` runs."""

    def __init__(
        self,
        router_id: int,
        in_flight: InFlight,
        fleet: Fleet,
        discovery: Discovery,
        on_placed: Callable[[Placed, float], None] = lambda placed, at: None,
        clock: Callable[[], float] = time.monotonic,
        dial: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._router_id = router_id
        self._in_flight = in_flight
        self._fleet = fleet
        self._discovery = discovery
        self._on_placed = on_placed
        self._clock = clock
        self._dial = dial
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._heard: dict[int, float] = {}  # router id -> when
        self._stubs: dict[str, Any] = {}  # of live ones

    def __len__(self) -> int:
        """Returns the routers with an open stream."""
        return len(self._stubs)

    async def run(self) -> None:
        """Follows all routers until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forget_silent())
                async for found in self._discovery.watch():
                    addresses = followed(self._tasks.keys(), found)
                    for address in sorted(addresses - self._tasks.keys()):
                        self._tasks[address] = group.create_task(self._keep_following(address))
                    for address in self._tasks.keys() - addresses:
                        self._tasks.pop(address).cancel()
        finally:
            self._tasks.clear()

    async def explain(self, request: router_pb2.ExplainRequest) -> router_pb2.ExplainResponse:
        """Asks the other routers to explain a placement. Raises NotFound if none knows it."""
        asked = router_pb2.ExplainRequest()
        asked.CopyFrom(request)
        asked.only_here = True
        calls = [stub.Explain(asked, timeout=_ASK_SECONDS) for stub in self._stubs.values()]
        problems: list[ServiceError] = []
        for call in calls:
            try:
                response: router_pb2.ExplainResponse = await call
            except grpc.aio.AioRpcError as error:
                problems.append(error_from_rpc(error, "another router"))
            else:
                return response
            finally:
                call.cancel()
        raise next((one for one in problems if isinstance(one, NotFound)), NotFound("unknown to the other routers too"))

    async def _keep_following(self, address: str) -> None:
        backoff, last_problem = _MIN_BACKOFF_SECONDS, ""
        while True:
            began = self._clock()
            problem = await self._follow(address)
            if not problem:
                return
            if self._clock() - began > _MAX_BACKOFF_SECONDS:
                backoff = _MIN_BACKOFF_SECONDS
            if problem != last_problem:
                _log.info("router %s is unreachable: %s", address, problem)
                last_problem = problem
            await asyncio.sleep(backoff * random.uniform(0.8, 1.2))
            backoff = min(_MAX_BACKOFF_SECONDS, backoff * 2)

    async def _follow(self, address: str) -> str:
        """Reads one stream to its end and returns why it ended.

        Returns an empty string if the address is this router's own.
        """
        async with self._dial(address) as channel:
            stub: Any = router_pb2_grpc.RouterPeerServiceStub(channel)
            call = stub.Share(router_pb2.ShareRequest(router_id=self._router_id))
            try:
                while True:
                    async with asyncio.timeout(_TIMEOUT_SECONDS):
                        response = await call.read()
                    if not isinstance(response, router_pb2.ShareResponse):
                        return "it ended the stream"
                    if response.router_id == self._router_id:
                        return ""
                    self._stubs.setdefault(address, router_pb2_grpc.RouterServiceStub(channel))
                    self.take(response)
            except TimeoutError:
                return f"silent for {_TIMEOUT_SECONDS:.1f} s"
            except grpc.aio.AioRpcError as error:
                return problem_of(error)
            finally:
                self._stubs.pop(address, None)
                call.cancel()

    def take(self, response: router_pb2.ShareResponse) -> None:
        """Applies another router's news."""
        now = self._clock()
        self._heard[response.router_id] = now
        for message in response.placements:
            if message.router_id != self._router_id:
                # The worker may be gone, so that this router never receives its state.
                self._heard.setdefault(message.router_id, now)
                placed, at = placed_of(message), now - message.age_ms / 1000
                self._in_flight.begin(placed, at)
                self._on_placed(placed, at)
        for end in response.ends:
            self._in_flight.end(end.placement_id)
        for lost in response.suspicions:
            self._fleet.suspect(lost.worker_id, lost.epoch)
        for cordon in response.cordons:
            self._fleet.take_cordon(Cordon(cordon.worker_id, cordon.cordoned, cordon.stamp_us))

    def forget_silent(self) -> None:
        """Drops the placements of routers that sent nothing for a second."""
        limit = self._clock() - _FORGET_SECONDS
        for router_id in [router_id for router_id, heard in self._heard.items() if heard < limit]:
            del self._heard[router_id]
            num_ended = self._in_flight.end_all_of(router_id)
            _log.info("a router is gone; dropped %d of its placements", num_ended)

    async def _forget_silent(self) -> None:
        while True:
            await asyncio.sleep(_FORGET_SECONDS / 4)
            self.forget_silent()
