"""The index: which worker holds which block, by epoch and sequence. Pure: knows no stream and no store."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from baton.kvstore.index.worker_blocks import Base, WorkerBlocks
from baton.v1 import kv_pb2


class Applied(enum.Enum):
    """The result of applying a message."""

    YES = "yes"
    PARTLY = "partly"  # part of a snapshot that is not complete yet
    OUT_OF_STEP = "out of step"  # gap, reorder or unknown epoch: the worker's entries are dropped


class IndexListener:
    """Receives every change of the index, in order. Each method does nothing by default."""

    def on_batch(self, worker: WorkerBlocks, encoded: bytes) -> None:
        """Called after a worker's next batch was applied."""

    def on_replaced(self, worker: WorkerBlocks) -> None:
        """Called after a worker's blocks were replaced or added."""

    def on_rebased(self, worker: WorkerBlocks) -> None:
        """Called after a worker's log was folded into a new base. Its blocks are the same."""

    def on_silent(self, worker: WorkerBlocks) -> None:
        """Called after a worker became silent: its entries are ignored."""

    def on_heard(self, worker: WorkerBlocks) -> None:
        """Called when a worker's entries count (again). Its publisher may have changed."""

    def on_forgotten(self, worker_id: str, epoch: int) -> None:
        """Called after a worker's entries were dropped."""


class Index:
    """All workers' blocks. Holds all blocks of a worker or none."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerBlocks] = {}
        self._arriving: dict[str, list[kv_pb2.KvSnapshot]] = {}  # incomplete snapshots
        self._listeners: list[IndexListener] = []
        self.num_events = 0  # block events applied

    def __iter__(self) -> Iterator[WorkerBlocks]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def num_blocks(self) -> int:
        """Number of entries over all workers and tiers. Thread-safe."""
        return sum(map(len, list(self._workers.values())))

    def get(self, worker_id: str) -> WorkerBlocks | None:
        """Returns a worker's blocks, or None if the worker is unknown."""
        return self._workers.get(worker_id)

    def listen(self, listener: IndexListener) -> None:
        """Adds a listener."""
        self._listeners.append(listener)

    def ignore(self, listener: IndexListener) -> None:
        """Removes a listener."""
        self._listeners.remove(listener)

    def confirm(self, worker_id: str, epoch: int, sequence: int, first_kept: int = 0) -> Applied:
        """Compares the index with a worker's position and the first batch that the worker can still send.

        If the worker cannot continue from what the index has, its entries are dropped and the result is OUT_OF_STEP.
        """
        self._arriving.pop(worker_id, None)
        known = self._workers.get(worker_id)
        if known is not None and known.epoch == epoch:
            can_follow = 0 < first_kept <= known.sequence + 1 <= sequence
            if known.sequence == sequence or can_follow:
                return Applied.YES
        return self._out_of_step(worker_id)

    def apply(self, batch: kv_pb2.KvEventBatch, encoded: bytes | None = None) -> Applied:
        """Applies a worker's batch; `encoded` is its encoded form, if at hand. Returns YES if it was applied before."""
        known = self._workers.get(batch.worker_id)
        if known is None or batch.worker_id in self._arriving:
            self._arriving.pop(batch.worker_id, None)
            return self._out_of_step(batch.worker_id)
        if known.has(batch):
            return Applied.YES
        if not known.follows(batch):
            return self._out_of_step(batch.worker_id)
        if encoded is None:
            encoded = batch.SerializeToString()
        self.num_events += known.apply(batch, encoded)
        for listener in self._listeners:
            listener.on_batch(known, encoded)
        return Applied.YES

    def receive(self, part: kv_pb2.KvSnapshot) -> Applied:
        """Takes one part of a worker's snapshot. The last part replaces the worker's blocks."""
        if part.first:
            self._arriving[part.worker_id] = []
            known = self._workers.get(part.worker_id)
            if known is not None and known.epoch != part.epoch:
                self.forget(part.worker_id, keep_arriving=True)
        arriving = self._arriving.get(part.worker_id)
        if arriving is None or (arriving and _identity(arriving[0]) != _identity(part)):
            self._arriving.pop(part.worker_id, None)
            return self._out_of_step(part.worker_id)
        arriving.append(part)
        if not part.last:
            return Applied.PARTLY
        self.restore(WorkerBlocks.from_parts(self._arriving.pop(part.worker_id)))
        return Applied.YES

    def restore(self, worker: WorkerBlocks) -> None:
        """Replaces all of a worker's blocks."""
        self._workers[worker.worker_id] = worker
        for listener in self._listeners:
            listener.on_replaced(worker)

    def rebase(self, worker: WorkerBlocks, base: Base) -> bool:
        """Gives a worker a base that `WorkerBlocks.compaction` made. Returns False if it was replaced meanwhile."""
        if self._workers.get(worker.worker_id) is not worker:
            return False
        worker.rebase(base)
        for listener in self._listeners:
            listener.on_rebased(worker)
        return True

    def mark_silent(self, worker_id: str) -> bool:
        """Makes readers ignore a worker's entries. Returns False if the worker is unknown or already silent."""
        known = self._workers.get(worker_id)
        if known is None or known.is_silent:
            return False
        known.is_silent = True
        for listener in self._listeners:
            listener.on_silent(known)
        return True

    def mark_heard(self, worker_id: str) -> None:
        """Makes a worker's entries count, and calls the listeners even if they did already."""
        known = self._workers.get(worker_id)
        if known is not None:
            known.is_silent = False
            for listener in self._listeners:
                listener.on_heard(known)

    def forget(self, worker_id: str, keep_arriving: bool = False) -> bool:
        """Drops a worker. Returns False if the worker is unknown."""
        if not keep_arriving:
            self._arriving.pop(worker_id, None)
        known = self._workers.pop(worker_id, None)
        if known is None:
            return False
        for listener in self._listeners:
            listener.on_forgotten(worker_id, known.epoch)
        return True

    def _out_of_step(self, worker_id: str) -> Applied:
        self.forget(worker_id, keep_arriving=True)
        return Applied.OUT_OF_STEP


def _identity(part: kv_pb2.KvSnapshot) -> tuple[int, int]:
    return part.epoch, part.barrier
