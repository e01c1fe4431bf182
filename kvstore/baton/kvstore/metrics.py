"""The kvstore's Prometheus metrics. Knows names and help texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.kvstore.index.index import Index
from baton.kvstore.index.watch import WatchHub


class StoreWriter(Protocol):
    """What is measured of the writes to the store."""

    @property
    def is_up(self) -> bool:
        """Whether the last exchange with the store went well."""

    @property
    def backlog_bytes(self) -> int:
        """Encoded changes that wait for the store."""


class ConnectedPeers(Protocol):
    """What is measured of the other replicas."""

    @property
    def num_connected(self) -> int:
        """Replicas whose streams are open."""


class KvstoreMetrics:
    """What is counted as it happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"baton_kvstore_{name}", text, labels, registry=registry)

        self.expired_leases = counter("expired_leases", "Workers silent because they were unheard of.")
        self.wanted_snapshots = counter("wanted_snapshots", "Snapshots asked of workers: unknown epochs and gaps.")
        self.cut_watchers = counter("cut_watchers", "Router streams ended because the router was too slow.")
        self.store_errors = counter("store_errors", "Failed exchanges with the store.", ("kind",))
        self.store_rewrites = counter("store_rewrites", "Snapshots written to the store.")


class IndexCollector(Collector):
    """What is read at scrape time."""

    def __init__(self, index: Index, hub: WatchHub) -> None:
        self._index = index
        self._hub = hub

    def collect(self) -> Iterable[Metric]:
        """The index's sizes as of now."""
        yield GaugeMetricFamily("baton_kvstore_workers", "Workers in the index.", len(self._index))
        silent = sum(worker.is_silent for worker in list(self._index))
        yield GaugeMetricFamily("baton_kvstore_silent_workers", "Workers whose entries do not count.", silent)
        yield GaugeMetricFamily("baton_kvstore_blocks", "Blocks in the index, by worker.", self._index.num_blocks)
        yield GaugeMetricFamily("baton_kvstore_watchers", "Routers and replicas that watch.", len(self._hub))
        yield CounterMetricFamily("baton_kvstore_block_events", "Block events applied.", self._index.num_events)


class StoreCollector(Collector):
    """The way to the store, at scrape time."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer

    def collect(self) -> Iterable[Metric]:
        """Whether the store is up, and what waits for it."""
        yield GaugeMetricFamily(
            "baton_kvstore_store_up", "The last exchange with the store went well.", self._writer.is_up
        )
        yield GaugeMetricFamily(
            "baton_kvstore_store_backlog_bytes", "Changes that wait for the store.", self._writer.backlog_bytes
        )


class PeersCollector(Collector):
    """The other replicas, at scrape time."""

    def __init__(self, peers: ConnectedPeers) -> None:
        self._peers = peers

    def collect(self) -> Iterable[Metric]:
        """How many are heard."""
        yield GaugeMetricFamily("baton_kvstore_replicas", "Other replicas that are heard.", self._peers.num_connected)
