"""Opens the state store that the settings select."""

from __future__ import annotations

from baton.gateway.batches.state.memory import MemoryState
from baton.gateway.batches.state.store import StateStore


def open_state(redis_url: str) -> StateStore:
    """Returns the store. Raises InvalidRequest for an invalid URL."""
    if not redis_url:
        return MemoryState()
    # Imports the Redis client only if it is used.
    from baton.gateway.batches.state.redis_store import RedisState

    return RedisState(redis_url)
