"""The stream from the kvstore: dialled, followed, dialled again, at any of its replicas.

Without it the index serves as it was last known. A new stream begins with what the index has, so that another replica
sends only what is missing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from baton.router.index.prefix_index import PrefixIndex
from baton.rpc.address import split_addresses
from baton.rpc.channel import open_channel
from baton.rpc.errors import problem_of
from baton.v1 import index_pb2, index_pb2_grpc, kv_pb2

_log = logging.getLogger(__name__)

_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 0.4  # the index is to be right a second after a kvstore is back
# Heartbeats come four times a second. Where there is another replica, a hung one must not cost a second of truth.
_TIMEOUT_SECONDS = 0.7
_TIMEOUT_WITH_ONE_SECONDS = 3.5
_CONNECT_SECONDS = 1.0
_RETENTION_SECONDS = 60.0  # a worker that is silent for so long is dropped
_BLOCKS_PER_TURN = 256  # applied at once, in a fraction of a millisecond
_SNAPSHOT_BLOCKS_PER_TURN = 4096  # about a millisecond
_LINES_PER_CLEANING = 16_384  # about a quarter of a millisecond


class IndexClient:
    """Keeps one PrefixIndex equal to the kvstore, for as long as `run` runs. `addresses` are its replicas."""

    def __init__(
        self,
        index: PrefixIndex,
        addresses: str | Sequence[str],
        retention_seconds: float = _RETENTION_SECONDS,
        dial: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._index = index
        self._addresses = list(split_addresses(addresses, "kvstore")) if isinstance(addresses, str) else list(addresses)
        self._retention_seconds = retention_seconds
        self._dial = dial
        self._reported: set[str] = set()  # workers that this stream has reported
        self._silent_since: dict[str, float] = {}  # loop time
        self._cleaning: asyncio.Task[None] | None = None
        self.address = ""  # of the replica that is followed, or was last
        self.connected = False
        self.is_whole = False  # the stream has reported everything
        self.num_resyncs = 0  # streams given up because of a gap
        self.num_stale_blocks = 0  # entries that were dropped because they were found to be out of step

    async def run(self) -> None:
        """Follows the kvstore until cancelled."""
        backoff, problems = _MIN_BACKOFF_SECONDS, dict.fromkeys(self._addresses, "")
        turn = random.randrange(len(self._addresses))
        try:
            while True:
                address = self._addresses[turn % len(self._addresses)]
                problem = await self._follow(address)
                was_connected, self.connected = self.connected, False
                self.is_whole = False
                if was_connected:
                    backoff = _MIN_BACKOFF_SECONDS
                    problems = dict.fromkeys(self._addresses, "")
                if problem != problems[address]:
                    _log.warning("kvstore %s: %s; placing with the known entries", address, problem)
                    problems[address] = problem
                turn += 1
                # Another replica is asked at once; a wait comes after each round.
                if not was_connected or len(self._addresses) == 1:
                    await asyncio.sleep(backoff * random.uniform(0.8, 1.2) / len(self._addresses))
                    backoff = min(_MAX_BACKOFF_SECONDS, backoff * 2)
        finally:
            if self._cleaning is not None:
                self._cleaning.cancel()

    @property
    def _timeout_seconds(self) -> float:
        if not self.connected:
            return _CONNECT_SECONDS
        return _TIMEOUT_SECONDS if len(self._addresses) > 1 else _TIMEOUT_WITH_ONE_SECONDS

    async def _follow(self, address: str) -> str:
        """Reads one stream to its end and returns why it ended."""
        self._reported, self.is_whole = set(), False
        async with self._dial(address) as channel:
            stub: Any = index_pb2_grpc.IndexServiceStub(channel)
            call = stub.Watch(index_pb2.WatchRequest(known=self._positions()))
            count = 0
            try:
                while True:
                    async with asyncio.timeout(self._timeout_seconds):
                        response = await call.read()
                    if not isinstance(response, index_pb2.WatchResponse):
                        return "it ended the stream"
                    if not self.connected:
                        self.connected, self.address = True, address
                        _log.info("kvstore %s: the index follows it", address)
                    if response.heartbeat.num_messages not in (0, count) or not await self._take(response):
                        self.num_resyncs += 1
                        return "its events have a gap"
                    count += 1
            except TimeoutError:
                return f"silent for {self._timeout_seconds:.1f} s"
            except grpc.aio.AioRpcError as error:
                return problem_of(error)
            finally:
                call.cancel()

    def _positions(self) -> Iterator[index_pb2.WorkerPosition]:
        for worker_id in self._index.worker_ids:
            position = self._index.position(worker_id)
            if position is not None:
                epoch, sequence = position
                yield index_pb2.WorkerPosition(worker_id=worker_id, epoch=epoch, sequence=sequence)

    async def _take(self, response: index_pb2.WatchResponse) -> bool:
        """Applies a message. Returns False if a message before it is missing."""
        kind = response.WhichOneof("message")
        if kind == "snapshot":
            return await self._take_snapshot(response.snapshot)
        if kind == "heard":
            self._mark_heard(response.heard.worker_id)
        elif kind == "silent":
            self._mark_silent(response.silent.worker_id)
        elif kind == "forgotten":
            self._reported.discard(response.forgotten.worker_id)
            self._drop(response.forgotten.worker_id)
        elif kind == "heartbeat":
            self._take_heartbeat()
        else:
            return await self._take_batches(response.batches)
        return True

    async def _take_snapshot(self, part: kv_pb2.KvSnapshot) -> bool:
        self._reported.add(part.worker_id)
        belongs = self._index.collect(part)
        more = True
        while more:
            more = self._index.absorb(_SNAPSHOT_BLOCKS_PER_TURN)
            await asyncio.sleep(0)  # lookups go first
        self._clean_up()
        return belongs

    async def _take_batches(self, batches: Iterable[kv_pb2.KvEventBatch]) -> bool:
        in_step = True
        for turn in _turns(batches):
            strangers = {batch.worker_id for batch in turn if self._index.epoch(batch.worker_id) is None}
            # Some were dropped because the worker reported a new epoch, which the kvstore will report too.
            in_step = in_step and strangers <= self._reported
            dropped = self._index.apply_all(batch for batch in turn if batch.worker_id not in strangers)
            if dropped:
                in_step = False
                self.num_stale_blocks += sum(dropped.values())
                self._clean_up()
            await asyncio.sleep(0)  # lookups go first
        return in_step

    def _mark_heard(self, worker_id: str) -> None:
        self._reported.add(worker_id)
        self._silent_since.pop(worker_id, None)
        self._index.mark_heard(worker_id)

    def _mark_silent(self, worker_id: str) -> None:
        self._reported.add(worker_id)
        self._silent_since.setdefault(worker_id, asyncio.get_running_loop().time())
        self._index.mark_silent(worker_id)

    def _take_heartbeat(self) -> None:
        """Takes a heartbeat: all workers have been reported. Others that the index has may be stale."""
        self.is_whole = True
        for worker_id in self._index.worker_ids:
            if worker_id not in self._reported:
                self._mark_silent(worker_id)
        if self._silent_since:
            limit = asyncio.get_running_loop().time() - self._retention_seconds
            for worker_id in [one for one, since in self._silent_since.items() if since < limit]:
                self._drop(worker_id)

    def _drop(self, worker_id: str) -> None:
        self._silent_since.pop(worker_id, None)
        self.num_stale_blocks += self._index.drop(worker_id)
        self._index.mark_heard(worker_id)
        self._clean_up()

    def _clean_up(self) -> None:
        if self._index.num_dying_blocks and self._cleaning is None:
            self._cleaning = asyncio.create_task(self._clean())

    async def _clean(self) -> None:
        try:
            more = True
            while more:
                await asyncio.sleep(0)  # lookups go first
                more = self._index.clean(_LINES_PER_CLEANING)
        finally:
            self._cleaning = None


def _turns(batches: Iterable[kv_pb2.KvEventBatch]) -> Iterator[list[kv_pb2.KvEventBatch]]:
    """Splits batches into groups that take about the same time."""
    turn: list[kv_pb2.KvEventBatch] = []
    size = 0
    for batch in batches:
        turn.append(batch)
        size += batch.ByteSize()
        if size >= 16 * _BLOCKS_PER_TURN:
            yield turn
            turn, size = [], 0
    if turn:
        yield turn
