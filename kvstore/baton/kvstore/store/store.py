"""Where the index survives a restart: the interface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.v1 import kv_pb2


class StoreError(Exception):
    """The store did not do what it was asked. `kind` is one of unreachable, slow, full, read-only, other."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class StoredWorker:
    """What a store has of one worker: a snapshot, and the encoded batches after it."""

    snapshot: Sequence[kv_pb2.KvSnapshot]
    batches: Sequence[bytes]


class Store(Protocol):
    """A snapshot and a log of batches for each worker. Every method raises StoreError, within a bounded time.

    Replicas may share a store; each writes the workers that publish to it.
    """

    @property
    def name(self) -> str:
        """What errors and logs call it."""

    async def check(self) -> Collection[str]:
        """Workers of which the store has not what was written: lost, or replaced by another replica."""

    def load(self) -> AsyncIterator[StoredWorker]:
        """Everything that was kept, worker by worker."""

    async def write(self, worker_id: str, epoch: int, parts: Sequence[bytes]) -> None:
        """Replaces all that is kept of a worker by a snapshot, encoded part by part."""

    async def append(self, batches: Mapping[str, Sequence[bytes]]) -> Collection[str]:
        """Adds encoded batches to the logs of workers. Those it returns need `write`: what is kept is not as left."""

    async def forget(self, worker_id: str) -> None:
        """Drops a worker, unless another replica wrote it since."""

    def disown(self, worker_id: str) -> None:
        """Another replica writes the worker from now on."""

    async def close(self) -> None:
        """Gives connections back. Never raises."""
