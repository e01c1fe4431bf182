"""Exports client-side metrics of one model under the names that vLLM's dashboards use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.gateway.metrics.counters import GenerationCounters

_ENGINE = "0"
# vLLM's finish reasons. An output that ends with tool calls counts as "stop".
_REASONS = ("stop", "length", "abort", "error", "repetition")
_AS_STOP = "tool_calls"


class VllmAliases(Collector):
    """Exports histograms under vLLM's names, with the labels `model_name` and `engine`."""

    def __init__(self, model_name: str, histograms: Mapping[str, Collector]) -> None:
        self._labels = {"model_name": model_name, "engine": _ENGINE}
        self._histograms = histograms  # by vLLM's name

    def collect(self) -> Iterable[Metric]:
        for name, histogram in self._histograms.items():
            for source in histogram.collect():
                alias = Metric(name, f"As {source.name}.", source.type)
                for sample in source.samples:
                    if not sample.name.endswith("_created"):
                        suffix = sample.name.removeprefix(source.name)
                        alias.add_sample(name + suffix, {**self._labels, **sample.labels}, sample.value)
                yield alias


class VllmEndings(Collector):
    """Exports the finished choices as `vllm:request_success`, with every reason from the start."""

    def __init__(self, model_name: str, counters: GenerationCounters) -> None:
        self._labels = (model_name, _ENGINE)
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        labels = ("model_name", "engine", "finished_reason")
        family = CounterMetricFamily("vllm:request_success", "As baton_gateway_finished_choices.", labels=labels)
        finished = self._counters.finished_choices
        for reason in _REASONS:
            count = finished[reason] + (finished[_AS_STOP] if reason == "stop" else 0)
            family.add_metric((*self._labels, reason), count)
        yield family
