"""Keys and tenants in Redis: the JSON hashes baton:keys and baton:tenants, and a version that every change
increments.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from typing import TypeVar

import msgspec
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.identity import Tenant
from baton.gateway.access.keys.directory import DEFAULT_TENANT, Directory, KeyRecord
from baton.gateway.access.keys.records import KeyEntry, TenantEntry, key_of, tenant_of
from baton.rpc.errors import InvalidRequest, Unavailable

T = TypeVar("T")

_log = logging.getLogger(__name__)

KEYS = "baton:keys"
TENANTS = "baton:tenants"
VERSION = "baton:access:version"
_TIMEOUT_SECONDS = 2.0


class KeyStore:
    """Implements KeySource, and the operations of `baton keys`. Raises Unavailable if Redis does not answer."""

    name = "redis"

    def __init__(self, url: str, counters: AccessCounters | None = None) -> None:
        self._counters = counters or AccessCounters()
        self._version: bytes | str | None = None
        try:
            self._redis: redis.Redis = redis.from_url(
                url,
                socket_timeout=_TIMEOUT_SECONDS,
                socket_connect_timeout=_TIMEOUT_SECONDS,
                retry=Retry(NoBackoff(), 1),
                protocol=2,
            )
        except ValueError as error:
            raise InvalidRequest(f"redis_url is not allowed: {error}", field="redis_url") from error

    async def read_if_changed(self) -> Directory | None:
        version = await _asked(self._redis.get(VERSION))
        if version is None and self._version is not None:
            raise Unavailable(f"{VERSION} is missing from Redis: Redis was wiped or replaced")
        if version is not None and version == self._version:
            return None
        directory = await self._read()
        if version is None and not directory.keys:
            raise Unavailable("there are no API keys in Redis yet; `baton keys create --api-keys redis` creates one")
        self._version = version
        return directory

    async def close(self) -> None:
        await self._redis.aclose()

    async def entries(self) -> tuple[dict[str, KeyEntry], dict[str, TenantEntry]]:
        """Returns all valid entries: keys by id, tenants by name."""
        keys = _decoded(await _asked(self._redis.hgetall(KEYS)), KeyEntry, "key", self._counters)  # type: ignore[arg-type]
        tenants = _decoded(await _asked(self._redis.hgetall(TENANTS)), TenantEntry, "tenant", self._counters)  # type: ignore[arg-type]
        return keys, tenants

    async def put_key(self, entry: KeyEntry) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hset(KEYS, entry.id, msgspec.json.encode(entry))
            pipeline.incr(VERSION)
            await _asked(pipeline.execute())

    async def put_tenants(self, entries: Mapping[str, TenantEntry]) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(TENANTS)
            for name, entry in entries.items():
                pipeline.hset(TENANTS, name, msgspec.json.encode(entry))
            pipeline.incr(VERSION)
            await _asked(pipeline.execute())

    async def _read(self) -> Directory:
        """Reads all entries and skips invalid ones, so that one wrong record does not delay revocations."""
        key_entries, tenant_entries = await self.entries()
        tenants: dict[str, Tenant] = {}
        keys: dict[str, KeyRecord] = {}
        if not await _asked(self._redis.hexists(TENANTS, DEFAULT_TENANT)):
            tenants[DEFAULT_TENANT] = Tenant(DEFAULT_TENANT)
        for name, tenant in tenant_entries.items():
            try:
                tenants[name] = tenant_of(name, tenant)
            except InvalidRequest as error:
                self._skip(error.message)
        for key_id, key in key_entries.items():
            try:
                record = key_of(key, tenants)
            except InvalidRequest as error:
                self._skip(error.message)
            else:
                keys[key_id] = record
        return Directory(keys, tenants)

    def _skip(self, problem: str) -> None:
        self._counters.source_errors += 1
        _log.error("skipping an invalid entry in Redis: %s", problem)


def _decoded(raw: Mapping[bytes, bytes], kind: type[T], what: str, counters: AccessCounters) -> dict[str, T]:
    entries = {}
    for name, data in raw.items():
        shown = name.decode("utf-8", "replace")
        try:
            entries[shown] = msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            counters.source_errors += 1
            _log.error("skipping the invalid %s %r in Redis: %s", what, shown[:64], error)
    return entries


async def _asked(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(f"cannot read API keys from Redis: {error}", retry_after_ms=1000) from error
