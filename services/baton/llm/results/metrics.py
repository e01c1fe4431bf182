"""vLLM's snapshots of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric as Family


@dataclass(slots=True)
class Metric:
    """The present value of one time series."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """A total since the start."""

    value: float


@dataclass(slots=True)
class Gauge(Metric):
    """A value that goes up and down."""

    value: float


@dataclass(slots=True)
class Histogram(Metric):
    """A Prometheus histogram: how many observations are at most as large as each bound."""

    count: int
    sum: float
    buckets: dict[str, int]  # by upper bound: the observations up to it


def snapshots(families: Iterable[Family]) -> Iterator[Metric]:
    """Yields the time series of Prometheus' counters, gauges and histograms."""
    for family in families:
        if family.type == "histogram":
            yield from _histograms(family)
            continue
        kind = Counter if family.type == "counter" else Gauge
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield kind(family.name, dict(sample.labels), sample.value)


def _histograms(family: Family) -> Iterator[Histogram]:
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        one = found.setdefault(key, Histogram(family.name, labels, 0, math.nan, {}))
        if sample.name.endswith("_bucket"):
            one.buckets[sample.labels["le"]] = int(sample.value)
            one.count = max(one.count, int(sample.value))
        elif sample.name.endswith("_sum"):
            one.sum = sample.value
    yield from found.values()
