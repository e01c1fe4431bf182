"""A worker's metrics of LoRA adapters. Knows names, counts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from baton.v1 import control_pb2
from baton.worker.front.metrics.transfers import histogram_metric

_LABELS = ("model_name",)
# AdapterCounters field, metric, help
_COUNTERS = (
    ("num_loads", "baton_worker_adapter_loads", "Adapters read from files to host memory."),
    ("num_failed_loads", "baton_worker_adapter_failed_loads", "Reads of adapters that failed."),
    ("num_device_loads", "baton_worker_adapter_device_loads", "Adapters copied to the device."),
    ("num_device_evictions", "baton_worker_adapter_device_evictions", "Adapters that made room on the device."),
    ("num_host_evictions", "baton_worker_adapter_host_evictions", "Adapters dropped from host memory."),
)
_GAUGES = (
    ("num_on_device", "baton_worker_adapters_on_device", "Adapters on the device."),
    ("max_on_device", "baton_worker_adapter_slots", "Adapters that the device has room for; 0 without --enable-lora."),
    ("num_pinned", "baton_worker_adapters_pinned", "Adapters that are kept on the device."),
    ("num_in_host_memory", "baton_worker_adapters_in_host_memory", "Adapters in host memory."),
    ("num_served", "baton_worker_adapters_served", "Adapters that requests may name."),
)
_HISTOGRAMS = (
    ("wait_seconds", "baton_worker_adapter_wait_seconds", "Until a request's adapter was on the device."),
    ("load_seconds", "baton_worker_adapter_load_seconds", "A read of an adapter from files."),
)


def adapter_metrics(stats: control_pb2.GetStatsResponse, model_name: str) -> Iterator[Metric]:
    """Returns the metrics of some stats."""
    counters = stats.counters.adapters
    for field, name, text in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        counter.add_metric((model_name,), getattr(counters, field))
        yield counter
    for field, name, text in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric((model_name,), getattr(counters, field))
        yield gauge
    for field, name, text in _HISTOGRAMS:
        yield histogram_metric(name, text, getattr(counters, field), model_name)


def lora_requests_info(counters: control_pb2.WorkerCounters, own: Sequence[str], now: float) -> Metric:
    """Returns vLLM's gauge: the time, with the adapters of running and of waiting requests as labels.

    `own`: the model's name and the engine. Without --enable-lora it has no samples.
    """
    labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters", "model_name", "engine")
    text = "When it was read, in seconds since 1970, with the adapters of requests as labels."
    family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=labels)
    if counters.HasField("adapters"):
        adapters = counters.adapters
        waiting, running = ",".join(adapters.waiting), ",".join(adapters.running)
        family.add_metric([str(adapters.max_on_device), waiting, running, *own], now)
    return family
