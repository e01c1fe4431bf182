"""Selects the request that ends when the matchers of all running requests take too much memory. Measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """The memory of one request's matcher."""

    tenant: bytes
    num_bytes: int  # upper bound


def to_end(holdings: Iterable[Holding]) -> Holding | None:
    """Returns the largest holding of the tenant with the most memory; None without holdings.

    When all tenants together hold too much, this tenant has more than an equal share.
    """
    held = list(holdings)
    of_tenants: Counter[bytes] = Counter()
    for holding in held:
        of_tenants[holding.tenant] += holding.num_bytes
    return max(held, key=lambda holding: (of_tenants[holding.tenant], holding.num_bytes), default=None)
