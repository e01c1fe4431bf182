"""Composes access control from the settings: keys from a file or Redis, limits in Redis or in memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.gate import Gate, KeyGate, OpenGate
from baton.gateway.access.keys.file import KeyFile
from baton.gateway.access.keys.ring import KeyRing, KeySource
from baton.gateway.access.limits.ledger import Ledger
from baton.gateway.access.limits.limiter import Limiter, LocalLimiter
from baton.gateway.access.settings import FROM_REDIS, AccessSettings

_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_gate(settings: AccessSettings, counters: AccessCounters) -> AsyncIterator[Gate]:
    """Opens the gate for a gateway's lifetime. Raises InvalidRequest for invalid keys."""
    if not settings.api_keys:
        _log.warning("no API keys are configured: every client that reaches this gateway may use it (--api-keys)")
        yield OpenGate()
        return
    async with contextlib.AsyncExitStack() as stack:
        ring = KeyRing(_source(settings, counters), counters)
        await stack.enter_async_context(ring.watching())
        yield KeyGate(ring, await _limiter(settings, counters, stack), counters)


def _source(settings: AccessSettings, counters: AccessCounters) -> KeySource:
    if settings.api_keys != FROM_REDIS:
        return KeyFile(settings.api_keys)
    from baton.gateway.access.keys.redis_store import KeyStore

    return KeyStore(settings.redis_url, counters)


async def _limiter(settings: AccessSettings, counters: AccessCounters, stack: contextlib.AsyncExitStack) -> Limiter:
    ledger = Ledger()
    if not settings.redis_url:
        return LocalLimiter(ledger, counters, settings.replicas)
    from baton.gateway.access.limits.redis_limiter import RedisLimiter, greetings
    from baton.gateway.access.redis.nodes import RedisNodes

    link = await stack.enter_async_context(RedisNodes(settings.redis_url, settings.redis_timeout, greetings()))
    limiter = RedisLimiter(link, ledger, counters, settings.replicas)
    await stack.enter_async_context(limiter.renewing_leases())
    return limiter
