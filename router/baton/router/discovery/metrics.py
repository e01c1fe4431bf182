"""The age of discovery as a Prometheus metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.router.discovery.addresses import Discovery


class DiscoveryCollector(Collector):
    """Reads the ages at scrape time."""

    def __init__(self, discoveries: Mapping[str, Discovery]) -> None:
        self._discoveries = discoveries

    def collect(self) -> Iterable[Metric]:
        """Yields the age of each list of addresses."""
        family = GaugeMetricFamily(
            "baton_router_discovery_age_seconds",
            "Seconds since the list of addresses was last known to be current; up to 62 between two bookmarks.",
            labels=["list"],
        )
        for name, discovery in self._discoveries.items():
            family.add_metric([name], discovery.age_seconds)
        yield family
