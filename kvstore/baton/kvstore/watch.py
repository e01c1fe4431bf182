"""The routers' streams: each gets every worker's snapshot, then what changed, in order. Knows no gRPC.

A watcher hears a worker's changes from the moment its snapshot is taken; the two fit without gap or overlap
because both happen in one step of the event loop. Messages are encoded once for all watchers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from baton.kvstore.index import Index
from baton.kvstore.worker_blocks import WorkerBlocks
from baton.rpc.errors import NoCapacity
from baton.v1 import index_pb2, kv_pb2

_HEARTBEAT = index_pb2.WatchResponse(heartbeat=index_pb2.WatchHeartbeat()).SerializeToString()


class Watcher:
    """One router's stream of encoded WatchResponses."""

    def __init__(self, index: Index, max_backlog_bytes: int, heartbeat_seconds: float) -> None:
        self._index = index
        self._max_backlog_bytes = max_backlog_bytes
        self._heartbeat_seconds = heartbeat_seconds
        # Workers whose snapshot is due, in the order in which they were met.
        self._due: dict[str, None] = {worker.worker_id: None for worker in index}
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._wake = asyncio.Event()
        self.is_cut = False

    @property
    def backlog_bytes(self) -> int:
        """What waits to be sent."""
        return self._backlog_bytes

    async def messages(self) -> AsyncIterator[bytes]:
        """Never ends by itself. Raises NoCapacity once the reader is too far behind.

        A heartbeat follows the first snapshots: from there on the reader has the whole index.
        """
        while True:
            for message in self._available():
                yield message
            yield _HEARTBEAT
            await self._something_new()

    def push(self, worker_id: str, message: bytes) -> None:
        """Sends a change, unless the worker's snapshot is still due and will have it."""
        if worker_id in self._due or self.is_cut:
            return
        self._backlog.append(message)
        self._backlog_bytes += len(message)
        if self._backlog_bytes > self._max_backlog_bytes:
            self.is_cut = True
            self._backlog.clear()
        self._wake.set()

    def expect_snapshot(self, worker_id: str) -> None:
        """The worker's blocks were replaced."""
        self._due[worker_id] = None
        self._wake.set()

    def drop(self, worker_id: str, message: bytes) -> None:
        """The worker was forgotten; `message` says so."""
        self._due.pop(worker_id, None)
        self.push(worker_id, message)

    def _available(self) -> Iterator[bytes]:
        while True:
            if self.is_cut:
                raise NoCapacity(
                    f"the watcher is more than {self._max_backlog_bytes} bytes behind; watch again for a snapshot",
                    retry_after_ms=0,
                )
            if self._backlog:
                message = self._backlog.popleft()
                self._backlog_bytes -= len(message)
                yield message
            elif self._due:
                worker_id = next(iter(self._due))
                del self._due[worker_id]
                worker = self._index.get(worker_id)
                if worker is not None:
                    yield from map(encode_snapshot, worker.snapshot())
            else:
                return

    async def _something_new(self) -> None:
        while not (self._backlog or self._due or self.is_cut):
            self._wake.clear()
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._wake.wait()
            except TimeoutError:
                return


class WatchHub:
    """All watchers of one index; an IndexListener."""

    def __init__(self, index: Index, max_backlog_bytes: int, heartbeat_seconds: float = 1.0) -> None:
        self._index = index
        self._max_backlog_bytes = max_backlog_bytes
        self._heartbeat_seconds = heartbeat_seconds
        self._watchers: set[Watcher] = set()
        index.listen(self)

    def __len__(self) -> int:
        return len(self._watchers)

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """A watcher that is served inside the `with`."""
        watcher = Watcher(self._index, self._max_backlog_bytes, self._heartbeat_seconds)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)

    def on_batch(self, batch: kv_pb2.KvEventBatch) -> None:
        """Sends the batch on."""
        if self._watchers:
            message = index_pb2.WatchResponse(batch=batch).SerializeToString()
            for watcher in self._watchers:
                watcher.push(batch.worker_id, message)

    def on_replaced(self, worker: WorkerBlocks) -> None:
        """Makes every watcher's next word on the worker a snapshot."""
        for watcher in self._watchers:
            watcher.expect_snapshot(worker.worker_id)

    def on_forgotten(self, worker_id: str, epoch: int) -> None:
        """Tells at once."""
        forgotten = index_pb2.WorkerForgotten(worker_id=worker_id, epoch=epoch)
        message = index_pb2.WatchResponse(forgotten=forgotten).SerializeToString()
        for watcher in self._watchers:
            watcher.drop(worker_id, message)


def encode_snapshot(part: kv_pb2.KvSnapshot) -> bytes:
    """A snapshot's part as a watcher is sent it."""
    return index_pb2.WatchResponse(snapshot=part).SerializeToString()
