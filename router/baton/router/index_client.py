"""The stream from the kvstore: dialled, followed, dialled again. Without it the index serves as it was last known."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import grpc

from baton.router.prefix_index import PrefixIndex
from baton.rpc.channel import open_channel
from baton.v1 import index_pb2, index_pb2_grpc

_log = logging.getLogger(__name__)

_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 2.0
_PATIENCE_SECONDS = 3.5  # heartbeats come every second
# Workers that a new stream has not told of by then are gone. A kvstore that lost everything gets them anew by then.
_GRACE_SECONDS = 5.0
_BLOCKS_PER_CLEANING = 2000  # about a millisecond


class IndexClient:
    """Keeps one PrefixIndex equal to one kvstore, for as long as `run` runs."""

    def __init__(self, index: PrefixIndex, address: str, grace_seconds: float = _GRACE_SECONDS) -> None:
        self._index = index
        self._address = address
        self._grace_seconds = grace_seconds
        self._told: set[str] = set()  # workers that this stream has told of
        self._is_told_all = False
        self._cleaning: asyncio.Task[None] | None = None
        self.connected = False
        self.num_resyncs = 0  # streams given up because of a gap
        self.num_stale_blocks = 0  # entries that were dropped because they were found to be out of step

    async def run(self) -> None:
        """Follows the kvstore until cancelled."""
        backoff, last_problem = _MIN_BACKOFF_SECONDS, ""
        try:
            while True:
                problem = await self._follow()
                if self.connected:
                    self.connected, backoff, last_problem = False, _MIN_BACKOFF_SECONDS, ""
                if problem != last_problem:
                    _log.warning("kvstore %s: %s; placing with what is known", self._address, problem)
                    last_problem = problem
                await asyncio.sleep(backoff * random.uniform(0.8, 1.2))
                backoff = min(_MAX_BACKOFF_SECONDS, backoff * 2)
        finally:
            if self._cleaning is not None:
                self._cleaning.cancel()

    async def _follow(self) -> str:
        """Hears one stream to its end; returns why it ended."""
        self._told, self._is_told_all = set(), False
        expiry: asyncio.TimerHandle | None = None
        async with open_channel(self._address) as channel:
            stub: Any = index_pb2_grpc.IndexServiceStub(channel)
            call = stub.Watch(index_pb2.WatchRequest())
            try:
                while True:
                    async with asyncio.timeout(_PATIENCE_SECONDS):
                        response = await call.read()
                    if not isinstance(response, index_pb2.WatchResponse):
                        return "it ended the stream"
                    self._connected()
                    if not self._take(response):
                        self.num_resyncs += 1
                        return "its events have a gap"
                    if self._is_told_all and expiry is None:
                        expiry = asyncio.get_running_loop().call_later(self._grace_seconds, self._drop_untold)
            except TimeoutError:
                return f"silent for {_PATIENCE_SECONDS:.1f} s"
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details() or 'no details'}"
            finally:
                call.cancel()
                if expiry is not None:
                    expiry.cancel()

    def _connected(self) -> None:
        if not self.connected:
            self.connected = True
            _log.info("kvstore %s: the index follows it", self._address)

    def _take(self, response: index_pb2.WatchResponse) -> bool:
        """Applies a message. False: it does not follow what was heard before."""
        kind = response.WhichOneof("message")
        if kind == "batch":
            return self._take_batch(response)
        if kind == "snapshot":
            self._told.add(response.snapshot.worker_id)
            taken = self._index.receive(response.snapshot)
            self._clean_up()
            return taken
        if kind == "forgotten":
            self._told.discard(response.forgotten.worker_id)
            self._drop(response.forgotten.worker_id)
        elif kind == "heartbeat":
            self._is_told_all = True
        return True

    def _take_batch(self, response: index_pb2.WatchResponse) -> bool:
        worker_id = response.batch.worker_id
        if self._index.epoch(worker_id) is None:
            # Dropped here because the worker itself said that it has a new epoch; the kvstore will say so too.
            return worker_id in self._told
        num_blocks = self._index.num_blocks(worker_id)
        applied = self._index.apply(response.batch)
        if not applied:
            self.num_stale_blocks += num_blocks
            self._clean_up()
        return applied

    def _drop_untold(self) -> None:
        for worker_id in self._index.worker_ids:
            if worker_id not in self._told:
                self._drop(worker_id)

    def _drop(self, worker_id: str) -> None:
        self.num_stale_blocks += self._index.drop(worker_id)
        self._clean_up()

    def _clean_up(self) -> None:
        if self._index.num_dying_blocks and self._cleaning is None:
            self._cleaning = asyncio.create_task(self._clean())

    async def _clean(self) -> None:
        try:
            more = True
            while more:
                await asyncio.sleep(0)  # lookups go first
                more = self._index.clean(_BLOCKS_PER_CLEANING)
        finally:
            self._cleaning = None
