"""Creates the record store that the settings select."""

from __future__ import annotations

from baton.gateway.storage.store import MemoryRecordStore, RecordStore


def make_record_store(redis_url: str, ttl: float, max_bytes: int) -> RecordStore:
    """Returns the record store. Raises InvalidRequest for an invalid URL."""
    if redis_url:
        # Imports the Redis client only if it is used.
        from baton.gateway.storage.redis_store import RedisRecordStore

        return RedisRecordStore(redis_url, ttl)
    return MemoryRecordStore(ttl, max_bytes)
