"""Which worker holds which block, by epoch and sequence. Pure: tells its listeners, knows no stream and no store."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Protocol

from baton.kvstore.worker_blocks import WorkerBlocks
from baton.v1 import kv_pb2


class Applied(enum.Enum):
    """What became of a message."""

    YES = "yes"
    PARTLY = "partly"  # a snapshot whose end is still to come
    OUT_OF_STEP = "out of step"  # gap, reorder or unknown epoch: what was known is dropped


class IndexListener(Protocol):
    """Hears every change, in order."""

    def on_batch(self, batch: kv_pb2.KvEventBatch) -> None:
        """The next batch of a known worker was applied."""

    def on_replaced(self, worker: WorkerBlocks) -> None:
        """Everything known of the worker is new."""

    def on_forgotten(self, worker_id: str, epoch: int) -> None:
        """The worker has no entries any more."""


class Index:
    """All workers' blocks. A worker is in it whole, or not at all."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerBlocks] = {}
        self._arriving: dict[str, WorkerBlocks] = {}  # snapshots whose end is still to come
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

    def confirm(self, worker_id: str, epoch: int, sequence: int) -> Applied:
        """A worker says where it is. Out of step: what was known of it is dropped."""
        self._arriving.pop(worker_id, None)
        known = self._workers.get(worker_id)
        if known is not None and (known.epoch, known.sequence) == (epoch, sequence):
            return Applied.YES
        return self._out_of_step(worker_id)

    def apply(self, batch: kv_pb2.KvEventBatch) -> Applied:
        """Takes a worker's batch."""
        known = self._workers.get(batch.worker_id)
        if known is None or not known.follows(batch) or batch.worker_id in self._arriving:
            self._arriving.pop(batch.worker_id, None)
            return self._out_of_step(batch.worker_id)
        self.num_events += known.apply(batch)
        for listener in self._listeners:
            listener.on_batch(batch)
        return Applied.YES

    def receive(self, part: kv_pb2.KvSnapshot) -> Applied:
        """Takes a part of a worker's snapshot; the last one makes it visible."""
        if part.first:
            self._arriving[part.worker_id] = WorkerBlocks(part.worker_id, part.epoch, part.barrier)
            known = self._workers.get(part.worker_id)
            if known is not None and known.epoch != part.epoch:
                self.forget(part.worker_id, keep_arriving=True)
        arriving = self._arriving.get(part.worker_id)
        if arriving is None or (arriving.epoch, arriving.sequence) != (part.epoch, part.barrier):
            self._arriving.pop(part.worker_id, None)
            return self._out_of_step(part.worker_id)
        arriving.add(part)
        if not part.last:
            return Applied.PARTLY
        self.restore(self._arriving.pop(part.worker_id))
        return Applied.YES

    def restore(self, worker: WorkerBlocks) -> None:
        """Puts all of a worker's blocks in, instead of what was known."""
        self._workers[worker.worker_id] = worker
        for listener in self._listeners:
            listener.on_replaced(worker)

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
