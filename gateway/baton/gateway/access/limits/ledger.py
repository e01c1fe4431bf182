"""What this gateway itself has admitted, by tenant: what it enforces without Redis, and tells Redis again when needed.

Everything is booked here, also what Redis decided; so a gateway that loses Redis goes on with a window that is full of
its own last minute, and a Redis that was wiped or comes back hears what it missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.gateway.access.errors import LimitKind
from baton.gateway.access.identity import Limits, Tenant
from baton.gateway.access.limits.usage import Ask, Standing, Used
from baton.gateway.access.limits.window import INPUT, OUTPUT, REQUESTS, Window

CONCURRENCY_RETRY_MS = 1000

# Redis forgets what is older than a minute too; by its own clock, so that only what is well within is missed.
_SURE_MS = 1000


def month_of(seconds: float) -> int:
    """Year and month in UTC, as 202611."""
    date = time.gmtime(seconds)
    return date.tm_year * 100 + date.tm_mon


Untold = tuple[int, int, int, int]


@dataclass(slots=True)
class Account:
    """One tenant at this gateway."""

    window: Window = field(default_factory=Window)
    untold: Window = field(default_factory=Window)  # the part of it that Redis has not heard of
    running: int = 0  # requests
    reserved: int = 0  # tokens of them
    month: int = 0  # 202611
    spent: int = 0  # tokens of the month, as Redis said last
    untold_spent: int = 0  # tokens of the month that Redis has not heard of
    mark: int = 0  # of Redis's record of the last minute; another one: what was there is gone
    missing: list[int] = field(default_factory=lambda: [0, 0, 0])  # of the window: what was gone, or not heard
    has_lease: bool = False  # Redis is told how many run

    def enter_month(self, month: int) -> None:
        """A new month's budget is whole. An old month does not come again, whatever a clock says."""
        if month > self.month:
            self.month, self.spent, self.untold_spent = month, 0, 0


@dataclass(slots=True)
class Reservation:
    """What one request holds until it is settled."""

    tenant: Tenant
    account: Account
    ask: Ask
    standing: Standing
    cell: int = 0  # in the account's window
    redis_cell: int = -1  # in Redis's; -1: Redis knows nothing of it
    redis_mark: int = 0
    open: bool = True


class Ledger:
    """All accounts. Clocks: `clock` in seconds, never back; `wall_clock` in Unix seconds, for months."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._accounts: dict[str, Account] = {}

    @property
    def now_ms(self) -> float:
        """This gateway's clock."""
        return self._clock() * 1000

    def account(self, tenant: str) -> Account:
        """The tenant's; a new one where there is none. There are as many as tenants that were ever configured."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account()
        return account

    def busy(self) -> list[tuple[str, Account]]:
        """The tenants that have requests running."""
        return [(name, account) for name, account in self._accounts.items() if account.running]

    def decide(self, account: Account, limits: Limits, ask: Ask, replicas: int) -> Standing:
        """Whether this gateway's share allows it; the request is among `running` and `reserved` already. Books nothing.

        `limits` are the share. Of a month's budget, the share is of what is left.
        """
        now_ms = self.now_ms
        account.enter_month(month_of(self._wall_clock()))
        account.window.advance(now_ms)
        standing = self.standing(account)
        for kind, index, limit, asked in _window_rows(limits, ask):
            used = account.window.totals[index]
            if limit and used + asked > limit:
                wait = account.window.wait_ms(index, used + asked - limit, now_ms) if asked <= limit else None
                return _refused(standing, kind, used, wait)
        if limits.concurrent_requests and account.running > limits.concurrent_requests:
            return _refused(standing, LimitKind.CONCURRENCY, account.running - 1, CONCURRENCY_RETRY_MS)
        if limits.tokens_per_month:
            left = max(0, limits.tokens_per_month - account.spent // replicas)
            spent = account.untold_spent + account.reserved - ask.tokens
            if spent + ask.tokens > left:
                return _refused(standing, LimitKind.BUDGET, account.spent // replicas + spent, None)
        return standing

    def contradicts(self, account: Account, limits: Limits, ask: Ask) -> str:
        """Why Redis cannot have admitted this, by what this gateway alone has admitted; empty: it may have."""
        now_ms = self.now_ms
        for kind, index, limit, asked in _window_rows(limits, ask):
            if limit and account.window.surely(index, now_ms, _SURE_MS) + asked > limit:
                return f"more {kind.value} than the limit of {limit} from this gateway alone"
        if limits.concurrent_requests and account.running > limits.concurrent_requests:
            return f"more than {limits.concurrent_requests} concurrent requests at this gateway alone"
        if limits.tokens_per_month and account.spent + account.reserved > limits.tokens_per_month:
            return f"more than {limits.tokens_per_month} tokens of this month"
        return ""

    def standing(self, account: Account) -> Standing:
        """The last minute as this gateway knows it."""
        requests, input_tokens, output_tokens = account.window.totals
        return Standing(requests, input_tokens, output_tokens, account.window.reset_ms(self.now_ms))

    def book(self, reservation: Reservation, told: bool) -> None:
        """The request is admitted. `told`: Redis knows."""
        ask, account, now_ms = reservation.ask, reservation.account, self.now_ms
        amounts = (ask.requests, ask.input_tokens, ask.output_tokens)
        reservation.cell = account.window.add(now_ms, amounts)
        if not told:
            account.untold.add(now_ms, amounts)

    def settle(self, reservation: Reservation, used: Used) -> None:
        """The request has ended."""
        ask, account = reservation.ask, reservation.account
        account.running -= ask.requests
        account.reserved -= ask.tokens
        changes = (0, used.input_tokens - ask.input_tokens, used.output_tokens - ask.output_tokens)
        now_ms = self.now_ms
        account.window.correct(reservation.cell, now_ms, changes)
        if reservation.redis_cell < 0:
            account.untold.correct(reservation.cell, now_ms, changes)

    def take_untold(self, account: Account) -> Untold:
        """What Redis has to hear with the next question: requests, input and output tokens, tokens of the month."""
        now_ms = self.now_ms
        account.untold.advance(now_ms)
        account.window.advance(now_ms)
        # What was missing may be older than a minute by now.
        requests, input_tokens, output_tokens = (
            min(amount + missing, total)
            for amount, missing, total in zip(
                account.untold.totals, account.missing, account.window.totals, strict=True
            )
        )
        spent, account.untold_spent = account.untold_spent, 0
        account.untold.clear()
        account.missing = [0, 0, 0]
        return requests, input_tokens, output_tokens, spent

    def put_back(self, account: Account, untold: Untold) -> None:
        """Redis may not have heard it."""
        account.missing = [missing + amount for missing, amount in zip(account.missing, untold, strict=False)]
        account.untold_spent += untold[3]

    def heard(self, account: Account, mark: int, month: int, spent: int, untold: Untold) -> bool:
        """Takes Redis's word. False: its record of the last minute is new, and has only what was told just now."""
        self.heard_month(account, month, spent)
        known, account.mark = account.mark, mark
        if known in (0, mark) or account.window.reset_ms(self.now_ms) < _SURE_MS:
            return True
        totals = zip(account.missing, account.window.totals, untold, strict=False)
        account.missing = [missing + max(0, total - told) for missing, total, told in totals]
        return False

    def heard_month(self, account: Account, month: int, spent: int) -> None:
        """The month and the tokens of it that Redis tells."""
        account.enter_month(month)
        if month == account.month:
            account.spent = max(account.spent, spent)


def _window_rows(limits: Limits, ask: Ask) -> tuple[tuple[LimitKind, int, int, int], ...]:
    return (
        (LimitKind.REQUESTS, REQUESTS, limits.requests_per_minute, ask.requests),
        (LimitKind.INPUT_TOKENS, INPUT, limits.input_tokens_per_minute, ask.input_tokens),
        (LimitKind.OUTPUT_TOKENS, OUTPUT, limits.output_tokens_per_minute, ask.output_tokens),
    )


def _refused(standing: Standing, kind: LimitKind, used: int, retry_ms: int | None) -> Standing:
    standing.refused, standing.used, standing.retry_ms = kind, used, retry_ms
    return standing
