"""`baton keys` on a Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from msgspec.structs import replace

from baton.gateway.access.keys.records import KeyEntry, TenantEntry
from baton.gateway.access.keys.redis_store import KeyStore


class RedisKeys:
    """Implements KeyKeeper. Each call has a connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url

    def read(self) -> tuple[dict[str, KeyEntry], dict[str, TenantEntry]]:
        return asyncio.run(self._read())

    def add(self, entry: KeyEntry) -> None:
        asyncio.run(self._put(entry))

    def revoke(self, entry: KeyEntry) -> None:
        asyncio.run(self._put(replace(entry, revoked=True)))

    async def put_tenants(self, tenants: Mapping[str, TenantEntry]) -> None:
        store = KeyStore(self._url)
        try:
            await store.put_tenants(tenants)
        finally:
            await store.close()

    async def _read(self) -> tuple[dict[str, KeyEntry], dict[str, TenantEntry]]:
        store = KeyStore(self._url)
        try:
            return await store.entries()
        finally:
            await store.close()

    async def _put(self, entry: KeyEntry) -> None:
        store = KeyStore(self._url)
        try:
            await store.put_key(entry)
        finally:
            await store.close()
