"""Limits in Redis, shared by all gateways: one script and one round trip per request. Falls back to a local share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import hiredis

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.errors import LimitKind
from baton.gateway.access.identity import Tenant, TenantLimits
from baton.gateway.access.limits.ledger import Account, Ledger, Reservation, Unreported
from baton.gateway.access.limits.limiter import LocalLimiter
from baton.gateway.access.limits.messages import refusal
from baton.gateway.access.limits.usage import LimitStatus, RequestCost, TokensUsed
from baton.gateway.access.limits.window import CELL_MS, CELLS
from baton.gateway.access.redis.link import Answer, LinkDown
from baton.gateway.access.redis.nodes import RedisNodes

_log = logging.getLogger(__name__)

LEASE_MS = 15_000
_KINDS = (
    None,
    LimitKind.REQUESTS,
    LimitKind.INPUT_TOKENS,
    LimitKind.OUTPUT_TOKENS,
    LimitKind.CONCURRENCY,
    LimitKind.BUDGET,
)
_NUM_ANSWERS = 11
_GATEWAYS = "baton:gateways"


class WrongAnswer(Exception):
    """Redis returned an error or an impossible answer."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and its SHA-1, by which Redis caches it."""

    text: str
    sha: str


def load_script(name: str, cell_ms: int = CELL_MS) -> Script:
    """Loads a script, preceded by `window`. Tests use shorter cells for a shorter minute."""
    folder = Path(__file__).parent
    texts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("window", name)]
    text = "\n".join((f"local CELL_MS, CELLS = {cell_ms}, {CELLS}", *texts))
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def greetings(cell_ms: int = CELL_MS) -> list[tuple[str, ...]]:
    """Returns the commands that load the scripts on a new connection."""
    return [("SCRIPT", "LOAD", load_script(name, cell_ms).text) for name in ("admit", "settle")]


class RedisLimiter:
    """Implements Limiter over Redis, with a LocalLimiter as fallback."""

    def __init__(
        self,
        link: RedisNodes,
        ledger: Ledger,
        counters: AccessCounters,
        replicas: int,
        cell_ms: int = CELL_MS,
        lease_ms: int = LEASE_MS,
    ) -> None:
        self._link = link
        self._ledger = ledger
        self._counters = counters
        self._local = LocalLimiter(ledger, counters, replicas)
        self._min_replicas = replicas
        self._gateways = (Path(__file__).parent / "gateways.lua").read_text(encoding="utf-8")
        self._admit = load_script("admit", cell_ms)
        self._settle = load_script("settle", cell_ms)
        self._lease_ms = lease_ms
        self._name = uuid.uuid4().hex[:16]  # id of this gateway's leases
        self._problem = ""  # last logged problem

    @property
    def num_gateways(self) -> int:
        """Returns how many gateways share a limit while Redis is unavailable."""
        return self._local.replicas

    @contextlib.asynccontextmanager
    async def renewing_leases(self) -> AsyncIterator[None]:
        """Renews the leases of running requests."""
        task = asyncio.get_running_loop().create_task(self._renew_leases())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def reserve(self, tenant: Tenant, cost: RequestCost) -> Reservation:
        account = self._ledger.account(tenant.name)
        account.running += cost.requests
        account.reserved += cost.tokens
        limits = tenant.limits
        account.has_lease = bool(limits.concurrent_requests or limits.tokens_per_month)
        self._counters.redis_up = self._link.up
        if not self._link.up:
            return self._local.decide(tenant, cost, account)
        unreported = self._ledger.take_unreported(account)
        try:
            answers = await self._ask(self._admit, tenant.name, self._admit_words(limits, cost, account, unreported))
            status, cell, mark, month, spent = _read(answers)
            if status.refused is None and (lie := self._ledger.contradicts(account, limits, cost)):
                raise WrongAnswer(f"Redis admitted {lie}")
        except (LinkDown, TimeoutError, WrongAnswer) as error:
            self._ledger.return_unreported(account, unreported)
            self._failed(error)
            return self._local.decide(tenant, cost, account)
        except BaseException:
            # The caller was cancelled. Capacity that Redis may have reserved becomes free within a minute.
            account.running -= cost.requests
            account.reserved -= cost.tokens
            self._ledger.return_unreported(account, unreported)
            if account.has_lease and self._link.up:
                self._report_settlement(tenant.name, account, (-1, 0, 0, 0), 0, False)
            raise
        if not self._ledger.record_reply(account, mark, month, spent, unreported):
            self._counters.redis_lost += 1
            _log.error("Redis lost the last minute's usage of tenant %s; reporting it again", tenant.name)
        if status.refused is not None or cost.dry_run:
            account.running -= cost.requests
            account.reserved -= cost.tokens
        if status.refused is not None:
            self._counters.limited[status.refused.name.lower()] += 1
            raise refusal(tenant, limits, cost, status)
        reservation = Reservation(tenant, account, cost, status, cell, cell, mark, open=not cost.dry_run)
        if not cost.dry_run:
            self._ledger.book(reservation, reported=True)
        return reservation

    def settle(self, reservation: Reservation, used: TokensUsed) -> None:
        if not self._link.up:
            self._local.settle(reservation, used)
            return
        if not reservation.open:
            return
        reservation.open = False
        self._ledger.settle(reservation, used)
        account, cost, limits = reservation.account, reservation.cost, reservation.tenant.limits
        changes = (used.input_tokens - cost.input_tokens, used.output_tokens - cost.output_tokens)
        spent = used.input_tokens + used.output_tokens if limits.tokens_per_month else 0
        has_tokens = limits.input_tokens_per_minute or limits.output_tokens_per_minute
        corrects = bool(has_tokens and any(changes) and reservation.redis_cell >= 0)
        if corrects or spent or account.has_lease:
            cell, mark = (reservation.redis_cell, reservation.redis_mark) if corrects else (-1, 0)
            self._report_settlement(
                reservation.tenant.name, account, (cell, mark, *changes), spent, bool(limits.tokens_per_month)
            )

    def _report_settlement(
        self, tenant: str, account: Account, correction: tuple[int, int, int, int], spent: int, spends: bool
    ) -> None:
        """Sends a settlement without waiting. `correction` is cell, mark, input tokens and output tokens."""
        amount = spent + account.unreported_spent if spends else 0
        if spends:
            account.unreported_spent = 0
        words = (
            self._name, account.running, account.reserved, self._lease_ms, *correction,
            int(spends), int(account.has_lease), amount, account.month, account.spent,
        )  # fmt: skip
        self._send_settlement(tenant, account, words, amount, is_known=True)

    def _send_settlement(
        self, tenant: str, account: Account, words: tuple[str | int, ...], amount: int, is_known: bool
    ) -> None:
        def settled(answer: asyncio.Future[Answer]) -> None:
            try:
                found = answer.result()
                if is_known and _is_no_script(found):
                    self._send_settlement(tenant, account, words, amount, is_known=False)
                    return
                month, spent = _numbers(found, 2)
            except (LinkDown, TimeoutError, WrongAnswer) as error:
                # Redis may have received it; a budget is rather counted twice than not at all.
                account.unreported_spent += amount
                self._failed(error)
            else:
                if month:
                    self._ledger.record_month(account, month, spent)

        self._link.execute(_hash_tag(tenant), *self._command(self._settle, tenant, is_known), *words).add_done_callback(
            settled
        )

    async def _ask(self, script: Script, tenant: str, words: tuple[str | int, ...]) -> Answer:
        answer = await self._link.execute(_hash_tag(tenant), *self._command(script, tenant, True), *words)
        if _is_no_script(answer):
            answer = await self._link.execute(_hash_tag(tenant), *self._command(script, tenant, False), *words)
        return answer

    def _command(self, script: Script, tenant: str, is_known: bool) -> tuple[str | int, ...]:
        how = ("EVALSHA", script.sha) if is_known else ("EVAL", script.text)
        keys = tuple(f"baton:{what}:{_hash_tag(tenant)}" for what in ("minute", "leases", "months"))
        return (*how, len(keys), *keys)

    def _admit_words(
        self, limits: TenantLimits, cost: RequestCost, account: Account, unreported: Unreported
    ) -> tuple[str | int, ...]:
        return (
            self._name, account.running, account.reserved, self._lease_ms,
            cost.requests, cost.input_tokens, cost.output_tokens,
            limits.requests_per_minute, limits.input_tokens_per_minute, limits.output_tokens_per_minute,
            limits.concurrent_requests, limits.tokens_per_month,
            *unreported, account.month, account.spent, int(cost.dry_run),
        )  # fmt: skip

    def _failed(self, error: Exception) -> None:
        kind = "timeout" if isinstance(error, TimeoutError) else "down" if isinstance(error, LinkDown) else "refused"
        self._counters.redis_errors[kind] += 1
        if kind == "refused" and str(error) != self._problem:
            self._problem = str(error)
            _log.error("invalid answer from the Redis of limits; this gateway enforces its share of them: %s", error)

    async def _renew_leases(self) -> None:
        while True:
            self._counters.redis_up = self._link.up
            if self._link.up:
                await self._count_gateways()
            await asyncio.sleep(self._lease_ms / 3000)
            for tenant, account in self._ledger.busy():
                if self._link.up and account.has_lease:
                    self._report_settlement(tenant, account, (-1, 0, 0, 0), 0, False)

    async def _count_gateways(self) -> None:
        """Updates the number of gateways that share the limits if Redis becomes unavailable, at least as configured."""
        try:
            answer = await self._link.execute(
                _GATEWAYS, "EVAL", self._gateways, 1, _GATEWAYS, self._name, self._lease_ms
            )
            if type(answer) is not int:
                raise WrongAnswer(f"invalid number of gateways: {answer!r:.100}")
        except (LinkDown, TimeoutError, WrongAnswer) as error:
            self._failed(error)
        else:
            self._local.replicas = max(self._min_replicas, answer)


def _hash_tag(tenant: str) -> str:
    """Returns the hash tag that puts all keys of a tenant into one slot of a cluster."""
    return f"{{{tenant}}}"


def _is_no_script(answer: Answer) -> bool:
    return isinstance(answer, hiredis.ReplyError) and str(answer).startswith("NOSCRIPT")


def _numbers(answer: Answer, count: int) -> list[int]:
    if isinstance(answer, Exception):
        raise WrongAnswer(str(answer)) from answer
    if not isinstance(answer, list) or len(answer) != count or not all(type(number) is int for number in answer):
        raise WrongAnswer(f"invalid answer of a script: {answer!r:.100}")
    return answer


def _read(answer: Answer) -> tuple[LimitStatus, int, int, int, int]:
    """Returns status, cell, mark, month and its tokens. Raises WrongAnswer for invalid answers."""
    numbers = _numbers(answer, _NUM_ANSWERS)
    refused, used, retry, requests, input_tokens, output_tokens, reset, cell, mark, month, spent = numbers
    if min(used, requests, input_tokens, output_tokens, reset, cell, month, spent) < 0 or not 0 <= refused <= 5:
        raise WrongAnswer(f"invalid answer of a script: {numbers}")
    status = LimitStatus(
        requests, input_tokens, output_tokens, reset, _KINDS[refused], used, retry if retry >= 0 else None
    )
    return status, cell, mark, month, spent
