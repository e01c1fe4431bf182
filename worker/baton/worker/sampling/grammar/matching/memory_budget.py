"""Which request ends where the matchers of all running requests take too much memory. Measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """What one request's matcher may hold."""

    tenant: bytes
    num_bytes: int  # at most


def to_end(holdings: Iterable[Holding]) -> Holding | None:
    """Returns the largest holding of the tenant that holds most; None where there is none.

    Where all tenants together hold too much, the one that holds most has more than its equal share.
    """
    held = list(holdings)
    of_tenants: Counter[bytes] = Counter()
    for holding in held:
        of_tenants[holding.tenant] += holding.num_bytes
    return max(held, key=lambda holding: (of_tenants[holding.tenant], holding.num_bytes), default=None)
