"""Reports the worker's state to routers: identity, epoch, load. Decides when a report is due."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from baton.v1 import control_pb2, types_pb2, worker_pb2
from baton.worker.core import ModelSpec, Pooler
from baton.worker.engine.submit_pooled import TASKS
from baton.worker.kv.disk_tier.tier import DiskTier
from baton.worker.kv_spec import KvSpec
from baton.worker.requests.outputs import EngineCounters, LoadSnapshot

_MIN_INTERVAL_SECONDS = 0.1
_MAX_INTERVAL_SECONDS = 1.0


class StateReporter:
    """Sends the state when it changes, at most ten times a second and at least once."""

    def __init__(self, read: Callable[[], worker_pb2.WorkerState], send: Callable[[bytes], None]) -> None:
        self._read = read
        self._send = send
        self._sent = b""
        self._sent_at = 0.0
        self._looked_at = 0.0

    def current(self) -> bytes:
        """Returns the current state as a WatchStateResponse."""
        return worker_pb2.WatchStateResponse(state=self._read()).SerializeToString(deterministic=True)

    def report(self, now: float, at_once: bool = False) -> None:
        """Sends the state if that is due."""
        if now < self._looked_at + _MIN_INTERVAL_SECONDS and not at_once:
            return
        state, self._looked_at = self.current(), now
        if state != self._sent or now >= self._sent_at + _MAX_INTERVAL_SECONDS or at_once:
            self._send(state)
            self._sent, self._sent_at = state, now

    def deadline(self, changing: bool) -> float:
        """Returns when `report` must be called next; sooner while the state may have changed."""
        # An unchanged state is not read again at once.
        return self._looked_at + _MIN_INTERVAL_SECONDS if changing else self._sent_at + _MAX_INTERVAL_SECONDS


def load_message(load: LoadSnapshot, spec: KvSpec, transfer_bytes_per_second: float) -> worker_pb2.WorkerLoad:
    """Returns the contract's message of the load."""
    return worker_pb2.WorkerLoad(
        num_running=load.num_running,
        queue_depth=load.queue_depth,
        num_pending_prefill_tokens=load.num_pending_prefill_tokens,
        num_context_tokens=load.num_context_tokens,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        max_num_requests=load.max_num_requests,
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        decode_step_seconds=load.decode_step_seconds,
        decode_tokens_per_step=load.decode_tokens_per_step,
        transfer_bytes_per_second=transfer_bytes_per_second,
        kv_bytes_per_token=spec.bytes_per_block // spec.block_size,
        restore_bytes_per_second=load.restore_bytes_per_second,
        num_host_blocks=load.num_host_blocks,
        num_cached_host_blocks=load.num_cached_host_blocks,
        adapter_load_seconds=load.adapter_load_seconds,
        num_adapter_slots=load.num_adapter_slots,
        num_resident_adapters=load.num_resident_adapters,
    )


def totals_message(totals: EngineCounters) -> worker_pb2.WorkerTotals:
    """Returns the contract's message of the totals that routers use."""
    return worker_pb2.WorkerTotals(
        num_prompt_tokens=totals.num_prompt_tokens,
        num_cached_tokens=totals.num_cached_tokens,
        num_output_tokens=totals.num_output_tokens,
        num_finished=totals.num_finished,
        num_failed=totals.num_failed,
        num_preemptions=totals.num_preemptions,
    )


def host_cache_message(totals: EngineCounters) -> control_pb2.HostCacheCounters:
    """Returns the contract's message of what was copied to and from host memory."""
    return control_pb2.HostCacheCounters(
        num_hit_tokens=totals.num_host_hit_tokens,
        num_offloaded_blocks=totals.num_offloaded_blocks,
        num_offloaded_bytes=totals.num_offloaded_bytes,
        offload_seconds=totals.offload_seconds,
        num_restored_blocks=totals.num_restored_blocks,
        num_restored_bytes=totals.num_restored_bytes,
        restore_seconds=totals.restore_seconds,
        num_dropped_blocks=totals.num_dropped_blocks,
        offload_bytes=totals.offload_bytes.message(),
        restore_bytes=totals.restore_bytes.message(),
    )


def disk_cache_message(disk: DiskTier) -> control_pb2.DiskCacheCounters:
    """Returns the contract's message of what is on disk below host memory."""
    return control_pb2.DiskCacheCounters(
        **dataclasses.asdict(disk.counters), num_blocks=len(disk.index), num_bytes=disk.index.num_bytes
    )


def model_message(name: str, model: ModelSpec, max_model_len: int, block_size: int) -> types_pb2.ModelInfo:
    """Returns the served model. The pool may limit its context."""
    return types_pb2.ModelInfo(
        name=name,
        digest=model.digest,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        block_size=block_size,
        eos_token_ids=model.eos_token_ids,
        pooler=None if model.pooler is None else pooler_message(model.pooler),
    )


def pooler_message(pooler: Pooler) -> types_pb2.PoolerInfo:
    """Returns the contract's message of a model's pooler."""
    tasks = {task: number for number, task in TASKS.items()}
    return types_pb2.PoolerInfo(
        tasks=[tasks[task] for task in pooler.tasks],
        width=pooler.width,
        normalized=pooler.normalize,
        cuttable=pooler.cuttable,
        dimensions=pooler.dimensions,
        labels=pooler.labels,
        takes_pairs=pooler.takes_pairs,
    )
