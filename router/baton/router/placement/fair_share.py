"""Which tenant is refused first when the fleet is full. Pure.

A tenant may hold its weighted share of all tokens in the fleet, divided by how full the queues are, or how much of the
wait is taken that the objective has room for: alone, or while there is room, everything; in full queues its share and
no more. Workers serve their queues in order, so that tokens
are served in the proportion in which they wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from baton.router.placement.costs import Costs
from baton.router.placement.standing import Standing
from baton.router.requests.in_flight import TenantLoad

# Shares are exact at this fullness: what is above it is left for tenants that come now.
_FULL = 0.8
# Of an objective's room, what a wait may be expected to take.
_WAIT_PART = 0.5
# The part of a queue that is kept, beyond its bound, for tenants below their share: a tenant that fills the queues
# while it is alone has no other refused.
_NEWCOMERS_PART = 0.25
# Less urgent requests leave so much of each queue to the others.
BACKGROUND_PART = 0.5


def fullness(standings: Sequence[Standing], max_queue_depth: int) -> float:
    """How full the fleet's queues are, in [0, 1]. No worker: full."""
    if not standings:
        return 1.0
    waiting = sum([min(one.num_waiting, max_queue_depth) for one in standings])
    return waiting / (max_queue_depth * len(standings))


def wait_pressure(costs: Costs, ttft_seconds: float) -> float:
    """How much of the wait that an objective has room for is taken. Above 1: too much.

    Half of the room is left for what estimates miss; a long prompt may wait as long as it takes by itself.
    """
    work = costs.to_first_token - costs.queue
    return costs.queue / (_WAIT_PART * max(ttft_seconds - work, work))


def exceeds_share(
    tenants: Mapping[str, TenantLoad], tenant: str, weight: float, num_tokens: int, how_full: float
) -> bool:
    """Whether so many more tokens are more than the tenant's share of a fleet that is so full."""
    own = tenants.get(tenant)
    if how_full <= 0 or own is None or len(tenants) == 1:
        return False
    total = sum([one.num_tokens for one in tenants.values()]) + num_tokens
    weights = sum([one.weight for one in tenants.values()]) - own.weight + weight
    share = (own.num_tokens + num_tokens) / total if total else 0.0
    return share * how_full / _FULL > weight / weights


def is_below_share(tenants: Mapping[str, TenantLoad], tenant: str, weight: float, num_tokens: int) -> bool:
    """Returns whether a tenant has less than its share with so many more tokens, where others have some too."""
    has_others = any(name != tenant for name in tenants)
    return has_others and not exceeds_share(tenants, tenant, weight, num_tokens, _FULL)


def queue_bound(max_queue_depth: int, priority: int, below_share: bool = False) -> int:
    """How many requests may wait at a worker before one of this priority is refused there.

    `below_share`: its tenant has less than its share.
    """
    bound = max(1, int(max_queue_depth * BACKGROUND_PART)) if priority > 0 else max_queue_depth
    return bound + math.ceil(bound * _NEWCOMERS_PART) if below_share else bound
