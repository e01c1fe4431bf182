"""HTTP requests under the names of prometheus-fastapi-instrumentator, which dashboards for vLLM read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.gateway.metrics.histogram import BucketCounts

_ROUTE_SECONDS = (0.1, 0.5, 1.0)
_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
# Paths that vLLM does not count.
_UNCOUNTED = frozenset(("/metrics", "/health", "/load", "/ping", "/version", "/server_info"))


class HttpRequests(Collector):
    """Requests by route, method and class of status. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._by_route: dict[tuple[str, str], BucketCounts] = {}
        self._all = BucketCounts("http_request_duration_highr_seconds", "Request to the end of its response.", _SECONDS)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a response. `route` has a fixed set of values and is never a client's text."""
        if route in _UNCOUNTED:
            return
        method = method if method in _METHODS else "other"  # a client's text
        self._counts[route, method, f"{status // 100}xx"] += 1
        self._all.observe(seconds)
        of_route = self._by_route.get((route, method))
        if of_route is None:
            of_route = self._by_route[route, method] = BucketCounts("", "", _ROUTE_SECONDS)
        of_route.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        counts = CounterMetricFamily("http_requests", "HTTP requests answered.", labels=("handler", "method", "status"))
        for labels, count in self._counts.items():
            counts.add_metric(labels, count)
        yield counts
        yield from self._all.collect()
        text = "Request to the end of its response, by route."
        seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=("handler", "method"))
        for route, of_route in self._by_route.items():
            seconds.add_metric(route, of_route.cumulative(), of_route.sum)
        yield seconds
