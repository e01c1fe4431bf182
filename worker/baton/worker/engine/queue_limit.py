"""The bound of the queue, and which tenants may pass it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from baton.rpc.errors import NoCapacity
from baton.worker.requests.outputs import LoadSnapshot
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.scheduler import Scheduler

# The part of the queue that is kept, beyond its bound, for tenants below their share: a tenant that fills the queue
# while it is alone has no other refused.
_NEWCOMERS_PART = 0.25
_MIN_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 10.0


def check_queue(tenant: str, scheduler: Scheduler, limit: int, load: Callable[[], LoadSnapshot]) -> None:
    """Raises NoCapacity if the tenant may not queue one more request."""
    queued = scheduler.num_queued
    excess = queued - scheduler.batch.num_free_rows - limit
    if excess >= 0 and not may_exceed(tenant, scheduler.queued(), limit, excess):
        raise NoCapacity(
            f"{queued} requests wait, the queue takes {limit}", retry_after_ms=int(_retry_seconds(load()) * 1000)
        )


def may_exceed(tenant: str, queued: Iterable[RequestState], limit: int, excess: int) -> bool:
    """Returns whether a tenant may queue one more request, with `excess` beyond the limit already."""
    if excess >= limit * _NEWCOMERS_PART:
        return False
    counts = Counter([state.request.tenant for state in queued])
    counts[tenant] += 1
    return len(counts) > 1 and counts[tenant] * len(counts) <= limit


def _retry_seconds(load: LoadSnapshot) -> float:
    """Returns roughly how long until the queue is a part shorter."""
    if load.prefill_tokens_per_second == 0:
        return 1.0
    seconds = load.num_pending_prefill_tokens / load.prefill_tokens_per_second / 4
    return min(max(seconds, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
