"""Writes the index's changes to the store in the background, with a bounded backlog. An IndexListener.

Each worker that publishes to this replica is in one of three states: in step (new batches are appended), to be written
(a snapshot replaces the stored data), or to be forgotten. Any failure makes it "to be written", because the index is
the truth. Workers that publish to another replica are written by that replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from baton.kvstore.counters import KvstoreCounters
from baton.kvstore.index.index import Index, IndexListener
from baton.kvstore.index.publishers import Publishers
from baton.kvstore.index.worker_blocks import WorkerBlocks, restore
from baton.kvstore.store.store import Store, StoredWorker, StoreError
from baton.rpc.errors import InvalidRequest

_log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.02  # changes within this time share a round trip
_CHECK_SECONDS = 5.0
_MIN_BACKOFF_SECONDS = 0.25
_MAX_BACKOFF_SECONDS = 5.0


class WriteBehind(IndexListener):
    """Owns the changes that are not yet written."""

    def __init__(
        self,
        index: Index,
        publishers: Publishers,
        store: Store,
        max_backlog_bytes: int,
        counters: KvstoreCounters,
        on_loaded: Callable[[str], None],
    ) -> None:
        self._index = index
        self._publishers = publishers
        self._store = store
        self._max_backlog_bytes = max_backlog_bytes
        self._counters = counters
        self._on_loaded = on_loaded  # called with each worker loaded from the store
        self._batches: dict[str, list[bytes]] = {}
        self._backlog_bytes: dict[str, int] = {}
        self._to_write: set[str] = set()
        self._to_forget: set[str] = set()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._problem = ""
        self._is_loaded = False
        self._check_due = 0.0  # loop time
        self.loaded = asyncio.Event()  # the first attempt to load has ended, successful or not
        index.listen(self)

    @property
    def is_settled(self) -> bool:
        """Whether all changes are written."""
        return not (self._batches or self._to_write or self._to_forget or self._problem)

    @property
    def backlog_bytes(self) -> int:
        """Size of the encoded batches that are not yet written."""
        return sum(list(self._backlog_bytes.values()))

    @property
    def is_up(self) -> bool:
        """Whether the last call to the store succeeded."""
        return not self._problem

    def on_batch(self, worker: WorkerBlocks, encoded: bytes) -> None:
        """Queues a batch. If the backlog is full, a snapshot replaces it."""
        worker_id = worker.worker_id
        if worker_id in self._to_write or not self._publishers.is_own(worker_id):
            return
        size = self._backlog_bytes.get(worker_id, 0) + len(encoded)
        if size > self._max_backlog_bytes:
            self._queue_write(worker_id)
            return
        self._batches.setdefault(worker_id, []).append(encoded)
        self._backlog_bytes[worker_id] = size
        self._wake.set()

    def on_replaced(self, worker: WorkerBlocks) -> None:
        """Queues the worker's snapshot, which is taken when it is written."""
        if self._is_ours(worker.worker_id):
            self._queue_write(worker.worker_id)

    def on_rebased(self, worker: WorkerBlocks) -> None:
        """Queues the worker's new, shorter snapshot."""
        self.on_replaced(worker)

    def on_heard(self, worker: WorkerBlocks) -> None:
        """Queues an append without batches, which checks the stored log."""
        worker_id = worker.worker_id
        if self._is_ours(worker_id) and worker_id not in self._to_write:
            self._batches.setdefault(worker_id, [])
            self._wake.set()

    def on_forgotten(self, worker_id: str, epoch: int) -> None:
        """Queues the removal of the worker."""
        self._drop_queued(worker_id)
        publisher = self._publishers.get(worker_id)
        if publisher is None or publisher.is_own:
            self._to_forget.add(worker_id)
            self._wake.set()

    def stop(self) -> None:
        """Ends `run` after its current call. (On Python 3.11 the Redis client may swallow a cancellation.)"""
        self._stopping.set()
        self._wake.set()

    async def run(self) -> None:
        """Writes until stopped."""
        backoff = _MIN_BACKOFF_SECONDS
        while not self._stopping.is_set():
            try:
                await self._sync()
            except StoreError as error:
                self._failed(error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff):
                        await self._stopping.wait()
                backoff = min(_MAX_BACKOFF_SECONDS, backoff * 2)
                continue
            finally:
                self.loaded.set()
            backoff = _MIN_BACKOFF_SECONDS
            self._succeeded()
            await self._wait_for_work()

    async def flush(self, seconds: float) -> None:
        """Writes the backlog within the given time. Call at shutdown, after `run`."""
        try:
            async with asyncio.timeout(seconds):
                while not self.is_settled:
                    await self._sync()
                    self._succeeded()
        except (StoreError, TimeoutError) as error:
            _log.warning("store %s: the last changes are not written: %s", self._store.name, error)

    async def _sync(self) -> None:
        if not self._is_loaded:
            await self._load()
        await self._check()
        await self._append()
        while self._to_forget:
            worker_id = next(iter(self._to_forget))
            await self._store.forget(worker_id)
            self._to_forget.discard(worker_id)
        while self._to_write:
            await self._write(next(iter(self._to_write)))

    async def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._check_due:
            return
        lost = [worker_id for worker_id in await self._store.check() if self._publishers.is_own(worker_id)]
        self._check_due = now + _CHECK_SECONDS
        if lost:
            _log.warning("store %s lost the data of %d workers; writing it again", self._store.name, len(lost))
        for worker_id in lost:
            self._queue_write(worker_id)

    async def _load(self) -> None:
        num_workers = 0
        async for stored in self._store.load():
            worker_id = stored.snapshot[0].worker_id
            # Events received since the start are newer than the stored ones.
            if self._index.get(worker_id) is None and self._restore(stored):
                num_workers += 1
                self._on_loaded(worker_id)
        self._is_loaded = True
        _log.info(
            "store %s: %d workers loaded; their blocks count once they confirm them", self._store.name, num_workers
        )

    def _restore(self, stored: StoredWorker) -> bool:
        """Puts a stored worker into the index, silent. Returns False if its data is inconsistent."""
        try:
            worker = restore(stored.snapshot, stored.batches)
        except (InvalidRequest, DecodeError) as error:
            worker_id = stored.snapshot[0].worker_id
            _log.warning("store %s: cannot load worker %s: %s", self._store.name, worker_id, error)
            return False
        worker.is_silent = True
        self._index.restore(worker)
        return True

    async def _append(self) -> None:
        batches, self._batches = self._batches, {}
        self._backlog_bytes.clear()
        batches = {worker_id: encoded for worker_id, encoded in batches.items() if self._publishers.is_own(worker_id)}
        if not batches:
            return
        try:
            wanting = await self._store.append(batches)
        except BaseException:
            # It is unknown how many of the batches were written.
            for worker_id in batches:
                self._queue_write(worker_id)
            raise
        for worker_id in wanting:
            self._queue_write(worker_id)

    async def _write(self, worker_id: str) -> None:
        worker = self._index.get(worker_id)
        self._to_write.discard(worker_id)
        if worker is None or not self._publishers.is_own(worker_id):
            return
        barrier = worker.base.barrier
        try:
            await self._store.write(worker_id, worker.epoch, worker.base.parts)
            self._queue_since(worker, barrier)
        except BaseException:
            self._queue_write(worker_id)
            raise
        self._counters.store_rewrites.inc()

    def _queue_since(self, worker: WorkerBlocks, barrier: int) -> None:
        """Queues the batches after a snapshot that was just written, including those received meanwhile."""
        worker_id = worker.worker_id
        if self._index.get(worker_id) is not worker or worker_id in self._to_write:
            return
        batches = worker.since(barrier)
        if batches is None:
            self._queue_write(worker_id)
            return
        self._batches[worker_id] = list(batches)
        self._backlog_bytes[worker_id] = 0  # the index keeps these anyway
        if batches:
            self._wake.set()

    def _is_ours(self, worker_id: str) -> bool:
        """Returns whether the worker publishes to this replica. If not, drops its queue: another replica writes it."""
        publisher = self._publishers.get(worker_id)
        if publisher is not None and not publisher.is_own:
            self._drop_queued(worker_id)
            self._to_forget.discard(worker_id)
            self._store.disown(worker_id)
        return publisher is not None and publisher.is_own

    def _queue_write(self, worker_id: str) -> None:
        self._drop_queued(worker_id)
        if self._index.get(worker_id) is not None:
            self._to_forget.discard(worker_id)
            self._to_write.add(worker_id)
            self._wake.set()

    def _drop_queued(self, worker_id: str) -> None:
        self._batches.pop(worker_id, None)
        self._backlog_bytes.pop(worker_id, None)
        self._to_write.discard(worker_id)

    async def _wait_for_work(self) -> None:
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_GATHER_SECONDS)
        self._wake.clear()

    def _failed(self, error: StoreError) -> None:
        self._counters.store_errors.labels(error.kind).inc()
        if error.kind != self._problem:
            _log.error("store %s; serving from memory", error)
            self._problem = error.kind

    def _succeeded(self) -> None:
        if self._problem:
            _log.info("store %s is back and up to date", self._store.name)
            self._problem = ""
