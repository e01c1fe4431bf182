"""Gates, limiters and keys for tests, with a real Redis and clocks that the test sets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import hiredis

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.errors import RateLimited
from baton.gateway.access.identity import Tenant, TenantLimits
from baton.gateway.access.keys.api_key import digest_of, new_key
from baton.gateway.access.limits.ledger import Ledger
from baton.gateway.access.limits.limiter import Limiter
from baton.gateway.access.limits.redis_limiter import RedisLimiter, greetings
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.gateway.access.limits.window import CELL_MS
from baton.gateway.access.redis.nodes import RedisNodes


class Clock:
    """A clock that the test advances."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_ms(self, milliseconds: float) -> None:
        self.now += milliseconds / 1000


def tenant(name: str = "acme", **limits: int) -> Tenant:
    return Tenant(name, limits=TenantLimits(**limits))


class Replica:
    """The limiter of one gateway, on a Redis."""

    def __init__(self, link: RedisNodes, limiter: RedisLimiter, counters: AccessCounters, ledger: Ledger) -> None:
        self.link = link
        self.limiter = limiter
        self.counters = counters
        self.ledger = ledger


@contextlib.asynccontextmanager
async def replica(
    url: str,
    replicas: int = 1,
    cell_ms: int = CELL_MS,
    timeout: float = 5.0,
    ledger: Ledger | None = None,
    lease_ms: int = 15_000,
) -> AsyncIterator[Replica]:
    counters = AccessCounters()
    # The gateway's clock runs faster by the same factor.
    own = ledger or Ledger(lambda: time.monotonic() * CELL_MS / cell_ms)
    async with RedisNodes(url, timeout, greetings(cell_ms)) as link:
        limiter = RedisLimiter(link, own, counters, replicas, cell_ms, lease_ms)
        async with limiter.renewing_leases():
            yield Replica(link, limiter, counters, own)


class _FakeRedis(asyncio.Protocol):
    """Answers limits' scripts as given, and other commands like Redis."""

    def __init__(self, answer: Callable[[], bytes], connections: list[_FakeRedis]) -> None:
        self._answer = answer
        self._reader = hiredis.Reader()
        connections.append(self)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while command := self._reader.gets():
            what = {b"EVALSHA": self._answer, b"EVAL": lambda: b":1\r\n"}.get(command[0], lambda: b"+OK\r\n")
            self.transport.write(what())


@contextlib.asynccontextmanager
async def pretended_redis(answer: Callable[[], bytes]) -> AsyncIterator[str]:
    """Yields the URL of a fake Redis that responds to scripts with `answer`."""
    connections: list[_FakeRedis] = []
    server = await asyncio.get_running_loop().create_server(lambda: _FakeRedis(answer, connections), "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()
        for connection in connections:
            connection.transport.abort()
        await asyncio.sleep(0)


async def refused(limiter: Limiter, who: Tenant, cost: RequestCost) -> RateLimited:
    """Returns the refusal of a request. Fails if it is admitted."""
    try:
        await limiter.reserve(who, cost)
    except RateLimited as error:
        return error
    raise AssertionError(f"{cost} was admitted")


async def use(limiter: Limiter, who: Tenant, cost: RequestCost, used: TokensUsed | None = None) -> None:
    """Admits a request and completes it."""
    limiter.settle(await limiter.reserve(who, cost), used or TokensUsed(cost.input_tokens, cost.output_tokens))


def key_file(folder: Path, keys: list[dict[str, Any]], tenants: dict[str, Any] | None = None) -> tuple[Path, list[str]]:
    """Writes a JSON file of keys with these fields. Returns it and the keys."""
    secrets, entries = [], []
    for fields in keys:
        key, key_id = new_key()
        secrets.append(key)
        entries.append({"id": key_id, "sha256": digest_of(key).hex(), **fields})
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": entries, "tenants": tenants or {}}))
    return path, secrets
