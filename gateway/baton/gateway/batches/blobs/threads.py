"""Runs a BlobStore's blocking calls on a few threads, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from baton.gateway.batches.blobs.store import BlobStore, ranges_of

T = TypeVar("T")

_THREADS = 4


class Blobs:
    """A BlobStore for the event loop."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(_THREADS, "batch storage")

    async def put(self, name: str, pieces: Iterable[bytes]) -> int:
        """Stores a blob; `pieces` are made on the thread. Returns its size."""
        return await self._run(partial(self._store.put, name, pieces))

    async def join(self, name: str, parts: Iterable[tuple[str, int]]) -> int:
        """Stores the concatenation of blobs, given as names and sizes. Returns its size. Raises BlobMissing."""
        store = self._store
        pieces = (piece for part, size in parts for piece in ranges_of(store, part, size))
        return await self._run(partial(store.put, name, pieces))

    async def read(self, name: str, offset: int, length: int) -> bytes:
        """Returns bytes of a blob; none at its end. Raises BlobMissing."""
        return await self._run(partial(self._store.read, name, offset, length))

    async def delete(self, name: str) -> None:
        """Deletes a blob. Idempotent."""
        await self._run(partial(self._store.delete, name))

    async def delete_below(self, prefix: str) -> None:
        """Deletes every blob below a folder."""
        for name in await self._run(partial(self._store.names, prefix)):
            await self.delete(name)

    def close(self) -> None:
        """Ends the threads without waiting, and drops the work that they have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
