"""The router's Prometheus metrics. Knows names and help texts."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.router.fleet.fleet import Fleet
from baton.router.index.client import IndexClient
from baton.router.index.prefix_index import PrefixIndex
from baton.router.peers.peers import Peers
from baton.router.placement.placer import Outcome, Placer

_PLACE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25)


class RouterMetrics:
    """Counts placements and their outcomes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"baton_router_{name}", text, labels, registry=registry)

        self.refusals = counter("refusals", "Requests not placed, by gRPC code.", ("code",))
        self._counts = _Counts()
        registry.register(self._counts)

    def placed(self, remote: bool, seconds: float) -> None:
        self._counts.placed(remote, seconds)

    def reported(self, outcome: Outcome) -> None:
        """Counts the outcome of a placement."""
        self._counts.reported(outcome)


class _Counts(Collector):
    """Counters and a histogram in plain numbers: the client library's own cost as much as a tenth of a placement."""

    def __init__(self) -> None:
        self._local = self._remote = 0
        self._seconds = 0.0
        self._buckets = [0] * (len(_PLACE_BUCKETS) + 1)
        self._predicted = self._actual = self._missed = self._failed = 0

    def placed(self, remote: bool, seconds: float) -> None:
        if remote:
            self._remote += 1
        else:
            self._local += 1
        self._seconds += seconds
        self._buckets[bisect_left(_PLACE_BUCKETS, seconds)] += 1

    def reported(self, outcome: Outcome) -> None:
        """Observes the outcome of a placement."""
        if outcome.worker_failed:
            self._failed += 1
            return
        self._predicted += outcome.predicted_tokens
        self._actual += outcome.actual_tokens
        self._missed += max(0, outcome.predicted_tokens - outcome.actual_tokens)

    def collect(self) -> Iterable[Metric]:
        placements = CounterMetricFamily(
            "baton_router_placements", "Requests placed, by the worker that prefills.", labels=["prefill"]
        )
        placements.add_metric(["local"], self._local)
        placements.add_metric(["remote"], self._remote)
        yield placements
        bounds = [str(bound) for bound in _PLACE_BUCKETS] + ["+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._buckets), strict=True))
        times = HistogramMetricFamily("baton_router_place_seconds", "Time of a decision.")
        times.add_metric([], buckets, self._seconds)
        yield times
        for name, text, value in (
            ("predicted_cached_tokens", "Prompt tokens expected in caches, of reported requests.", self._predicted),
            ("actual_cached_tokens", "Prompt tokens that workers found in their caches.", self._actual),
            ("phantom_cached_tokens", "Prompt tokens expected in a cache, and not found there.", self._missed),
            ("failed_placements", "Placements whose worker failed.", self._failed),
        ):
            yield CounterMetricFamily(f"baton_router_{name}", text, value)


class RouterCollector(Collector):
    """Gauges of the fleet, the index and the peers, read at scrape time."""

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        index: PrefixIndex,
        client: IndexClient | None,
        peers: Peers | None = None,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._index = index
        self._client = client
        self._peers = peers

    def collect(self) -> Iterable[Metric]:
        """Yields the sizes of the fleet and the index. Runs in the exporter's thread, so it copies before it counts."""
        workers = list(self._fleet)
        yield GaugeMetricFamily("baton_router_workers", "Workers known.", len(workers))
        yield GaugeMetricFamily("baton_router_workers_alive", "Workers alive.", sum(one.alive for one in workers))
        yield GaugeMetricFamily(
            "baton_router_in_flight", "Placements not reported on yet.", len(self._placer.in_flight)
        )
        if self._peers is not None:
            yield GaugeMetricFamily("baton_router_peers", "Other routers with an open stream.", len(self._peers))
        entries = sum(map(self._index.num_blocks, self._index.worker_ids))
        yield GaugeMetricFamily("baton_router_index_blocks", "Blocks in the index, by worker.", entries)
        yield GaugeMetricFamily("baton_router_index_distinct_blocks", "Distinct blocks in the index.", len(self._index))
        if self._client is not None:
            connected = float(self._client.connected)
            yield GaugeMetricFamily("baton_router_index_connected", "1 if the kvstore's stream is open.", connected)
            yield CounterMetricFamily(
                "baton_router_index_stale_blocks",
                "Entries dropped as not true any more.",
                self._client.num_stale_blocks,
            )
            yield CounterMetricFamily(
                "baton_router_index_resyncs", "Streams given up for a gap.", self._client.num_resyncs
            )
