"""The eviction policies of host memory by the value of --host-cache-eviction-policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.worker.kv.host_tier.eviction.arc import Arc
from baton.worker.kv.host_tier.eviction.interface import EvictionPolicy
from baton.worker.kv.host_tier.eviction.lru import Lru

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {"lru": Lru, "arc": Arc}  # made for a number of slots
