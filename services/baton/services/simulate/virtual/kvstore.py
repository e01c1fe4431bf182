"""A kvstore without sockets: its index, leases, streams and write-behind, over a store in memory that can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

import prometheus_client

from baton.kvstore.counters import KvstoreCounters
from baton.kvstore.index.index import Index
from baton.kvstore.index.membership import Membership
from baton.kvstore.index.publishers import Publishers
from baton.kvstore.index.servicer import IndexServicer
from baton.kvstore.index.watch import WatchHub
from baton.kvstore.store.store import StoredWorker, StoreError
from baton.kvstore.store.write_behind import WriteBehind
from baton.services.simulate.virtual.rpc import Link
from baton.v1 import kv_pb2

_LEASE_SECONDS = 0.8
_RETENTION_SECONDS = 60.0
_BACKLOG_BYTES = 64 << 20
_STORE_SECONDS = 0.001


class VirtualStore:
    """Stands in for Redis: what was written stays over a kvstore's restart. `fault` is '', or a StoreError's kind."""

    name = "simulated"

    def __init__(self) -> None:
        self.fault = ""
        self.seconds = _STORE_SECONDS
        self._snapshots: dict[str, tuple[bytes, ...]] = {}
        self._logs: dict[str, list[bytes]] = {}
        self._lost: set[str] = set()

    def wipe(self) -> None:
        self._lost |= self._snapshots.keys()
        self._snapshots.clear()
        self._logs.clear()

    async def check(self) -> Collection[str]:
        """Returns the workers lost since the last call."""
        await self._exchange()
        lost, self._lost = self._lost, set()
        return lost

    async def load(self) -> AsyncIterator[StoredWorker]:
        await self._exchange()
        for worker_id, parts in list(self._snapshots.items()):
            snapshot = [kv_pb2.KvSnapshot.FromString(part) for part in parts]
            yield StoredWorker(snapshot, list(self._logs.get(worker_id, ())))

    async def write(self, worker_id: str, epoch: int, parts: Sequence[bytes]) -> None:
        """Replaces what is kept of a worker."""
        await self._exchange()
        self._snapshots[worker_id], self._logs[worker_id] = tuple(parts), []

    async def append(self, batches: Mapping[str, Sequence[bytes]]) -> Collection[str]:
        """Adds to logs; names those of workers without a snapshot."""
        await self._exchange()
        for worker_id, encoded in batches.items():
            if worker_id in self._snapshots:
                self._logs[worker_id] += encoded
        return [worker_id for worker_id in batches if worker_id not in self._snapshots]

    async def forget(self, worker_id: str) -> None:
        await self._exchange()
        self._snapshots.pop(worker_id, None)
        self._logs.pop(worker_id, None)

    def disown(self, worker_id: str) -> None:
        """Does nothing: there is one kvstore."""

    async def close(self) -> None:
        """Does nothing: there are no connections."""

    async def _exchange(self) -> None:
        await asyncio.sleep(self.seconds)
        if self.fault:
            raise StoreError(self.fault, f"the store is {self.fault}, by order")


class VirtualKvstore:
    """Started and killed by the chaos; the store and the links outlive it."""

    def __init__(self, store: VirtualStore, links: Sequence[Link]) -> None:
        self.servicer: IndexServicer | None = None  # None: it is down
        self.index = Index()
        self._store = store
        self._links = links
        self._tasks: list[asyncio.Task[None]] = []
        self._membership: Membership | None = None

    def start(self) -> None:
        """Starts a new process, which loads the store."""
        counters = KvstoreCounters(prometheus_client.CollectorRegistry())
        self.index, publishers = Index(), Publishers()
        membership = Membership(self.index, publishers, _LEASE_SECONDS, _RETENTION_SECONDS, counters)
        hub = WatchHub(self.index, publishers, _BACKLOG_BYTES)
        self.servicer = IndexServicer(self.index, hub, membership, counters)
        writer = WriteBehind(self.index, publishers, self._store, _BACKLOG_BYTES, counters, membership.watch_restored)
        self._membership = membership
        self._tasks = [asyncio.get_running_loop().create_task(writer.run())]

    def kill(self) -> None:
        """Kills the process without a shutdown."""
        self.servicer = None
        for link in self._links:
            link.cut()
        for task in self._tasks:
            task.cancel()
        if self._membership is not None:
            self._membership.close()
