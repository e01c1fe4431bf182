"""Folds long logs into new snapshots, in a thread. An IndexListener."""

from __future__ import annotations

import asyncio
import logging

from baton.kvstore.index.index import Index, IndexListener
from baton.kvstore.index.worker_blocks import WorkerBlocks

_log = logging.getLogger(__name__)


class Compactor(IndexListener):
    """Runs at most one thread at a time. The index applies batches meanwhile."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._waiting: dict[str, WorkerBlocks] = {}
        self._task: asyncio.Task[None] | None = None
        index.listen(self)

    def on_batch(self, worker: WorkerBlocks, encoded: bytes) -> None:
        """Queues the worker if its log is long."""
        if worker.is_log_long:
            self._waiting[worker.worker_id] = worker
            if self._task is None:
                self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Waits for the thread and drops its result."""
        self._waiting.clear()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._waiting:
                worker_id, worker = next(iter(self._waiting.items()))
                base = await asyncio.to_thread(worker.compaction())
                self._index.rebase(worker, base)
                self._waiting.pop(worker_id, None)
        except Exception:
            _log.exception("cannot compact a log; it grows until the next attempt")
            self._waiting.clear()
        finally:
            self._task = None
