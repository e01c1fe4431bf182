"""Which tenants may still submit requests where the queue is full. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baton.worker.requests.state import RequestState

# The part of the queue that is kept, beyond its bound, for tenants below their share: a tenant that fills the queue
# while it is alone has no other refused.
_NEWCOMERS_PART = 0.25


def may_exceed(tenant: str, queued: Iterable[RequestState], limit: int, excess: int) -> bool:
    """Returns whether a tenant may queue one more request, with `excess` beyond the limit already."""
    if excess >= limit * _NEWCOMERS_PART:
        return False
    counts = Counter([state.request.tenant for state in queued])
    counts[tenant] += 1
    return len(counts) > 1 and counts[tenant] * len(counts) <= limit
