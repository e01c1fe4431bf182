"""The stream from another replica: copies the workers that publish to it into this index. Reconnects by itself."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc

from baton.kvstore.index.index import Applied, Index
from baton.kvstore.index.membership import Membership
from baton.kvstore.index.publishers import Publisher
from baton.rpc.channel import open_channel
from baton.rpc.errors import InvalidRequest, problem_of
from baton.v1 import index_pb2, index_pb2_grpc

_log = logging.getLogger(__name__)

_MIN_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 1.0


class PeerLink:
    """Follows one replica while `run` runs."""

    def __init__(
        self,
        index: Index,
        membership: Membership,
        replica: str,
        address: str,
        timeout_seconds: float,
        dial: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._index = index
        self._membership = membership
        self._replica = replica
        self._timeout_seconds = timeout_seconds
        self._dial = dial
        self.address = address
        self.connected = False

    async def run(self) -> None:
        """Follows the replica until cancelled."""
        backoff = _MIN_BACKOFF_SECONDS
        try:
            while True:
                problem, is_hung = await self._follow()
                if self.connected:
                    self.connected, backoff = False, _MIN_BACKOFF_SECONDS
                    self._membership.lose_replica(self._replica, is_hung)
                    _log.warning("replica %s at %s: %s", self._replica, self.address, problem)
                await asyncio.sleep(backoff * random.uniform(0.8, 1.2))
                backoff = min(_MAX_BACKOFF_SECONDS, backoff * 2)
        finally:
            self._membership.lose_replica(self._replica, is_hung=False)

    async def _follow(self) -> tuple[str, bool]:
        """Reads one stream to its end. Returns why it ended, and whether the replica hung."""
        known = [
            index_pb2.WorkerPosition(worker_id=worker.worker_id, epoch=worker.epoch, sequence=worker.sequence)
            for worker in self._index
        ]
        async with self._dial(self.address) as channel:
            stub: Any = index_pb2_grpc.IndexServiceStub(channel)
            call = stub.Watch(index_pb2.WatchRequest(known=known, own_only=True))
            try:
                while True:
                    async with asyncio.timeout(self._timeout_seconds):
                        response = await call.read()
                    if not isinstance(response, index_pb2.WatchResponse):
                        return "the replica ended the stream", False
                    if not self.connected:
                        self.connected = True
                        _log.info("following replica %s at %s", self._replica, self.address)
                    if not self._take(response):
                        return "its events have a gap", False
            except TimeoutError:
                return f"no message for {self._timeout_seconds:.1f} s", True
            except grpc.aio.AioRpcError as error:
                return problem_of(error), False
            except InvalidRequest as error:
                return error.message, False
            finally:
                call.cancel()

    def _take(self, response: index_pb2.WatchResponse) -> bool:
        """Applies a message. Returns False if a message before it is missing."""
        kind = response.WhichOneof("message")
        if kind == "heard":
            if self._membership.claim(response.heard.worker_id, Publisher(response.heard.term, self._replica)):
                self._mark_heard(response.heard)
        elif kind == "silent":
            if self._membership.claim(response.silent.worker_id, Publisher(0, self._replica)):
                self._index.mark_silent(response.silent.worker_id)
        elif kind == "forgotten":
            if self._publishes(response.forgotten.worker_id):
                self._index.forget(response.forgotten.worker_id)
        elif kind == "snapshot":
            if self._publishes(response.snapshot.worker_id):
                return self._index.receive(response.snapshot) is not Applied.OUT_OF_STEP
        elif kind is None:
            return self._take_batches(response)
        return True

    def _take_batches(self, response: index_pb2.WatchResponse) -> bool:
        applied = [self._index.apply(batch) for batch in response.batches if self._publishes(batch.worker_id)]
        return Applied.OUT_OF_STEP not in applied

    def _mark_heard(self, heard: index_pb2.WorkerHeard) -> None:
        known = self._index.get(heard.worker_id)
        if known is not None and known.is_silent and known.epoch == heard.epoch:
            self._index.mark_heard(heard.worker_id)

    def _publishes(self, worker_id: str) -> bool:
        publisher = self._membership.publisher(worker_id)
        return publisher is not None and publisher.replica == self._replica
