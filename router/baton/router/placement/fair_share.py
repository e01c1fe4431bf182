"""The tenants that are refused first when the fleet is full. Pure.

A tenant may hold its weighted share of all tokens in the fleet, divided by how full the queues were lately, or by how
much of the objective's wait is used. Alone, or while queues are empty, it may hold everything; in full queues only its
share. Workers serve their queues in order, so tokens are served in the proportion in which they wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from baton.router.placement.costs import Costs
from baton.router.placement.worker_snapshot import WorkerSnapshot
from baton.router.requests.in_flight import TenantLoad

# Shares are exact at this fullness: what is above it is left for tenants that come now.
_FULL = 0.8
_HALF_LIFE_SECONDS = 1.0
# Of an objective's room, what a wait may be expected to take.
_WAIT_PART = 0.5
# The part of a queue beyond its bound that is reserved for tenants below their share, so that a tenant that fills the
# queues while it is alone does not get others refused.
_NEWCOMERS_PART = 0.25
# The part of each queue that less urgent requests leave to others.
BACKGROUND_PART = 0.5


def fullness(snapshots: Sequence[WorkerSnapshot], max_queue_depth: int) -> float:
    """Returns how full the fleet's queues are, in [0, 1]; 1 if there is no worker."""
    if not snapshots:
        return 1.0
    waiting = sum([min(one.num_waiting, max_queue_depth) for one in snapshots])
    return waiting / (max_queue_depth * len(snapshots))


class RecentFullness:
    """How full queues were lately: what they were at most, halved with every second since.

    Requests that end together empty a queue at once. Without this, whoever asks first then takes its room.
    """

    def __init__(self) -> None:
        self._value = 0.0
        self._at = 0.0

    def update(self, value: float, now: float) -> float:
        """Adds the fullness at this moment. Returns the recent one."""
        self._value = max(value, self._value * 0.5 ** ((now - self._at) / _HALF_LIFE_SECONDS))
        self._at = now
        return self._value


def wait_pressure(costs: Costs, ttft_seconds: float) -> float:
    """Returns the used part of the wait that an objective allows. Above 1: too much.

    Half of the wait is reserved for estimation errors. A long prompt may wait as long as it takes to compute.
    """
    work = costs.to_first_token - costs.queue
    return costs.queue / (_WAIT_PART * max(ttft_seconds - work, work))


def exceeds_share(
    tenants: Mapping[str, TenantLoad], tenant: str, weight: float, num_tokens: int, how_full: float
) -> bool:
    """Returns whether `num_tokens` more exceed the tenant's share of a fleet that is this full."""
    own = tenants.get(tenant)
    if how_full <= 0 or own is None or len(tenants) == 1:
        return False
    total = sum([one.num_tokens for one in tenants.values()]) + num_tokens
    weights = sum([one.weight for one in tenants.values()]) - own.weight + weight
    share = (own.num_tokens + num_tokens) / total if total else 0.0
    return share * how_full / _FULL > weight / weights


def is_below_share(tenants: Mapping[str, TenantLoad], tenant: str, weight: float, num_tokens: int) -> bool:
    """Returns whether a tenant stays below its share with `num_tokens` more, while other tenants have some."""
    has_others = any(name != tenant for name in tenants)
    return has_others and not exceeds_share(tenants, tenant, weight, num_tokens, _FULL)


def queue_bound(max_queue_depth: int, priority: int, below_share: bool = False) -> int:
    """Returns how many requests may wait at a worker before one of this priority is refused there.

    `below_share`: its tenant has less than its share.
    """
    bound = max(1, int(max_queue_depth * BACKGROUND_PART)) if priority > 0 else max_queue_depth
    return bound + math.ceil(bound * _NEWCOMERS_PART) if below_share else bound
