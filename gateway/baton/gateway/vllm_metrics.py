"""A gateway's histograms under the names that dashboards made for vLLM ask for: what clients see of one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_ENGINE = "0"


class VllmAliases(Collector):
    """Offers histograms again, each under its name in vLLM, with the labels `model_name` and `engine`."""

    def __init__(self, model_name: str, histograms: Mapping[str, Collector]) -> None:
        self._labels = {"model_name": model_name, "engine": _ENGINE}
        self._histograms = histograms  # by the name in vLLM

    def collect(self) -> Iterable[Metric]:
        for name, histogram in self._histograms.items():
            for source in histogram.collect():
                alias = Metric(name, f"As {source.name}.", source.type)
                for sample in source.samples:
                    if not sample.name.endswith("_created"):
                        suffix = sample.name.removeprefix(source.name)
                        alias.add_sample(name + suffix, {**self._labels, **sample.labels}, sample.value)
                yield alias
