"""Carries the index's changes to the store, behind the index's back: bounded, never waited for. An IndexListener.

Each worker is in one of three states: in step (its new batches are appended), to be written (its snapshot replaces
what the store has), or to be forgotten. Whatever goes wrong makes it "to be written": the index is the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from baton.kvstore.index import Index
from baton.kvstore.metrics import KvstoreMetrics
from baton.kvstore.store import Store, StoredWorker, StoreError
from baton.kvstore.worker_blocks import WorkerBlocks
from baton.rpc.errors import InvalidRequest
from baton.v1 import kv_pb2

_log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.02  # changes of this long share a round trip
_CHECK_SECONDS = 5.0
_MIN_BACKOFF_SECONDS = 0.25
_MAX_BACKOFF_SECONDS = 5.0


class WriteBehind:
    """Owns what the store does not have yet."""

    def __init__(
        self,
        index: Index,
        store: Store,
        max_backlog_bytes: int,
        metrics: KvstoreMetrics,
        on_loaded: Callable[[str], None],
    ) -> None:
        self._index = index
        self._store = store
        self._max_backlog_bytes = max_backlog_bytes
        self._metrics = metrics
        self._on_loaded = on_loaded  # a worker came from the store; nobody has confirmed it yet
        self._batches: dict[str, list[bytes]] = {}
        self._backlog_bytes: dict[str, int] = {}
        self._to_write: set[str] = set()
        self._to_forget: set[str] = set()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._problem = ""
        self._is_loaded = False
        self.loaded = asyncio.Event()  # the first attempt to load has ended, well or not
        index.listen(self)

    @property
    def is_settled(self) -> bool:
        """Whether the store has everything."""
        return not (self._batches or self._to_write or self._to_forget or self._problem)

    @property
    def backlog_bytes(self) -> int:
        """Encoded batches that wait."""
        return sum(list(self._backlog_bytes.values()))

    @property
    def is_up(self) -> bool:
        """Whether the last exchange with the store went well."""
        return not self._problem

    def on_batch(self, batch: kv_pb2.KvEventBatch) -> None:
        """Queues a batch; a queue that grows too long becomes a snapshot to write."""
        worker_id = batch.worker_id
        if worker_id in self._to_write:
            return
        encoded = batch.SerializeToString()
        size = self._backlog_bytes.get(worker_id, 0) + len(encoded)
        if size > self._max_backlog_bytes:
            self._write_anew(worker_id)
            return
        self._batches.setdefault(worker_id, []).append(encoded)
        self._backlog_bytes[worker_id] = size
        self._wake.set()

    def on_replaced(self, worker: WorkerBlocks) -> None:
        """Queues the worker's snapshot; it is taken when it is written."""
        self._write_anew(worker.worker_id)

    def on_forgotten(self, worker_id: str, epoch: int) -> None:
        """Queues the end of the worker."""
        self._drop_queued(worker_id)
        self._to_forget.add(worker_id)
        self._wake.set()

    def stop(self) -> None:
        """Ends `run` after the exchange it is in. (On Python 3.11 the Redis client may swallow a cancellation.)"""
        self._stopping.set()
        self._wake.set()

    async def run(self) -> None:
        """Writes until stopped."""
        backoff = _MIN_BACKOFF_SECONDS
        while not self._stopping.is_set():
            try:
                await self._exchange()
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
            await self._something_to_do()

    async def flush(self, seconds: float) -> None:
        """Writes what waits, as far as the time allows. For the end of the service, after `run`."""
        if self.is_settled:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._exchange()
        except (StoreError, TimeoutError) as error:
            _log.warning("store %s lacks the last changes: %s", self._store.name, error)

    async def _exchange(self) -> None:
        if not self._is_loaded:
            await self._load()
        elif not await self._store.check():
            self._rewrite_all()
        await self._append()
        while self._to_forget:
            worker_id = next(iter(self._to_forget))
            await self._store.forget(worker_id)
            self._to_forget.discard(worker_id)
        while self._to_write:
            await self._write(next(iter(self._to_write)))

    async def _load(self) -> None:
        num_workers = 0
        async for stored in self._store.load():
            worker_id = stored.snapshot[0].worker_id
            # What workers have said since is newer than anything kept.
            if self._index.get(worker_id) is None and self._restore(stored):
                num_workers += 1
                self._on_loaded(worker_id)
        self._is_loaded = True
        _log.info("store %s: %d workers loaded, until they confirm", self._store.name, num_workers)

    def _restore(self, stored: StoredWorker) -> bool:
        """Puts what was kept of one worker into the index. False: it contradicts itself."""
        worker_id = stored.snapshot[0].worker_id
        worker = WorkerBlocks(worker_id, stored.snapshot[0].epoch, stored.snapshot[0].barrier)
        try:
            for part in stored.snapshot:
                worker.add(part)
            for batch in stored.batches:
                if not worker.follows(batch):
                    raise InvalidRequest(f"a gap after sequence {worker.sequence}")
                worker.apply(batch)
        except InvalidRequest as error:
            _log.warning("store %s: worker %s is not loaded: %s", self._store.name, worker_id, error.message)
            return False
        self._index.restore(worker)
        self._to_write.discard(worker_id)
        return True

    async def _append(self) -> None:
        batches, self._batches = self._batches, {}
        self._backlog_bytes.clear()
        if not batches:
            return
        try:
            wanting = await self._store.append(batches)
        except BaseException:
            # How much of it arrived is unknown.
            for worker_id in batches:
                self._write_anew(worker_id)
            raise
        for worker_id in wanting:
            self._write_anew(worker_id)

    async def _write(self, worker_id: str) -> None:
        worker = self._index.get(worker_id)
        self._to_write.discard(worker_id)
        if worker is None:
            return
        try:
            await self._store.write(worker_id, list(worker.snapshot()))
        except BaseException:
            self._write_anew(worker_id)
            raise
        self._metrics.store_rewrites.inc()

    def _rewrite_all(self) -> None:
        _log.warning("store %s has lost what was written; every worker is written anew", self._store.name)
        for worker in self._index:
            self._write_anew(worker.worker_id)

    def _write_anew(self, worker_id: str) -> None:
        self._drop_queued(worker_id)
        if self._index.get(worker_id) is not None:
            self._to_forget.discard(worker_id)
            self._to_write.add(worker_id)
            self._wake.set()

    def _drop_queued(self, worker_id: str) -> None:
        self._batches.pop(worker_id, None)
        self._backlog_bytes.pop(worker_id, None)
        self._to_write.discard(worker_id)

    async def _something_to_do(self) -> None:
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_GATHER_SECONDS)
        self._wake.clear()

    def _failed(self, error: StoreError) -> None:
        self._metrics.store_errors.labels(error.kind).inc()
        if error.kind != self._problem:
            _log.error("store %s; serving on from memory", error)
            self._problem = error.kind

    def _succeeded(self) -> None:
        if self._problem:
            _log.info("store %s is back, and has everything", self._store.name)
            self._problem = ""
