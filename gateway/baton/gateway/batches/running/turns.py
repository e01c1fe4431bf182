"""The order in which a gateway takes batches: tenants in turn, so that none waits for all batches of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from baton.gateway.batches.state.store import Entry

MAX_OF_TENANT = 4  # batches of a tenant that one gateway runs at once


def in_turn(waiting: Iterable[Entry], running: Mapping[str, int]) -> list[Entry]:
    """Returns batches in the order in which they are taken. `waiting` begins with the oldest.

    `running` counts the batches of each tenant that run here. A tenant's batches beyond MAX_OF_TENANT are taken only
    where other gateways hold its first ones.
    """
    counts, ranked = Counter(running), list[tuple[int, Entry]]()
    for entry in waiting:
        ranked.append((counts[entry.tenant], entry))
        counts[entry.tenant] += 1
    ranked.sort(key=lambda one: one[0])
    return [entry for _, entry in ranked]
