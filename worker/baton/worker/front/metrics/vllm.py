"""A worker's metrics under vLLM's names, for dashboards that were made for it. Knows names, counts nothing.

`engine` is always 0: one worker is one target. The gateway has the vLLM names of what a client sees (TTFT, ITL,
latency, lengths, finish reasons).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from baton.v1 import control_pb2, worker_pb2
from baton.worker.front.metrics.adapters import lora_requests_info
from baton.worker.front.metrics.transfers import cumulative_buckets

_LABELS = ("model_name", "engine")
_ENGINE = "0"
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


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
    yield _waiting_by_reason(stats, own)
    yield _sleep_state(stats.sleep_level, own)
    yield _prompt_tokens_by_source(stats.counters, own)
    yield _accepted_by_place(stats.counters, own)
    yield _cache_config(stats.state, own)
    yield from _histograms(stats.counters, own)
    yield lora_requests_info(stats.counters, own, time.time())


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
    costs = counters.step_costs
    yield "estimated_flops_per_gpu", "As baton_worker_estimated_flops.", costs.flops
    yield "estimated_read_bytes_per_gpu", "As baton_worker_estimated_read_bytes.", costs.read_bytes
    yield "estimated_write_bytes_per_gpu", "As baton_worker_estimated_written_bytes.", costs.written_bytes
    speculation = counters.speculation
    yield "spec_decode_num_drafts", "As baton_worker_drafts.", speculation.num_drafts
    yield "spec_decode_num_draft_tokens", "As baton_worker_draft_tokens.", speculation.num_draft_tokens
    yield "spec_decode_num_accepted_tokens", "As baton_worker_accepted_tokens.", speculation.num_accepted_tokens
    yield "nixl_num_failed_transfers", "As baton_kv_transfer_failed, received.", transfers.num_failed_transfers
    yield "nixl_num_failed_notifications", "As baton_kv_transfer_failed, sent.", transfers.num_failed_pushes
    yield "nixl_num_kv_expired_reqs", "As baton_kv_transfer_expired_leases.", transfers.num_expired_leases


def _waiting_by_reason(stats: control_pb2.GetStatsResponse, own: Sequence[str]) -> Metric:
    text = "Of vllm:num_requests_waiting. deferred: they wait for KV, a prefix or a grammar."
    family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", text, labels=(*_LABELS, "reason"))
    family.add_metric([*own, "capacity"], max(0, stats.state.load.queue_depth - stats.num_deferred))
    family.add_metric([*own, "deferred"], stats.num_deferred)
    return family


def _sleep_state(level: int, own: Sequence[str]) -> Metric:
    text = "1 for the worker's state, by its level of sleep."
    family = GaugeMetricFamily("vllm:engine_sleep_state", text, labels=(*_LABELS, "sleep_state"))
    for number, state in enumerate(_SLEEP_STATES):
        family.add_metric([*own, state], float(level == number))
    return family


def _prompt_tokens_by_source(counters: control_pb2.WorkerCounters, own: Sequence[str]) -> Metric:
    restored = counters.host_cache.num_hit_tokens
    found, sent = counters.num_cached_tokens - restored, counters.num_transferred_tokens
    text = "Prompt tokens by the source of their KV."
    family = CounterMetricFamily("vllm:prompt_tokens_by_source", text, labels=(*_LABELS, "source"))
    family.add_metric([*own, "local_compute"], max(0, counters.num_prompt_tokens - counters.num_cached_tokens - sent))
    family.add_metric([*own, "local_cache_hit"], found)
    family.add_metric([*own, "external_kv_transfer"], restored + sent)
    return family


def _accepted_by_place(counters: control_pb2.WorkerCounters, own: Sequence[str]) -> Metric:
    text = "Guessed tokens that were right, by their place among a decode's, from 0 on."
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    family = CounterMetricFamily(name, text, labels=(*_LABELS, "position"))
    for place, count in enumerate(counters.speculation.accepted_by_place):
        family.add_metric([*own, str(place)], count)
    return family


def _cache_config(state: worker_pb2.WorkerState, own: Sequence[str]) -> Metric:
    labels = (*_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching")
    family = GaugeMetricFamily("vllm:cache_config_info", "1, and the pool's size as labels.", labels=labels)
    family.add_metric(
        [*own, str(state.layout.block_size), str(state.load.num_blocks), str(not state.without_prefix_cache)], 1
    )
    return family


def _histograms(counters: control_pb2.WorkerCounters, own: Sequence[str]) -> Iterator[Metric]:
    transfers, host, residency = counters.transfers, counters.host_cache, counters.kv_residency
    for name, text, histogram in (
        ("nixl_xfer_time_seconds", "As baton_kv_transfer_seconds.", transfers.transfer_seconds),
        ("nixl_bytes_transferred", "As baton_kv_transfer_size_bytes.", transfers.transfer_bytes),
        ("iteration_tokens_total", "As baton_worker_step_tokens.", counters.step_tokens),
        ("kv_offload_store_size", "As baton_worker_host_cache_offload_bytes.", host.offload_bytes),
        ("kv_offload_load_size", "As baton_worker_host_cache_restore_bytes.", host.restore_bytes),
        ("kv_block_lifetime_seconds", "As baton_worker_kv_block_lifetime_seconds.", residency.lifetime),
        (
            "kv_block_idle_before_evict_seconds",
            "As baton_worker_kv_block_idle_before_evict_seconds.",
            residency.idle_before_evict,
        ),
        ("kv_block_reuse_gap_seconds", "As baton_worker_kv_block_reuse_gap_seconds.", residency.reuse_gap),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(own, cumulative_buckets(histogram), histogram.sum)
        yield family
