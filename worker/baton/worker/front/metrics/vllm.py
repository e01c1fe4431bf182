"""A worker's metrics under vLLM's names, for dashboards that were made for it. Knows names, counts nothing.

`engine` is always 0: one worker is one target. The gateway has the vLLM names of what a client sees (TTFT, ITL,
latency, lengths, finish reasons).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from baton.v1 import control_pb2, worker_pb2
from baton.worker.front.metrics.transfers import cumulative_buckets

_LABELS = ("model_name", "engine")
_ENGINE = "0"


def vllm_metrics(stats: control_pb2.GetStatsResponse, model_name: str) -> Iterator[Metric]:
    """Returns the metrics of some stats."""
    own = [model_name, _ENGINE]
    for name, text, value in _gauges(stats):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        gauge.add_metric(own, value)
        yield gauge
    for name, text, value in _counters(stats.counters):
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        counter.add_metric(own, value)
        yield counter
    yield _cache_config(stats.state, own)
    yield from _histograms(stats.counters, own)


def _gauges(stats: control_pb2.GetStatsResponse) -> Iterator[tuple[str, str, float]]:
    load = stats.state.load
    yield "num_requests_running", "As baton_worker_running_requests.", load.num_running
    yield "num_requests_waiting", "As baton_worker_queue_depth.", load.queue_depth
    used = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
    yield "kv_cache_usage_perc", "As baton_worker_kv_usage: 0 to 1.", used


def _counters(counters: control_pb2.WorkerCounters) -> Iterator[tuple[str, str, float]]:
    host, transfers = counters.host_cache, counters.transfers
    prompt, cached = counters.num_prompt_tokens, counters.num_cached_tokens
    on_device = cached - host.num_hit_tokens
    yield "prompt_tokens", "As baton_worker_prompt_tokens.", prompt
    yield "prompt_tokens_cached", "As baton_worker_cached_tokens.", cached
    yield "generation_tokens", "As baton_worker_output_tokens.", counters.num_output_tokens
    yield "num_preemptions", "As baton_worker_preemptions.", counters.num_preemptions
    yield "prefix_cache_queries", "Prompt tokens looked up on the device.", prompt
    yield "prefix_cache_hits", "Prompt tokens found on the device.", on_device
    yield "external_prefix_cache_queries", "Prompt tokens looked up in host memory.", prompt - on_device
    yield "external_prefix_cache_hits", "Prompt tokens found in host memory.", host.num_hit_tokens
    yield "kv_offload_store_bytes", "As baton_worker_host_cache_offloaded_bytes.", host.num_offloaded_bytes
    yield "kv_offload_store_time", "As baton_worker_host_cache_offload_seconds.", host.offload_seconds
    yield "kv_offload_load_bytes", "As baton_worker_host_cache_restored_bytes.", host.num_restored_bytes
    yield "kv_offload_load_time", "As baton_worker_host_cache_restore_seconds.", host.restore_seconds
    yield "nixl_num_failed_transfers", "As baton_kv_transfer_failed, received.", transfers.num_failed_transfers
    yield "nixl_num_failed_notifications", "As baton_kv_transfer_failed, sent.", transfers.num_failed_pushes
    yield "nixl_num_kv_expired_reqs", "As baton_kv_transfer_expired_leases.", transfers.num_expired_leases


def _cache_config(state: worker_pb2.WorkerState, own: Sequence[str]) -> Metric:
    labels = (*_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching")
    family = GaugeMetricFamily("vllm:cache_config_info", "1, and the pool's size as labels.", labels=labels)
    family.add_metric(
        [*own, str(state.layout.block_size), str(state.load.num_blocks), str(not state.without_prefix_cache)], 1
    )
    return family


def _histograms(counters: control_pb2.WorkerCounters, own: Sequence[str]) -> Iterator[Metric]:
    transfers = counters.transfers
    for name, text, histogram in (
        ("nixl_xfer_time_seconds", "As baton_kv_transfer_seconds.", transfers.transfer_seconds),
        ("nixl_bytes_transferred", "As baton_kv_transfer_size_bytes.", transfers.transfer_bytes),
        ("iteration_tokens_total", "As baton_worker_step_tokens.", counters.step_tokens),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(own, cumulative_buckets(histogram), histogram.sum)
        yield family
