"""Which response store the settings ask for."""

from __future__ import annotations

from baton.gateway.storage.store import MemoryResponseStore, ResponseStore


def make_response_store(redis_url: str, ttl: float, max_bytes: int) -> ResponseStore:
    """The store that the settings ask for. Raises InvalidRequest for a wrong URL."""
    if redis_url:
        # Loads the Redis client, which a gateway without Redis does without.
        from baton.gateway.storage.redis_store import RedisResponseStore

        return RedisResponseStore(redis_url, ttl)
    return MemoryResponseStore(ttl, max_bytes)
