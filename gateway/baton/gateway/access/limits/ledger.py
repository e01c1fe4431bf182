"""This gateway's own record of admitted requests by tenant, enforced without Redis and reported to it when needed.

Every request is recorded here, also those that Redis decided. A gateway that loses Redis goes on with its own usage of
the last minute, and a Redis that was wiped or comes back receives what it missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.gateway.access.errors import LimitKind
from baton.gateway.access.identity import Tenant, TenantLimits
from baton.gateway.access.limits.usage import LimitStatus, RequestCost, TokensUsed
from baton.gateway.access.limits.window import INPUT, OUTPUT, REQUESTS, Window

CONCURRENCY_RETRY_MS = 1000

# Redis drops usage older than a minute by its own clock, so only younger usage counts as missing.
_SLACK_MS = 1000


def month_of(seconds: float) -> int:
    """Returns the year and month in UTC, such as 202611."""
    date = time.gmtime(seconds)
    return date.tm_year * 100 + date.tm_mon


Unreported = tuple[int, int, int, int]


@dataclass(slots=True)
class Account:
    """The usage of one tenant at this gateway."""

    window: Window = field(default_factory=Window)
    unreported: Window = field(default_factory=Window)  # part of `window` not yet reported to Redis
    running: int = 0  # running requests
    reserved: int = 0  # tokens reserved by running requests
    month: int = 0  # such as 202611
    spent: int = 0  # tokens of the month, as last read from Redis
    unreported_spent: int = 0  # tokens of the month not yet reported to Redis
    mark: int = 0  # id of Redis's record of the last minute; changes if the record was lost
    # parts of `window` that Redis lost or may not have received
    missing: list[int] = field(default_factory=lambda: [0, 0, 0])
    has_lease: bool = False  # whether Redis holds a lease for the running requests

    def enter_month(self, month: int) -> None:
        """Starts a new month's budget. Never returns to an earlier month, even if a clock goes back."""
        if month > self.month:
            self.month, self.spent, self.unreported_spent = month, 0, 0


@dataclass(slots=True)
class Reservation:
    """The reserved capacity of one request until it is settled."""

    tenant: Tenant
    account: Account
    cost: RequestCost
    status: LimitStatus
    cell: int = 0  # cell in the account's window
    redis_cell: int = -1  # cell in Redis's window; -1: not recorded in Redis
    redis_mark: int = 0
    open: bool = True


class Ledger:
    """The accounts of all tenants. `clock` is monotonic seconds; `wall_clock` is Unix seconds, for months."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._accounts: dict[str, Account] = {}

    @property
    def now_ms(self) -> float:
        """Returns the monotonic time in milliseconds."""
        return self._clock() * 1000

    def account(self, tenant: str) -> Account:
        """Returns the tenant's account, created on first use. Accounts are kept for every tenant ever configured."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account()
        return account

    def busy(self) -> list[tuple[str, Account]]:
        """Returns the tenants with running requests."""
        return [(name, account) for name, account in self._accounts.items() if account.running]

    def decide(self, account: Account, limits: TenantLimits, cost: RequestCost, replicas: int) -> LimitStatus:
        """Checks a request against `limits`, this gateway's share. Records nothing.

        The request is already part of `running` and `reserved`. The month's share is the part of the budget that is
        left.
        """
        now_ms = self.now_ms
        account.enter_month(month_of(self._wall_clock()))
        account.window.advance(now_ms)
        status = self.status(account)
        for kind, index, limit, requested in _window_rows(limits, cost):
            used = account.window.totals[index]
            if limit and used + requested > limit:
                wait = account.window.wait_ms(index, used + requested - limit, now_ms) if requested <= limit else None
                return _refused(status, kind, used, wait)
        if limits.concurrent_requests and account.running > limits.concurrent_requests:
            return _refused(status, LimitKind.CONCURRENCY, account.running - 1, CONCURRENCY_RETRY_MS)
        if limits.tokens_per_month:
            left = max(0, limits.tokens_per_month - account.spent // replicas)
            spent = account.unreported_spent + account.reserved - cost.tokens
            if spent + cost.tokens > left:
                return _refused(status, LimitKind.BUDGET, account.spent // replicas + spent, None)
        return status

    def contradicts(self, account: Account, limits: TenantLimits, cost: RequestCost) -> str:
        """Returns why Redis cannot have admitted this request, judged by this gateway's own usage; empty if it can."""
        now_ms = self.now_ms
        for kind, index, limit, requested in _window_rows(limits, cost):
            if limit and account.window.certain_total(index, now_ms, _SLACK_MS) + requested > limit:
                return f"more {kind.value} than the limit of {limit} from this gateway alone"
        if limits.concurrent_requests and account.running > limits.concurrent_requests:
            return f"more than {limits.concurrent_requests} concurrent requests at this gateway alone"
        if limits.tokens_per_month and account.spent + account.reserved > limits.tokens_per_month:
            return f"more than {limits.tokens_per_month} tokens of this month"
        return ""

    def status(self, account: Account) -> LimitStatus:
        """Returns the tenant's usage of the last minute."""
        requests, input_tokens, output_tokens = account.window.totals
        return LimitStatus(requests, input_tokens, output_tokens, account.window.reset_ms(self.now_ms))

    def book(self, reservation: Reservation, reported: bool) -> None:
        """Records an admitted request. `reported`: Redis has recorded it too."""
        cost, account, now_ms = reservation.cost, reservation.account, self.now_ms
        amounts = (cost.requests, cost.input_tokens, cost.output_tokens)
        reservation.cell = account.window.add(now_ms, amounts)
        if not reported:
            account.unreported.add(now_ms, amounts)

    def settle(self, reservation: Reservation, used: TokensUsed) -> None:
        """Records the actual usage of a request that has ended."""
        cost, account = reservation.cost, reservation.account
        account.running -= cost.requests
        account.reserved -= cost.tokens
        changes = (0, used.input_tokens - cost.input_tokens, used.output_tokens - cost.output_tokens)
        now_ms = self.now_ms
        account.window.correct(reservation.cell, now_ms, changes)
        if reservation.redis_cell < 0:
            account.unreported.correct(reservation.cell, now_ms, changes)

    def take_unreported(self, account: Account) -> Unreported:
        """Takes what the next command must report to Redis: requests, input tokens, output tokens, tokens of
        the month.
        """
        now_ms = self.now_ms
        account.unreported.advance(now_ms)
        account.window.advance(now_ms)
        # Missing usage may be older than a minute by now.
        requests, input_tokens, output_tokens = (
            min(amount + missing, total)
            for amount, missing, total in zip(
                account.unreported.totals, account.missing, account.window.totals, strict=True
            )
        )
        spent, account.unreported_spent = account.unreported_spent, 0
        account.unreported.clear()
        account.missing = [0, 0, 0]
        return requests, input_tokens, output_tokens, spent

    def return_unreported(self, account: Account, unreported: Unreported) -> None:
        """Returns usage to the account after a command that Redis may not have received."""
        account.missing = [missing + amount for missing, amount in zip(account.missing, unreported, strict=False)]
        account.unreported_spent += unreported[3]

    def record_reply(self, account: Account, mark: int, month: int, spent: int, unreported: Unreported) -> bool:
        """Records a reply of Redis.

        Returns False if its record of the last minute was lost and holds only what was just reported.
        """
        self.record_month(account, month, spent)
        known, account.mark = account.mark, mark
        if known in (0, mark) or account.window.reset_ms(self.now_ms) < _SLACK_MS:
            return True
        totals = zip(account.missing, account.window.totals, unreported, strict=False)
        account.missing = [missing + max(0, total - reported) for missing, total, reported in totals]
        return False

    def record_month(self, account: Account, month: int, spent: int) -> None:
        """Records the month and its tokens as Redis reported them."""
        account.enter_month(month)
        if month == account.month:
            account.spent = max(account.spent, spent)


def _window_rows(limits: TenantLimits, cost: RequestCost) -> tuple[tuple[LimitKind, int, int, int], ...]:
    return (
        (LimitKind.REQUESTS, REQUESTS, limits.requests_per_minute, cost.requests),
        (LimitKind.INPUT_TOKENS, INPUT, limits.input_tokens_per_minute, cost.input_tokens),
        (LimitKind.OUTPUT_TOKENS, OUTPUT, limits.output_tokens_per_minute, cost.output_tokens),
    )


def _refused(status: LimitStatus, kind: LimitKind, used: int, retry_ms: int | None) -> LimitStatus:
    status.refused, status.used, status.retry_ms = kind, used, retry_ms
    return status
