"""Charges requests that ran no generation against tenants' limits: refused requests, and tokenizing of long texts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from baton.gateway.access.errors import RateLimited
from baton.gateway.access.gate import Gate
from baton.gateway.access.identity import Identity, Tenant
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.rpc.errors import InvalidRequest, NotFound, ServiceError

_log = logging.getLogger(__name__)

# Larger bodies are parsed only if the tenant has requests left; parsing smaller ones takes milliseconds.
LARGE_BODY = 16 << 10
_BYTES_PER_REQUEST = 1 << 20
_REFUSED = frozenset((400, 404, 413, 422))
_NO_LIMIT = 10**9  # 0 would end the leases of running requests


class Refusals:
    """Counts refused requests against the limits of their tenants."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._tasks: set[asyncio.Task[None]] = set()

    def must_check(self, identity: Identity, num_bytes: int) -> bool:
        """Returns whether the limits must be checked before a request of this size is parsed."""
        return num_bytes > LARGE_BODY and identity.tenant.limits.any

    async def check(self, identity: Identity) -> None:
        """Raises RateLimited if the tenant has no requests left."""
        await self._gate.admit(identity, RequestCost(dry_run=True))

    @contextlib.asynccontextmanager
    async def counting(
        self, identity: Identity, num_bytes: int, admitted: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[None]:
        """Wraps the parsing of a call's message.

        Raises RateLimited; counts requests refused before they were admitted.
        """
        if self.must_check(identity, num_bytes):
            await self.check(identity)
        try:
            yield
        except (InvalidRequest, NotFound):
            self.count_response(identity, 400, num_bytes, admitted())
            raise

    def count_response(self, identity: Identity, status: int, num_bytes: int, admitted: bool) -> None:
        """Counts an answered request unless it was admitted. Does not wait."""
        if admitted or not identity.tenant.limits.requests_per_minute:
            return
        if status in _REFUSED or (status == 200 and num_bytes > LARGE_BODY):
            task = asyncio.get_running_loop().create_task(self._charge(identity, -(-num_bytes // _BYTES_PER_REQUEST)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _charge(self, identity: Identity, num_requests: int) -> None:
        identity = replace(identity, tenant=_charged(identity.tenant))
        try:
            for _ in range(max(1, num_requests)):
                permit = await self._gate.admit(identity, RequestCost())
                permit.settle(TokensUsed())
        except RateLimited:
            return  # the limit is already used up
        except ServiceError as error:
            _log.warning("a refused request of tenant %s was not counted: %s", identity.tenant.name, error.message)


def _charged(tenant: Tenant) -> Tenant:
    """Returns the tenant without its concurrency limit, because the request has already ended."""
    limits = tenant.limits
    return replace(tenant, limits=replace(limits, concurrent_requests=_NO_LIMIT if limits.concurrent_requests else 0))
