"""Carries the index's changes to the store, behind the index's back: bounded, never waited for. An IndexListener.

Each worker that publishes here is in one of three states: in step (its new batches are appended), to be written (its
snapshot replaces what the store has), or to be forgotten. Whatever goes wrong makes it "to be written": the index is
the truth. Workers that publish to another replica are that one's to write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from baton.kvstore.index.index import Index, IndexListener
from baton.kvstore.index.speakers import Speakers
from baton.kvstore.index.worker_blocks import WorkerBlocks, restore
from baton.kvstore.metrics import KvstoreMetrics
from baton.kvstore.store.store import Store, StoredWorker, StoreError
from baton.rpc.errors import InvalidRequest

_log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.02  # changes of this long share a round trip
_CHECK_SECONDS = 5.0
_MIN_BACKOFF_SECONDS = 0.25
_MAX_BACKOFF_SECONDS = 5.0


class WriteBehind(IndexListener):
    """Owns what the store does not have yet."""

    def __init__(
        self,
        index: Index,
        speakers: Speakers,
        store: Store,
        max_backlog_bytes: int,
        metrics: KvstoreMetrics,
        on_loaded: Callable[[str], None],
    ) -> None:
        self._index = index
        self._speakers = speakers
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
        self._check_due = 0.0  # loop time
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

    def on_batch(self, worker: WorkerBlocks, encoded: bytes) -> None:
        """Queues a batch; a queue that grows too long becomes a snapshot to write."""
        worker_id = worker.worker_id
        if worker_id in self._to_write or not self._speakers.is_own(worker_id):
            return
        size = self._backlog_bytes.get(worker_id, 0) + len(encoded)
        if size > self._max_backlog_bytes:
            self._write_anew(worker_id)
            return
        self._batches.setdefault(worker_id, []).append(encoded)
        self._backlog_bytes[worker_id] = size
        self._wake.set()

    def on_replaced(self, worker: WorkerBlocks) -> None:
        """Queues the worker's snapshot; it is taken when it is written."""
        if self._is_ours(worker.worker_id):
            self._write_anew(worker.worker_id)

    def on_rebased(self, worker: WorkerBlocks) -> None:
        """Queues the shorter form."""
        self.on_replaced(worker)

    def on_heard(self, worker: WorkerBlocks) -> None:
        """Makes sure that what the store has is ours to add to."""
        worker_id = worker.worker_id
        if self._is_ours(worker_id) and worker_id not in self._to_write:
            self._batches.setdefault(worker_id, [])
            self._wake.set()

    def on_forgotten(self, worker_id: str, epoch: int) -> None:
        """Queues the end of the worker."""
        self._drop_queued(worker_id)
        speaker = self._speakers.get(worker_id)
        if speaker is None or speaker.is_own:
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
        try:
            async with asyncio.timeout(seconds):
                while not self.is_settled:
                    await self._exchange()
                    self._succeeded()
        except (StoreError, TimeoutError) as error:
            _log.warning("store %s lacks the last changes: %s", self._store.name, error)

    async def _exchange(self) -> None:
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
        lost = [worker_id for worker_id in await self._store.check() if self._speakers.is_own(worker_id)]
        self._check_due = now + _CHECK_SECONDS
        if lost:
            _log.warning("store %s has not what was written of %d workers; written anew", self._store.name, len(lost))
        for worker_id in lost:
            self._write_anew(worker_id)

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
        """Puts what was kept of one worker into the index, silent. False: it contradicts itself."""
        try:
            worker = restore(stored.snapshot, stored.batches)
        except (InvalidRequest, DecodeError) as error:
            worker_id = stored.snapshot[0].worker_id
            _log.warning("store %s: worker %s is not loaded: %s", self._store.name, worker_id, error)
            return False
        worker.is_silent = True
        self._index.restore(worker)
        return True

    async def _append(self) -> None:
        batches, self._batches = self._batches, {}
        self._backlog_bytes.clear()
        batches = {worker_id: encoded for worker_id, encoded in batches.items() if self._speakers.is_own(worker_id)}
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
        if worker is None or not self._speakers.is_own(worker_id):
            return
        barrier = worker.base.barrier
        try:
            await self._store.write(worker_id, worker.epoch, worker.base.parts)
            self._queue_since(worker, barrier)
        except BaseException:
            self._write_anew(worker_id)
            raise
        self._metrics.store_rewrites.inc()

    def _queue_since(self, worker: WorkerBlocks, barrier: int) -> None:
        """Queues the batches after a snapshot that is written now, those that came meanwhile included."""
        worker_id = worker.worker_id
        if self._index.get(worker_id) is not worker or worker_id in self._to_write:
            return
        batches = worker.since(barrier)
        if batches is None:
            self._write_anew(worker_id)
            return
        self._batches[worker_id] = list(batches)
        self._backlog_bytes[worker_id] = 0  # the index keeps these anyway
        if batches:
            self._wake.set()

    def _is_ours(self, worker_id: str) -> bool:
        """Whether the worker publishes here; where it publishes elsewhere, that replica writes it."""
        speaker = self._speakers.get(worker_id)
        if speaker is not None and not speaker.is_own:
            self._drop_queued(worker_id)
            self._to_forget.discard(worker_id)
            self._store.disown(worker_id)
        return speaker is not None and speaker.is_own

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
