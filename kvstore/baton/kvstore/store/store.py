"""The interface of a store that keeps the index over restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.v1 import kv_pb2


class StoreError(Exception):
    """A call to the store failed. `kind` is one of unreachable, slow, full, read-only, other."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class StoredWorker:
    """A stored worker: a snapshot, and the encoded batches after it."""

    snapshot: Sequence[kv_pb2.KvSnapshot]
    batches: Sequence[bytes]


class Store(Protocol):
    """A snapshot and a log of batches for each worker. Every method takes a bounded time and may raise StoreError.

    Replicas may share a store. Each writes the workers that publish to it.
    """

    @property
    def name(self) -> str:
        """Name for errors and logs."""

    async def check(self) -> Collection[str]:
        """Returns workers whose stored data was lost, or replaced by another replica."""

    def load(self) -> AsyncIterator[StoredWorker]:
        """Yields all stored workers."""

    async def write(self, worker_id: str, epoch: int, parts: Sequence[bytes]) -> None:
        """Replaces a worker's data by a snapshot in encoded parts."""

    async def append(self, batches: Mapping[str, Sequence[bytes]]) -> Collection[str]:
        """Adds encoded batches to workers' logs. Returns the workers that need `write`, because their log changed."""

    async def forget(self, worker_id: str) -> None:
        """Drops a worker, unless another replica has written it since."""

    def disown(self, worker_id: str) -> None:
        """Stops writing the worker: another replica writes it."""

    async def close(self) -> None:
        """Closes the connections. Never raises."""
