"""Creates the response store that the settings select."""

from __future__ import annotations

from baton.gateway.storage.store import MemoryResponseStore, ResponseStore


def make_response_store(redis_url: str, ttl: float, max_bytes: int) -> ResponseStore:
    """Returns the response store. Raises InvalidRequest for an invalid URL."""
    if redis_url:
        # Imports the Redis client only if it is used.
        from baton.gateway.storage.redis_store import RedisResponseStore

        return RedisResponseStore(redis_url, ttl)
    return MemoryResponseStore(ttl, max_bytes)
