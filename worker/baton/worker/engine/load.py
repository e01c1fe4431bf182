"""Computes the load of an engine from its scheduler's state."""

from __future__ import annotations

from baton.worker.requests.outputs import LoadSnapshot
from baton.worker.requests.state import Phase
from baton.worker.scheduling.rates import Rates
from baton.worker.scheduling.scheduler import Scheduler
from baton.worker.scheduling.settings import EngineSettings


def load_snapshot(
    scheduler: Scheduler,
    settings: EngineSettings,
    rates: Rates,
    restore_bytes_per_second: float,
    num_prefill_tokens_in_flight: int,
) -> LoadSnapshot:
    """Returns the current load."""
    batch = scheduler.batch
    queue_depth = scheduler.num_queued
    waiting = scheduler.queued() if queue_depth else ()
    pending = sum([len(state.token_ids) for state in waiting if state.phase not in (Phase.READY, Phase.REMOTE)])
    pending += sum([len(state.token_ids) - int(batch.num_computed[state.row]) for state in batch.prefilling])
    return LoadSnapshot(
        num_running=len(batch),
        queue_depth=queue_depth,
        num_pending_prefill_tokens=pending + num_prefill_tokens_in_flight,
        num_context_tokens=batch.num_context_tokens,
        num_blocks=scheduler.pool.num_blocks,
        num_free_blocks=scheduler.pool.num_free,
        max_num_requests=settings.max_num_requests,
        prefill_tokens_per_second=rates.prefill_tokens_per_second,
        decode_step_seconds=rates.decode_step_seconds,
        decode_tokens_per_step=rates.decode_tokens_per_step,
        num_host_blocks=scheduler.offloads.tier.num_slots,
        num_cached_host_blocks=scheduler.offloads.tier.num_kept_slots,
        restore_bytes_per_second=restore_bytes_per_second,
    )
