"""The metrics of files and batches, of one process. Not thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(slots=True)
class BatchCounters:
    """Totals since the process started."""

    completed_lines: int = 0
    failed_lines: int = 0  # run, and answered with an error
    refused_lines: int = 0  # attempts that found no room, and were repeated
    uploaded_bytes: int = 0
    result_bytes: int = 0
    unreadable_batches: int = 0  # failed because their records could not be decoded


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """What there is now."""

    open_batches: int = 0  # of all gateways
    running_batches: int = 0
    unrecorded_lines: int = 0  # of the batches that run here
    running_lines: int = 0
    most_lines: int = 0  # that may run now


class BatchCollector(Collector):
    """Exports counters, and what `load` returns."""

    def __init__(self, counters: BatchCounters, load: Callable[[], BatchLoad]) -> None:
        self._counters = counters
        self._load = load

    def collect(self) -> Iterable[Metric]:
        counters, load = self._counters, self._load()
        outcomes = {
            "completed": counters.completed_lines,
            "failed": counters.failed_lines,
            "refused": counters.refused_lines,
        }
        text = "Requests of batches: completed, failed, or refused for lack of room and repeated."
        yield _counted("baton_gateway_batch_lines", text, "outcome", outcomes)
        sources = {"upload": counters.uploaded_bytes, "results": counters.result_bytes}
        yield _counted("baton_gateway_file_bytes", "Bytes of stored files, by their source.", "source", sources)
        yield CounterMetricFamily(
            "baton_gateway_batches_unreadable",
            "Batches that failed because their stored records could not be read.",
            counters.unreadable_batches,
        )
        for name, help_text, value in (
            ("batches_open", "Batches of all gateways that have not ended.", load.open_batches),
            ("batches_running", "Batches that this gateway runs.", load.running_batches),
            ("batch_lines_unrecorded", "Requests of these batches without a result.", load.unrecorded_lines),
            ("batch_lines_running", "Requests of batches in flight.", load.running_lines),
            ("batch_lines_limit", "The most requests of batches that may be in flight now.", load.most_lines),
        ):
            yield GaugeMetricFamily(f"baton_gateway_{name}", help_text, value)


def _counted(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    metric = CounterMetricFamily(name, text, labels=(label,))
    for value, count in values.items():
        metric.add_metric((value,), count)
    return metric
