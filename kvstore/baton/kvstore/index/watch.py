"""The readers' streams: each receives what it lacks of every worker, then all changes in order. Knows no gRPC.

A watcher receives a worker's changes from the moment at which the worker's snapshot is taken. There is no gap and no
overlap, because both happen in one step of the event loop. Snapshots and batches are encoded once for all watchers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from baton.kvstore.index.index import Index, IndexListener
from baton.kvstore.index.publishers import Publishers
from baton.kvstore.index.worker_blocks import WorkerBlocks
from baton.rpc.errors import NoCapacity
from baton.v1 import index_pb2

Position: TypeAlias = tuple[int, int]  # epoch, sequence

_GATHER_SECONDS = 0.005  # changes of this long share messages
_MAX_MESSAGE_BYTES = 256 << 10
_SNAPSHOT_TAG, _BATCHES_TAG = b"\x0a", b"\x12"  # fields 1 and 2 of WatchResponse


class Watcher:
    """One reader's stream of encoded WatchResponses."""

    def __init__(
        self,
        index: Index,
        publishers: Publishers,
        max_backlog_bytes: int,
        heartbeat_seconds: float,
        known: Mapping[str, Position],
        own_only: bool,
    ) -> None:
        self._index = index
        self._publishers = publishers
        self._max_backlog_bytes = max_backlog_bytes
        self._heartbeat_seconds = heartbeat_seconds
        self._own_only = own_only
        # Workers whose blocks must still be sent in full, in order.
        self._due: dict[str, None] = {worker.worker_id: None for worker in index}
        self._known = dict(known)  # positions that the reader sent, of workers not sent yet
        self._backlog: deque[tuple[bytes, bool]] = deque()  # message, and whether it is batches
        self._backlog_bytes = 0
        self._wake = asyncio.Event()
        self.is_cut = False

    @property
    def backlog_bytes(self) -> int:
        """Size of the unsent messages."""
        return self._backlog_bytes

    async def messages(self) -> AsyncIterator[bytes]:
        """Yields messages without end. Raises NoCapacity once the reader is too far behind.

        The first heartbeat follows the blocks of all workers: from there on the reader has the whole index.
        """
        count = 0
        for message in self._unknown():
            count += 1
            yield message
        while True:
            for message in self._available():
                count += 1
                yield message
            yield encode_heartbeat(count)
            count += 1
            await self._wait_for_changes()

    def push(self, worker_id: str, message: bytes, is_batches: bool = False) -> None:
        """Queues a change, unless the worker's blocks must still be sent in full and will include it."""
        if worker_id in self._due or self.is_cut or not self._includes(worker_id):
            return
        self._backlog.append((message, is_batches))
        self._backlog_bytes += len(message)
        if self._backlog_bytes > self._max_backlog_bytes:
            self.is_cut = True
            self._backlog.clear()
        self._wake.set()

    def drop(self, worker_id: str, message: bytes) -> None:
        """Queues the message that a worker was forgotten."""
        self._due.pop(worker_id, None)
        self.push(worker_id, message)

    def replace(self, worker_id: str) -> None:
        """Sends a worker's blocks in full again, because they were replaced."""
        if self._includes(worker_id):
            self._due[worker_id] = None
            self._wake.set()

    def _includes(self, worker_id: str) -> bool:
        return not self._own_only or self._publishers.is_own(worker_id)

    def _unknown(self) -> Iterator[bytes]:
        """Reports workers as silent that the reader has and the index lacks: their entries may be stale."""
        if not self._own_only:
            for worker_id, (epoch, _) in self._known.items():
                if self._index.get(worker_id) is None:
                    yield encode_silent(worker_id, epoch)

    def _available(self) -> Iterator[bytes]:
        while True:
            if self.is_cut:
                raise NoCapacity(
                    f"the watcher is more than {self._max_backlog_bytes} bytes behind; watch again to get a snapshot",
                    retry_after_ms=0,
                )
            if self._backlog:
                yield self._take()
            elif self._due:
                worker_id = next(iter(self._due))
                del self._due[worker_id]
                has = self._known.pop(worker_id, None)
                worker = self._index.get(worker_id)
                if worker is not None and self._includes(worker_id):
                    yield from introduction(worker, has, self._publishers.term(worker_id))
            else:
                return

    def _take(self) -> bytes:
        """Returns the next message. Joins batches: concatenated messages decode as one."""
        message, is_batches = self._backlog.popleft()
        if is_batches and self._backlog and self._backlog[0][1]:
            pieces, size = [message], len(message)
            while self._backlog and self._backlog[0][1] and size < _MAX_MESSAGE_BYTES:
                pieces.append(self._backlog.popleft()[0])
                size += len(pieces[-1])
            message = b"".join(pieces)
        self._backlog_bytes -= len(message)
        return message

    async def _wait_for_changes(self) -> None:
        if not (self._backlog or self._due or self.is_cut):
            self._wake.clear()
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._wake.wait()
            except TimeoutError:
                return
        await asyncio.sleep(_GATHER_SECONDS)


class WatchHub(IndexListener):
    """Sends the changes of one index to all watchers."""

    def __init__(
        self, index: Index, publishers: Publishers, max_backlog_bytes: int, heartbeat_seconds: float = 0.25
    ) -> None:
        self._index = index
        self._publishers = publishers
        self._max_backlog_bytes = max_backlog_bytes
        self._heartbeat_seconds = heartbeat_seconds
        self._watchers: set[Watcher] = set()
        index.listen(self)

    def __len__(self) -> int:
        return len(self._watchers)

    @contextmanager
    def watch(self, known: Mapping[str, Position] | None = None, own_only: bool = False) -> Iterator[Watcher]:
        """Adds a watcher for the `with` body."""
        watcher = Watcher(
            self._index, self._publishers, self._max_backlog_bytes, self._heartbeat_seconds, known or {}, own_only
        )
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)

    def on_batch(self, worker: WorkerBlocks, encoded: bytes) -> None:
        """Queues the batch for every watcher."""
        if self._watchers:
            message = _field(_BATCHES_TAG, encoded)
            for watcher in self._watchers:
                watcher.push(worker.worker_id, message, is_batches=True)

    def on_replaced(self, worker: WorkerBlocks) -> None:
        """Makes every watcher send the worker's blocks in full."""
        for watcher in self._watchers:
            watcher.replace(worker.worker_id)

    def on_silent(self, worker: WorkerBlocks) -> None:
        """Queues WorkerSilent for every watcher."""
        message = encode_silent(worker.worker_id, worker.epoch)
        for watcher in self._watchers:
            watcher.push(worker.worker_id, message)

    def on_heard(self, worker: WorkerBlocks) -> None:
        """Queues WorkerHeard for every watcher."""
        message = encode_heard(worker, self._publishers.term(worker.worker_id))
        for watcher in self._watchers:
            watcher.push(worker.worker_id, message)

    def on_forgotten(self, worker_id: str, epoch: int) -> None:
        """Queues WorkerForgotten for every watcher."""
        message = encode_forgotten(worker_id, epoch)
        for watcher in self._watchers:
            watcher.drop(worker_id, message)


def introduction(worker: WorkerBlocks, has: Position | None, term: int) -> Iterator[bytes]:
    """Yields the messages that bring a reader from position `has` to the worker's present blocks."""
    yield encode_silent(worker.worker_id, worker.epoch) if worker.is_silent else encode_heard(worker, term)
    missing: Sequence[bytes] | None = None
    if has is not None and has[0] == worker.epoch:
        missing = worker.since(has[1])
    if missing is None:
        missing = list(worker.since(worker.base.barrier) or ())
        for part in worker.base.parts:
            yield _field(_SNAPSHOT_TAG, part)
    yield from _grouped(missing)


def encode_heard(worker: WorkerBlocks, term: int) -> bytes:
    """Encodes a WorkerHeard response."""
    heard = index_pb2.WorkerHeard(worker_id=worker.worker_id, epoch=worker.epoch, term=term)
    return index_pb2.WatchResponse(heard=heard).SerializeToString()


def encode_silent(worker_id: str, epoch: int) -> bytes:
    """Encodes a WorkerSilent response."""
    silent = index_pb2.WorkerSilent(worker_id=worker_id, epoch=epoch)
    return index_pb2.WatchResponse(silent=silent).SerializeToString()


def encode_heartbeat(num_messages: int) -> bytes:
    """Encodes a WatchHeartbeat response."""
    heartbeat = index_pb2.WatchHeartbeat(num_messages=num_messages)
    return index_pb2.WatchResponse(heartbeat=heartbeat).SerializeToString()


def encode_forgotten(worker_id: str, epoch: int) -> bytes:
    """Encodes a WorkerForgotten response."""
    forgotten = index_pb2.WorkerForgotten(worker_id=worker_id, epoch=epoch)
    return index_pb2.WatchResponse(forgotten=forgotten).SerializeToString()


def _grouped(batches: Sequence[bytes]) -> Iterator[bytes]:
    """Joins encoded batches into few messages."""
    pieces: list[bytes] = []
    size = 0
    for encoded in batches:
        pieces.append(_field(_BATCHES_TAG, encoded))
        size += len(encoded)
        if size > _MAX_MESSAGE_BYTES:
            yield b"".join(pieces)
            pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


def _field(tag: bytes, encoded: bytes) -> bytes:
    """Encodes a message as a field of another one."""
    length, size = bytearray(), len(encoded)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"".join((tag, length, encoded))
