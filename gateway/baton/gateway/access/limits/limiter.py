"""The limiter interface, and the limiter in memory that enforces this gateway's share. redis_limiter.py uses Redis."""

from __future__ import annotations

from typing import Protocol

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.identity import Tenant
from baton.gateway.access.limits.ledger import Account, Ledger, Reservation
from baton.gateway.access.limits.messages import refusal
from baton.gateway.access.limits.usage import RequestCost, TokensUsed


class Limiter(Protocol):
    """Reserves capacity before a request and settles its usage afterwards."""

    async def reserve(self, tenant: Tenant, cost: RequestCost) -> Reservation:
        """Reserves capacity of every limit, or raises RateLimited."""

    def settle(self, reservation: Reservation, used: TokensUsed) -> None:
        """Ends a reservation. Idempotent; does not wait."""


class LocalLimiter:
    """Implements Limiter in memory: each of `replicas` gateways enforces its share."""

    def __init__(self, ledger: Ledger, counters: AccessCounters, replicas: int) -> None:
        self._ledger = ledger
        self._counters = counters
        self.replicas = replicas

    async def reserve(self, tenant: Tenant, cost: RequestCost) -> Reservation:
        account = self._ledger.account(tenant.name)
        account.running += cost.requests
        account.reserved += cost.tokens
        return self.decide(tenant, cost, account)

    def decide(self, tenant: Tenant, cost: RequestCost, account: Account) -> Reservation:
        """Reserves capacity for a request already counted in `account.running`."""
        share = tenant.limits.share(self.replicas)
        status = self._ledger.decide(account, share, cost, self.replicas)
        if status.refused is not None or cost.dry_run:
            account.running -= cost.requests
            account.reserved -= cost.tokens
        if status.refused is not None:
            self._counters.limited[status.refused.name.lower()] += 1
            raise refusal(tenant, share, cost, status)
        reservation = Reservation(tenant, account, cost, status, open=not cost.dry_run)
        if cost.dry_run:
            return reservation
        self._ledger.book(reservation, reported=False)
        reservation.status = self._ledger.status(account)
        self._counters.local_decisions += 1
        return reservation

    def settle(self, reservation: Reservation, used: TokensUsed) -> None:
        if not reservation.open:
            return
        reservation.open = False
        self._ledger.settle(reservation, used)
        reservation.account.unreported_spent += used.input_tokens + used.output_tokens
