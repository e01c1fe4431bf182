"""The worker's Prometheus metrics, read from the engine at scrape time. Knows names and help texts, counts nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.v1 import control_pb2
from baton.worker.front.metrics.adapters import adapter_metrics
from baton.worker.front.metrics.transfers import histogram_metric, transfer_metrics
from baton.worker.front.metrics.vllm import vllm_metrics

_log = logging.getLogger(__name__)

_SCRAPE_SECONDS = 5.0
# An engine answers between two steps. A scrape waits this long for it, then uses the last answer.
_FRESH_SECONDS = 0.005
_REFRESH_SECONDS = 1.0  # between two calls to the engine, while scrapes arrive
_SCRAPED_SECONDS = 60.0  # after the last scrape, until scrapes are no longer expected
_IDLE_REFRESH_SECONDS = 4.0  # without scrapes; keeps an answer for the next first one

# WorkerCounters field, metric, help
_COUNTERS = (
    ("num_steps", "baton_worker_steps", "Engine steps."),
    ("step_seconds", "baton_worker_step_seconds", "Device time of all steps."),
    ("num_failed_steps", "baton_worker_failed_steps", "Steps that the device could not compute."),
    ("num_prompt_tokens", "baton_worker_prompt_tokens", "Prompt tokens of admitted requests."),
    ("num_output_tokens", "baton_worker_output_tokens", "Tokens generated."),
    ("num_discarded_tokens", "baton_worker_discarded_tokens", "Tokens computed for requests that had ended."),
    ("num_cached_tokens", "baton_worker_cached_tokens", "Prompt tokens found in this worker's cache."),
    ("num_transferred_tokens", "baton_worker_transferred_tokens", "Prompt tokens whose KV prefill workers sent."),
    ("num_preemptions", "baton_worker_preemptions", "Requests preempted for lack of KV blocks."),
    ("num_evicted_blocks", "baton_worker_evicted_blocks", "Cached blocks evicted for others."),
    ("num_local_fallbacks", "baton_worker_local_fallbacks", "Prompts computed here after a remote prefill failed."),
)
# HostCacheCounters field, metric, help
_HOST_CACHE = (
    ("num_hit_tokens", "baton_worker_host_cache_hit_tokens", "Prompt tokens whose KV came from host memory."),
    ("num_offloaded_blocks", "baton_worker_host_cache_offloaded_blocks", "KV blocks copied to host memory."),
    ("num_offloaded_bytes", "baton_worker_host_cache_offloaded_bytes", "KV bytes copied to host memory."),
    ("offload_seconds", "baton_worker_host_cache_offload_seconds", "Time while KV was copied to host memory."),
    ("num_restored_blocks", "baton_worker_host_cache_restored_blocks", "KV blocks copied from host memory."),
    ("num_restored_bytes", "baton_worker_host_cache_restored_bytes", "KV bytes copied from host memory."),
    ("restore_seconds", "baton_worker_host_cache_restore_seconds", "Time while KV was copied from host memory."),
    ("num_dropped_blocks", "baton_worker_host_cache_dropped_blocks", "Blocks evicted without a copy in host memory."),
)
# DiskCacheCounters field, metric, help; of --disk-cache-dir
_DISK_CACHE = (
    ("num_written_blocks", "baton_worker_disk_cache_written_blocks", "KV blocks written from host memory to disk."),
    ("num_written_bytes", "baton_worker_disk_cache_written_bytes", "KV bytes written from host memory to disk."),
    ("num_loaded_blocks", "baton_worker_disk_cache_loaded_blocks", "KV blocks read from disk to host memory."),
    ("num_loaded_bytes", "baton_worker_disk_cache_loaded_bytes", "KV bytes read from disk to host memory."),
    ("load_seconds", "baton_worker_disk_cache_load_seconds", "Time of reads of KV from disk, all readers together."),
    ("num_dropped_blocks", "baton_worker_disk_cache_dropped_blocks", "Blocks of host memory that were not written."),
    ("num_damaged_files", "baton_worker_disk_cache_damaged_files", "Torn or wrong files of KV, which were not used."),
    ("num_foreign_files", "baton_worker_disk_cache_foreign_files", "Files in the folder that hold no KV block."),
    ("num_failed_files", "baton_worker_disk_cache_failed_files", "Files that could not be read or written."),
)
_DISK_CACHE_GAUGES = (
    ("num_blocks", "baton_worker_disk_cache_blocks", "KV blocks on disk."),
    ("num_bytes", "baton_worker_disk_cache_bytes", "Bytes of the KV blocks on disk."),
)
# HostCacheCounters field, metric, help
_HOST_CACHE_SIZES = (
    ("offload_bytes", "baton_worker_host_cache_offload_bytes", "KV bytes of one copy to host memory."),
    ("restore_bytes", "baton_worker_host_cache_restore_bytes", "KV bytes of one copy from host memory."),
)
# SpeculationCounters field, metric, help
_SPECULATION = (
    ("num_drafts", "baton_worker_drafts", "Decodes of a request in a step with guessed tokens (--speculative-config)."),
    ("num_draft_tokens", "baton_worker_draft_tokens", "Tokens guessed and verified."),
    ("num_accepted_tokens", "baton_worker_accepted_tokens", "Guessed tokens that were right."),
    (
        "num_proposer_failures",
        "baton_worker_proposer_failures",
        "Requests that get no more guesses, because the proposer raised an error or did not return in time.",
    ),
)
# StepCosts field, metric, help
_STEP_COSTS = (
    ("flops", "baton_worker_estimated_flops", "FLOPs of all steps, from the model's shapes (--mfu-metrics)."),
    ("read_bytes", "baton_worker_estimated_read_bytes", "Bytes of weights and KV that all steps read, estimated."),
    ("written_bytes", "baton_worker_estimated_written_bytes", "Bytes of KV that all steps wrote, estimated."),
)
# KvResidency field, metric, help; of --kv-cache-metrics-sample
_RESIDENCY = (
    ("lifetime", "baton_worker_kv_block_lifetime_seconds", "A cached block's time until its eviction."),
    ("idle_before_evict", "baton_worker_kv_block_idle_before_evict_seconds", "Last use to eviction of a block."),
    ("reuse_gap", "baton_worker_kv_block_reuse_gap_seconds", "Between two uses of a cached block."),
)
# ConstraintCounters field, metric, help
_CONSTRAINTS = (
    ("num_compiled", "baton_worker_constraints_compiled", "Constraints compiled in the engine."),
    ("num_cache_hits", "baton_worker_constraints_cached", "Requests that found their constraint compiled."),
    ("num_tried", "baton_worker_constraints_tried", "Constraints compiled first in a process with limits."),
    ("num_killed", "baton_worker_constraints_killed", "Constraints that exceeded a limit in that process."),
    ("num_refused", "baton_worker_constraints_refused", "Requests refused for their constraint before a token."),
    ("num_ended", "baton_worker_constraints_ended", "Requests whose masks exceeded CPU time or memory."),
)
_CONSTRAINT_GAUGES = (
    ("num_waiting", "baton_worker_constraints_waiting", "Requests that wait for their tenant's turn to compile."),
    ("num_cache_bytes", "baton_worker_constraint_cache_bytes", "Bytes of the compilations kept, at most."),
    ("num_live_bytes", "baton_worker_constraint_live_bytes", "Bytes of running requests' matchers, at most."),
)
_ENDINGS = (("num_finished", "finished"), ("num_aborted", "aborted"), ("num_failed", "failed"))

# WorkerLoad field, metric, help
_LOAD_GAUGES = (
    ("num_running", "baton_worker_running_requests", "Requests in the running batch."),
    ("queue_depth", "baton_worker_queue_depth", "Requests waiting for the batch."),
    ("num_pending_prefill_tokens", "baton_worker_pending_prefill_tokens", "Prompt tokens not yet computed."),
    ("num_context_tokens", "baton_worker_context_tokens", "Context tokens of all running requests."),
    ("prefill_tokens_per_second", "baton_worker_prefill_tokens_per_second", "Recent prefill throughput."),
    ("decode_step_seconds", "baton_worker_decode_step_seconds", "Recent duration of a step that only decodes."),
    ("transfer_bytes_per_second", "baton_worker_transfer_bytes_per_second", "Recent bandwidth of received KV."),
    ("restore_bytes_per_second", "baton_worker_restore_bytes_per_second", "Recent bandwidth from host memory."),
    ("num_host_blocks", "baton_worker_host_blocks", "KV blocks that host memory has room for."),
    ("num_cached_host_blocks", "baton_worker_cached_host_blocks", "KV blocks in host memory."),
)
_BLOCKS = (
    ("num_held_blocks", "held"),
    ("num_leased_blocks", "leased"),
    ("num_cached_blocks", "cached"),
    ("num_empty_blocks", "empty"),
)

_LABELS = ("model_name",)

ReadStats = Callable[[], Awaitable[control_pb2.GetStatsResponse]]


class Device(Protocol):
    """The front's own knowledge of the device."""

    num_stalls: int

    @property
    def stalled(self) -> bool:
        """Whether the device is stalled now."""


class WorkerCollector(Collector):
    """Calls the engine at a scrape and between scrapes. Scrapes run on the exporter's threads, the link on `loop`."""

    def __init__(self, read_stats: ReadStats, device: Device, loop: asyncio.AbstractEventLoop, model_name: str) -> None:
        self._read_stats = read_stats
        self._device = device
        self._loop = loop
        self._model_name = model_name
        self._last: control_pb2.GetStatsResponse | None = None
        self._last_at = -math.inf  # monotonic seconds
        self._scraped_at = -math.inf

    def describe(self) -> list[Metric]:
        """Returns nothing: a registration must not call an engine that is starting."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Returns every metric, at most a second old. If the engine does not answer, only `baton_worker_up` 0."""
        yield from self._device_metrics()
        future = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            stats = self._answer(future)
        except (Exception, concurrent.futures.CancelledError) as error:
            future.cancel()
            _log.warning("the engine did not answer a scrape: %s", error)
            yield GaugeMetricFamily("baton_worker_up", "Whether the engine answers.", value=0)
            return
        yield GaugeMetricFamily("baton_worker_up", "Whether the engine answers.", value=1)
        yield from metrics_of(stats, self._model_name)

    async def keep_fresh(self) -> None:
        """Keeps a recent answer for scrapes, until it is cancelled. Call once the engine is ready."""
        while True:
            with contextlib.suppress(Exception):  # a scrape reports it
                await self._ask()
            scraped = time.monotonic() - self._scraped_at < _SCRAPED_SECONDS
            await asyncio.sleep(_REFRESH_SECONDS if scraped else _IDLE_REFRESH_SECONDS)

    def _device_metrics(self) -> Iterator[Metric]:
        stalls = CounterMetricFamily(
            "baton_worker_device_stalls", "Steps that exceeded their time limit.", labels=_LABELS
        )
        stalls.add_metric((self._model_name,), self._device.num_stalls)
        yield stalls
        stalled = GaugeMetricFamily("baton_worker_device_stalled", "1 while the device is stalled.", labels=_LABELS)
        stalled.add_metric((self._model_name,), float(self._device.stalled))
        yield stalled

    def _answer(self, future: concurrent.futures.Future[control_pb2.GetStatsResponse]) -> control_pb2.GetStatsResponse:
        """Returns the engine's answer, or a recent one. Raises the error of the call, or TimeoutError."""
        last = self._last if time.monotonic() - self._last_at < _SCRAPE_SECONDS else None
        if last is None:
            return future.result(_SCRAPE_SECONDS)
        try:
            return future.result(_FRESH_SECONDS)
        except TimeoutError:
            return last  # the pending answer is kept for the next scrape

    async def _read(self) -> control_pb2.GetStatsResponse:
        self._scraped_at = time.monotonic()
        return await self._ask()

    async def _ask(self) -> control_pb2.GetStatsResponse:
        self._last = await self._read_stats()
        self._last_at = time.monotonic()
        return self._last


def metrics_of(stats: control_pb2.GetStatsResponse, model_name: str) -> Iterator[Metric]:
    """Returns the metrics of some stats, some of them under vLLM's names too."""
    for field, name, text in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        counter.add_metric((model_name,), getattr(stats.counters, field))
        yield counter
    for field, name, text in _HOST_CACHE:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        counter.add_metric((model_name,), getattr(stats.counters.host_cache, field))
        yield counter
    for field, name, text in _DISK_CACHE:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        counter.add_metric((model_name,), getattr(stats.counters.disk_cache, field))
        yield counter
    for field, name, text in _DISK_CACHE_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric((model_name,), getattr(stats.counters.disk_cache, field))
        yield gauge
    for field, name, text in _SPECULATION:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        counter.add_metric((model_name,), getattr(stats.counters.speculation, field))
        yield counter
    for field, name, text in _STEP_COSTS:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        counter.add_metric((model_name,), getattr(stats.counters.step_costs, field))
        yield counter
    for field, name, text in _HOST_CACHE_SIZES:
        yield histogram_metric(name, text, getattr(stats.counters.host_cache, field), model_name)
    for field, name, text in _RESIDENCY:
        yield histogram_metric(name, text, getattr(stats.counters.kv_residency, field), model_name)
    for field, name, text in _CONSTRAINTS:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        counter.add_metric((model_name,), getattr(stats.counters.constraints, field))
        yield counter
    for field, name, text in _CONSTRAINT_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric((model_name,), getattr(stats.counters.constraints, field))
        yield gauge
    endings = CounterMetricFamily("baton_worker_requests", "Requests that ended.", labels=("model_name", "ending"))
    for field, ending in _ENDINGS:
        endings.add_metric((model_name, ending), getattr(stats.counters, field))
    yield endings
    text = "Tokens computed by a step."
    yield histogram_metric("baton_worker_step_tokens", text, stats.counters.step_tokens, model_name)
    yield from transfer_metrics(stats.counters.transfers, model_name)
    yield from adapter_metrics(stats, model_name)
    for field, name, text in _LOAD_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric((model_name,), getattr(stats.state.load, field))
        yield gauge
    deferred = GaugeMetricFamily(
        "baton_worker_deferred_requests",
        "Waiting requests that wait for KV, a prefix or a grammar.",
        labels=_LABELS,
    )
    deferred.add_metric((model_name,), stats.num_deferred)
    yield deferred
    blocks = GaugeMetricFamily("baton_worker_blocks", "KV blocks by use.", labels=("model_name", "use"))
    for field, use in _BLOCKS:
        blocks.add_metric((model_name, use), getattr(stats, field))
    yield blocks
    load = stats.state.load
    usage = GaugeMetricFamily("baton_worker_kv_usage", "Part of the KV blocks held or leased, 0 to 1.", labels=_LABELS)
    usage.add_metric((model_name,), 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0)
    yield usage
    draining = GaugeMetricFamily("baton_worker_draining", "1 while no new requests are accepted.", labels=_LABELS)
    draining.add_metric((model_name,), float(stats.state.draining))
    yield draining
    yield from vllm_metrics(stats, model_name)
