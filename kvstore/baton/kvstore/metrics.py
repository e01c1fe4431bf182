"""The kvstore's metrics that are read at scrape time: its index, its connection to the store, its replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.kvstore.index.index import Index
from baton.kvstore.index.watch import WatchHub


class StoreWriter(Protocol):
    """The writer to the store, as the metrics see it."""

    @property
    def is_up(self) -> bool:
        """Whether the last call to the store succeeded."""

    @property
    def backlog_bytes(self) -> int:
        """Size of the encoded changes that are not yet written."""


class ConnectedPeers(Protocol):
    """The other replicas, as the metrics see them."""

    @property
    def num_connected(self) -> int:
        """Number of replicas with an open stream."""


class IndexCollector(Collector):
    """The index's sizes and its watchers."""

    def __init__(self, index: Index, hub: WatchHub) -> None:
        self._index = index
        self._hub = hub

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("baton_kvstore_workers", "Workers in the index.", len(self._index))
        silent = sum(worker.is_silent for worker in list(self._index))
        yield GaugeMetricFamily("baton_kvstore_silent_workers", "Workers whose entries are ignored.", silent)
        yield GaugeMetricFamily("baton_kvstore_blocks", "Blocks in the index, by worker.", self._index.num_blocks)
        yield GaugeMetricFamily("baton_kvstore_watchers", "Routers and replicas that watch the index.", len(self._hub))
        yield CounterMetricFamily("baton_kvstore_block_events", "Block events applied.", self._index.num_events)


class StoreCollector(Collector):
    """The connection to the store."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "baton_kvstore_store_up", "1 if the last call to the store succeeded.", self._writer.is_up
        )
        yield GaugeMetricFamily(
            "baton_kvstore_store_backlog_bytes",
            "Bytes of changes not yet written.",
            self._writer.backlog_bytes,
        )


class PeersCollector(Collector):
    """The connections to the other replicas."""

    def __init__(self, peers: ConnectedPeers) -> None:
        self._peers = peers

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("baton_kvstore_replicas", "Replicas with an open stream.", self._peers.num_connected)
