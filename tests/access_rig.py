"""Gates, limiters and keys for tests: real Redis, clocks that the test drives."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from baton.gateway.access.api_key import digest_of, new_key
from baton.gateway.access.ask import Ask, Used
from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.errors import RateLimited
from baton.gateway.access.identity import Limits, Tenant
from baton.gateway.access.ledger import Ledger
from baton.gateway.access.limiter import Limiter
from baton.gateway.access.redis_limiter import RedisLimiter, greetings
from baton.gateway.access.redis_link import RedisLink
from baton.gateway.access.window import CELL_MS


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_ms(self, milliseconds: float) -> None:
        self.now += milliseconds / 1000


def tenant(name: str = "acme", **limits: int) -> Tenant:
    return Tenant(name, limits=Limits(**limits))


class Replica:
    """One gateway's limiter over a Redis."""

    def __init__(self, link: RedisLink, limiter: RedisLimiter, counters: AccessCounters, ledger: Ledger) -> None:
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
    own = ledger or Ledger()
    async with RedisLink(url, timeout, greetings(cell_ms)) as link:
        limiter = RedisLimiter(link, own, counters, replicas, cell_ms, lease_ms)
        async with limiter.beating():
            yield Replica(link, limiter, counters, own)


async def refused(limiter: Limiter, who: Tenant, ask: Ask) -> RateLimited:
    """The refusal; fails where it is admitted."""
    try:
        await limiter.reserve(who, ask)
    except RateLimited as error:
        return error
    raise AssertionError(f"{ask} was admitted")


async def use(limiter: Limiter, who: Tenant, ask: Ask, used: Used | None = None) -> None:
    """One request from its beginning to its end."""
    limiter.settle(await limiter.reserve(who, ask), used or Used(ask.input_tokens, ask.output_tokens))


def key_file(folder: Path, keys: list[dict[str, Any]], tenants: dict[str, Any] | None = None) -> tuple[Path, list[str]]:
    """A JSON file of keys that were made with these fields, and the keys."""
    secrets, entries = [], []
    for fields in keys:
        key, key_id = new_key()
        secrets.append(key)
        entries.append({"id": key_id, "sha256": digest_of(key).hex(), **fields})
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": entries, "tenants": tenants or {}}))
    return path, secrets
