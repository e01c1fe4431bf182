"""Where the index survives a restart: the interface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.v1 import kv_pb2


class StoreError(Exception):
    """The store did not do what it was asked. `kind` is one of unreachable, slow, full, other."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class StoredWorker:
    """What a store has of one worker: a snapshot, and the batches after it."""

    snapshot: Sequence[kv_pb2.KvSnapshot]
    batches: Sequence[kv_pb2.KvEventBatch]


class Store(Protocol):
    """A snapshot and a log of batches for each worker. Every method raises StoreError, within a bounded time."""

    name: str

    async def check(self) -> bool:
        """Whether the store still has what was written. False: write every snapshot anew."""

    def load(self) -> AsyncIterator[StoredWorker]:
        """Everything that was kept, worker by worker."""

    async def write(self, worker_id: str, snapshot: Sequence[kv_pb2.KvSnapshot]) -> None:
        """Replaces all that is kept of a worker."""

    async def append(self, batches: Mapping[str, Sequence[bytes]]) -> Collection[str]:
        """Adds encoded batches to the logs of workers. Those it returns need `write`: log long, or not as left."""

    async def forget(self, worker_id: str) -> None:
        """Drops a worker."""

    async def close(self) -> None:
        """Gives connections back. Never raises."""
