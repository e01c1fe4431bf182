"""`baton metrics`: every Prometheus metric of every service, read from the objects that export them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

_SUFFIXES = ("_bucket", "_sum", "_count")


class MetricRow(NamedTuple):
    """One metric of one service."""

    service: str
    name: str  # as Prometheus stores it: counters end in _total
    kind: str  # counter, gauge or histogram
    labels: tuple[str, ...]
    help: str

    @property
    def series(self) -> tuple[str, ...]:
        """Returns the names that a query can use."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(self.name + suffix for suffix in _SUFFIXES)


def all_metrics() -> list[MetricRow]:
    """Returns all metrics, service by service."""
    return [*_gateway(), *_router(), *_kvstore(), *_worker()]


def markdown(rows: Iterable[MetricRow]) -> str:
    """Returns a table for each service."""
    lines: list[str] = []
    service = ""
    for row in rows:
        if row.service != service:
            service = row.service
            lines += [f"\n## {service}", "", "| metric | type | labels | |", "| --- | --- | --- | --- |"]
        lines.append(f"| {row.name} | {row.kind} | {', '.join(row.labels)} | {row.help} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def main(argv: Sequence[str]) -> int:
    """Prints the metrics. Returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="baton metrics", description="Lists every Prometheus metric.")
    parser.add_argument("--markdown", action="store_true", help="A Markdown table for each service.")
    rows = all_metrics()
    if parser.parse_args(list(argv)).markdown:
        print(markdown(rows), end="")
        return 0
    for row in rows:
        labels = f"{{{','.join(row.labels)}}}" if row.labels else ""
        print(f"{row.service:<8} {row.kind:<9} {row.name}{labels}  {row.help}")
    return 0


def _gateway() -> Iterator[MetricRow]:
    from baton.gateway.access.counters import AccessCollector, AccessCounters
    from baton.gateway.ext_authz.service import ExtAuthzCollector
    from baton.gateway.metrics.batches import BatchCollector, BatchCounters, BatchLoad
    from baton.gateway.metrics.counters import GenerationCounters
    from baton.gateway.metrics.gateway import GatewayMetrics
    from baton.rpc.tls.metrics import TlsCollector
    from baton.rpc.tracing.tracer import TracingCollector

    metrics = GatewayMetrics(GenerationCounters(), lambda: 0, lambda: 0)
    metrics.offer_vllm_names("")
    no_answers = cast(Any, _WithoutAnswers())
    for collector in (
        AccessCollector(AccessCounters()),
        TlsCollector(),
        TracingCollector(),
        ExtAuthzCollector(no_answers),
        BatchCollector(BatchCounters(), BatchLoad),
    ):
        metrics.register(collector)
    return _rows("gateway", _collectors(metrics.registry))


def _router() -> Iterator[MetricRow]:
    from baton.router.discovery.addresses import StaticDiscovery
    from baton.router.discovery.metrics import DiscoveryCollector
    from baton.router.fleet.fleet import Fleet
    from baton.router.index.client import IndexClient
    from baton.router.index.prefix_index import PrefixIndex
    from baton.router.metrics import RouterCollector, RouterMetrics
    from baton.router.peers.peers import Peers
    from baton.router.placement.placer import Placer
    from baton.rpc.tls.metrics import TlsCollector
    from baton.rpc.tracing.tracer import TracingCollector

    registry = CollectorRegistry()
    RouterMetrics(registry)
    fleet, index = Fleet(), PrefixIndex()
    placer = Placer(fleet, index, max_queue_depth=1, explain_capacity=1)
    peers = Peers(1, placer.in_flight, fleet, StaticDiscovery([]))
    registry.register(RouterCollector(fleet, placer, index, IndexClient(index, "127.0.0.1:1"), peers))
    registry.register(DiscoveryCollector({"workers": StaticDiscovery([])}))
    registry.register(TlsCollector())
    registry.register(TracingCollector())
    return _rows("router", _collectors(registry))


def _kvstore() -> Iterator[MetricRow]:
    from baton.kvstore.counters import KvstoreCounters
    from baton.kvstore.index.index import Index
    from baton.kvstore.index.publishers import Publishers
    from baton.kvstore.index.watch import WatchHub
    from baton.kvstore.metrics import IndexCollector, PeersCollector, StoreCollector
    from baton.kvstore.peers.peers import Peers
    from baton.kvstore.store.write_behind import WriteBehind
    from baton.rpc.tls.metrics import TlsCollector

    registry = CollectorRegistry()
    counters = KvstoreCounters(registry)
    index, publishers, nothing = Index(), Publishers(), cast(Any, None)
    registry.register(IndexCollector(index, WatchHub(index, publishers, 1 << 16)))
    registry.register(StoreCollector(WriteBehind(index, publishers, nothing, 1 << 16, counters, nothing)))
    registry.register(PeersCollector(Peers(nothing, "", "", nothing)))
    registry.register(TlsCollector())
    return _rows("kvstore", _collectors(registry))


def _worker() -> Iterator[MetricRow]:
    from baton.rpc.tls.metrics import TlsCollector
    from baton.rpc.tracing.tracer import TracingCollector
    from baton.v1 import control_pb2
    from baton.worker.front.metrics.worker import WorkerCollector

    async def read() -> control_pb2.GetStatsResponse:
        stats = control_pb2.GetStatsResponse()
        transfers = stats.counters.transfers
        for histogram in (transfers.transfer_seconds, transfers.exposed_seconds, transfers.tail_seconds):
            histogram.counts.append(0)
        return stats

    async def collect() -> list[Metric]:
        collector = WorkerCollector(read, _IdleDevice(), asyncio.get_running_loop(), "")
        return await asyncio.to_thread(lambda: list(collector.collect()))

    return _rows("worker", [*asyncio.run(collect()), TlsCollector(), TracingCollector()])


class _IdleDevice:
    num_stalls = 0
    stalled = False


class _WithoutAnswers:
    answers: dict[str, int] = {}  # noqa: RUF012


def _collectors(registry: CollectorRegistry) -> list[Any]:
    return list(dict.fromkeys(registry._collector_to_names))


def _rows(service: str, sources: Iterable[Any]) -> Iterator[MetricRow]:
    """Returns the rows of metrics and collectors."""
    for source in sources:
        for metric in [source] if isinstance(source, Metric) else source.collect():
            name = metric.name + ("_total" if metric.type == "counter" else "")
            yield MetricRow(service, name, metric.type, _labels(source, metric), metric.documentation)


def _labels(source: Any, metric: Metric) -> tuple[str, ...]:
    for holder in (source, metric):
        names = getattr(holder, "_labelnames", ())
        if names:
            return tuple(names)
    samples = metric.samples[:1]
    return tuple(name for name in samples[0].labels if name != "le") if samples else ()
