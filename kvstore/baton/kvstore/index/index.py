"""Which worker holds which block, by epoch and sequence. Pure: tells its listeners, knows no stream and no store."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from baton.kvstore.index.worker_blocks import Base, WorkerBlocks
from baton.v1 import kv_pb2


class Applied(enum.Enum):
    """What became of a message."""

    YES = "yes"
    PARTLY = "partly"  # a snapshot whose end is still to come
    OUT_OF_STEP = "out of step"  # gap, reorder or unknown epoch: what was known is dropped


class IndexListener:
    """Hears every change, in order; what it does not define it does not care for."""

    def on_batch(self, worker: WorkerBlocks, encoded: bytes) -> None:
        """The next batch of a known worker was applied."""

    def on_replaced(self, worker: WorkerBlocks) -> None:
        """Everything known of the worker is new."""

    def on_rebased(self, worker: WorkerBlocks) -> None:
        """The same blocks have a new base."""

    def on_silent(self, worker: WorkerBlocks) -> None:
        """The worker's entries do not count for now."""

    def on_heard(self, worker: WorkerBlocks) -> None:
        """The worker's entries count; somebody else may speak for it than before."""

    def on_forgotten(self, worker_id: str, epoch: int) -> None:
        """The worker has no entries any more."""


class Index:
    """All workers' blocks. A worker is in it whole, or not at all."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerBlocks] = {}
        self._arriving: dict[str, list[kv_pb2.KvSnapshot]] = {}  # snapshots whose end is still to come
        self._listeners: list[IndexListener] = []
        self.num_events = 0  # block events applied

    def __iter__(self) -> Iterator[WorkerBlocks]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def num_blocks(self) -> int:
        """Entries, each worker and tier counted. May be read from another thread."""
        return sum(map(len, list(self._workers.values())))

    def get(self, worker_id: str) -> WorkerBlocks | None:
        """A worker's blocks, if they are known."""
        return self._workers.get(worker_id)

    def listen(self, listener: IndexListener) -> None:
        """Every change from now on goes to `listener` too."""
        self._listeners.append(listener)

    def ignore(self, listener: IndexListener) -> None:
        """Ends `listen`."""
        self._listeners.remove(listener)

    def confirm(self, worker_id: str, epoch: int, sequence: int, first_kept: int = 0) -> Applied:
        """A worker says where it is, and from which batch on it can send. Out of step: what was known is dropped."""
        self._arriving.pop(worker_id, None)
        known = self._workers.get(worker_id)
        if known is not None and known.epoch == epoch:
            can_follow = 0 < first_kept <= known.sequence + 1 <= sequence
            if known.sequence == sequence or can_follow:
                return Applied.YES
        return self._out_of_step(worker_id)

    def apply(self, batch: kv_pb2.KvEventBatch, encoded: bytes | None = None) -> Applied:
        """Takes a worker's batch, with its encoded form where that is at hand. One that was taken before is YES."""
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
        """Takes a part of a worker's snapshot; the last one makes it visible."""
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
        """Puts all of a worker's blocks in, instead of what was known."""
        self._workers[worker.worker_id] = worker
        for listener in self._listeners:
            listener.on_replaced(worker)

    def rebase(self, worker: WorkerBlocks, base: Base) -> bool:
        """Gives a worker a base that `WorkerBlocks.compaction` made. False: it was replaced meanwhile."""
        if self._workers.get(worker.worker_id) is not worker:
            return False
        worker.rebase(base)
        for listener in self._listeners:
            listener.on_rebased(worker)
        return True

    def silence(self, worker_id: str) -> bool:
        """Makes a worker's entries not count. False: it was not known, or silent already."""
        known = self._workers.get(worker_id)
        if known is None or known.is_silent:
            return False
        known.is_silent = True
        for listener in self._listeners:
            listener.on_silent(known)
        return True

    def hear(self, worker_id: str) -> None:
        """Makes a worker's entries count, and tells the listeners so in any case."""
        known = self._workers.get(worker_id)
        if known is not None:
            known.is_silent = False
            for listener in self._listeners:
                listener.on_heard(known)

    def forget(self, worker_id: str, keep_arriving: bool = False) -> bool:
        """Drops a worker. False: it was not known."""
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
