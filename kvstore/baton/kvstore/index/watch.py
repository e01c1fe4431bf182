"""The readers' streams: each gets what it lacks of every worker, then what changes, in order. Knows no gRPC.

A watcher hears a worker's changes from the moment its snapshot is taken; the two fit without gap or overlap
because both happen in one step of the event loop. Snapshots and batches are encoded once for all watchers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from baton.kvstore.index.index import Index, IndexListener
from baton.kvstore.index.speakers import Speakers
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
        speakers: Speakers,
        max_backlog_bytes: int,
        heartbeat_seconds: float,
        known: Mapping[str, Position],
        own_only: bool,
    ) -> None:
        self._index = index
        self._speakers = speakers
        self._max_backlog_bytes = max_backlog_bytes
        self._heartbeat_seconds = heartbeat_seconds
        self._own_only = own_only
        # Workers whose introduction is due, in the order in which they were met.
        self._due: dict[str, None] = {worker.worker_id: None for worker in index}
        self._known = dict(known)  # what it said that it has, of workers not introduced yet
        self._backlog: deque[tuple[bytes, bool]] = deque()  # message, and whether it is batches
        self._backlog_bytes = 0
        self._wake = asyncio.Event()
        self.is_cut = False

    @property
    def backlog_bytes(self) -> int:
        """What waits to be sent."""
        return self._backlog_bytes

    async def messages(self) -> AsyncIterator[bytes]:
        """Never ends by itself. Raises NoCapacity once the reader is too far behind.

        A heartbeat follows the first introductions: from there on the reader has the whole index.
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
            await self._something_new()

    def push(self, worker_id: str, message: bytes, is_batches: bool = False) -> None:
        """Sends a change, unless the worker's introduction is still due and will have it."""
        if worker_id in self._due or self.is_cut or not self._is_told_of(worker_id):
            return
        self._backlog.append((message, is_batches))
        self._backlog_bytes += len(message)
        if self._backlog_bytes > self._max_backlog_bytes:
            self.is_cut = True
            self._backlog.clear()
        self._wake.set()

    def drop(self, worker_id: str, message: bytes) -> None:
        """The worker was forgotten; `message` says so."""
        self._due.pop(worker_id, None)
        self.push(worker_id, message)

    def replace(self, worker_id: str) -> None:
        """The worker's blocks are others now: the reader has to be told of them anew."""
        if self._is_told_of(worker_id):
            self._due[worker_id] = None
            self._wake.set()

    def _is_told_of(self, worker_id: str) -> bool:
        return not self._own_only or self._speakers.is_own(worker_id)

    def _unknown(self) -> Iterator[bytes]:
        """Of what the reader has and we do not, nobody can say whether it is true."""
        if not self._own_only:
            for worker_id, (epoch, _) in self._known.items():
                if self._index.get(worker_id) is None:
                    yield encode_silent(worker_id, epoch)

    def _available(self) -> Iterator[bytes]:
        while True:
            if self.is_cut:
                raise NoCapacity(
                    f"the watcher is more than {self._max_backlog_bytes} bytes behind; watch again for a snapshot",
                    retry_after_ms=0,
                )
            if self._backlog:
                yield self._take()
            elif self._due:
                worker_id = next(iter(self._due))
                del self._due[worker_id]
                has = self._known.pop(worker_id, None)
                worker = self._index.get(worker_id)
                if worker is not None and self._is_told_of(worker_id):
                    yield from introduction(worker, has, self._speakers.term(worker_id))
            else:
                return

    def _take(self) -> bytes:
        """The next message, or several of batches as one: concatenated they mean the same."""
        message, is_batches = self._backlog.popleft()
        if is_batches and self._backlog and self._backlog[0][1]:
            pieces, size = [message], len(message)
            while self._backlog and self._backlog[0][1] and size < _MAX_MESSAGE_BYTES:
                pieces.append(self._backlog.popleft()[0])
                size += len(pieces[-1])
            message = b"".join(pieces)
        self._backlog_bytes -= len(message)
        return message

    async def _something_new(self) -> None:
        if not (self._backlog or self._due or self.is_cut):
            self._wake.clear()
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._wake.wait()
            except TimeoutError:
                return
        await asyncio.sleep(_GATHER_SECONDS)


class WatchHub(IndexListener):
    """All watchers of one index."""

    def __init__(
        self, index: Index, speakers: Speakers, max_backlog_bytes: int, heartbeat_seconds: float = 0.25
    ) -> None:
        self._index = index
        self._speakers = speakers
        self._max_backlog_bytes = max_backlog_bytes
        self._heartbeat_seconds = heartbeat_seconds
        self._watchers: set[Watcher] = set()
        index.listen(self)

    def __len__(self) -> int:
        return len(self._watchers)

    @contextmanager
    def watch(self, known: Mapping[str, Position] | None = None, own_only: bool = False) -> Iterator[Watcher]:
        """A watcher that is served inside the `with`."""
        watcher = Watcher(
            self._index, self._speakers, self._max_backlog_bytes, self._heartbeat_seconds, known or {}, own_only
        )
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)

    def on_batch(self, worker: WorkerBlocks, encoded: bytes) -> None:
        """Sends the batch on."""
        if self._watchers:
            message = _field(_BATCHES_TAG, encoded)
            for watcher in self._watchers:
                watcher.push(worker.worker_id, message, is_batches=True)

    def on_replaced(self, worker: WorkerBlocks) -> None:
        """Makes every watcher's next word on the worker a snapshot."""
        for watcher in self._watchers:
            watcher.replace(worker.worker_id)

    def on_silent(self, worker: WorkerBlocks) -> None:
        """Tells at once."""
        message = encode_silent(worker.worker_id, worker.epoch)
        for watcher in self._watchers:
            watcher.push(worker.worker_id, message)

    def on_heard(self, worker: WorkerBlocks) -> None:
        """Tells at once."""
        message = encode_heard(worker, self._speakers.term(worker.worker_id))
        for watcher in self._watchers:
            watcher.push(worker.worker_id, message)

    def on_forgotten(self, worker_id: str, epoch: int) -> None:
        """Tells at once."""
        message = encode_forgotten(worker_id, epoch)
        for watcher in self._watchers:
            watcher.drop(worker_id, message)


def introduction(worker: WorkerBlocks, has: Position | None, term: int) -> Iterator[bytes]:
    """All that a reader lacks of a worker who has this much."""
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
    """WorkerHeard, as a watcher is sent it."""
    heard = index_pb2.WorkerHeard(worker_id=worker.worker_id, epoch=worker.epoch, term=term)
    return index_pb2.WatchResponse(heard=heard).SerializeToString()


def encode_silent(worker_id: str, epoch: int) -> bytes:
    """WorkerSilent, as a watcher is sent it."""
    silent = index_pb2.WorkerSilent(worker_id=worker_id, epoch=epoch)
    return index_pb2.WatchResponse(silent=silent).SerializeToString()


def encode_heartbeat(num_messages: int) -> bytes:
    """WatchHeartbeat, as a watcher is sent it."""
    heartbeat = index_pb2.WatchHeartbeat(num_messages=num_messages)
    return index_pb2.WatchResponse(heartbeat=heartbeat).SerializeToString()


def encode_forgotten(worker_id: str, epoch: int) -> bytes:
    """WorkerForgotten, as a watcher is sent it."""
    forgotten = index_pb2.WorkerForgotten(worker_id=worker_id, epoch=epoch)
    return index_pb2.WatchResponse(forgotten=forgotten).SerializeToString()


def _grouped(batches: Sequence[bytes]) -> Iterator[bytes]:
    """Encoded batches as few messages."""
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
    """An encoded message as a field of another one."""
    length, size = bytearray(), len(encoded)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"".join((tag, length, encoded))
