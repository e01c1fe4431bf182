"""Limits in HTTP: OpenAI's x-ratelimit headers, Anthropic's headers, and error messages. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime

from baton.gateway.access.errors import LimitKind, RateLimited
from baton.gateway.access.identity import Tenant, TenantLimits
from baton.gateway.access.limits.usage import LimitStatus, RequestCost

_Row = tuple[str, int, int]  # name, limit, used


def openai_headers(limits: TenantLimits, status: LimitStatus) -> dict[str, str]:
    """Returns x-ratelimit-{limit,remaining,reset}-{requests,tokens} for each limit that is set.

    If input and output tokens have separate limits, `tokens` is the one with the smaller part left.
    """
    rows: list[_Row] = []
    if limits.requests_per_minute:
        rows.append(("requests", limits.requests_per_minute, status.requests))
    tokens = list(_token_rows(limits, status))
    if tokens:
        _, limit, used = max(tokens, key=lambda row: row[2] / row[1])
        rows.append(("tokens", limit, used))
    headers: dict[str, str] = {}
    for name, limit, used in rows:
        headers[f"x-ratelimit-limit-{name}"] = str(limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, limit - used))
        headers[f"x-ratelimit-reset-{name}"] = duration(status.reset_ms if used else 0)
    return headers


def anthropic_headers(limits: TenantLimits, status: LimitStatus, now: float) -> dict[str, str]:
    """Returns anthropic-ratelimit-{requests,input-tokens,output-tokens}-{limit,remaining,reset}. `now` is in Unix
    seconds.
    """
    rows = list(_token_rows(limits, status))
    if limits.requests_per_minute:
        rows.insert(0, ("requests", limits.requests_per_minute, status.requests))
    headers: dict[str, str] = {}
    for name, limit, used in rows:
        reset = datetime.fromtimestamp(math.ceil(now + (status.reset_ms / 1000 if used else 0)), UTC)
        headers[f"anthropic-ratelimit-{name}-limit"] = str(limit)
        headers[f"anthropic-ratelimit-{name}-remaining"] = str(max(0, limit - used))
        headers[f"anthropic-ratelimit-{name}-reset"] = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def _token_rows(limits: TenantLimits, status: LimitStatus) -> Iterator[_Row]:
    if limits.input_tokens_per_minute:
        yield "input-tokens", limits.input_tokens_per_minute, status.input_tokens
    if limits.output_tokens_per_minute:
        yield "output-tokens", limits.output_tokens_per_minute, status.output_tokens


def duration(milliseconds: int) -> str:
    """Formats a duration as OpenAI does: 0s, 12ms, 8.64s, 1m0s, 2h5m0s."""
    if milliseconds <= 0:
        return "0s"
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if not minutes:
        return seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"


def refusal(tenant: Tenant, limits: TenantLimits, cost: RequestCost, status: LimitStatus) -> RateLimited:
    """Returns the error for a refused request. `limits` are the enforced ones: the tenant's or a share of them."""
    kind = status.refused
    assert kind is not None
    limit, requested = _limit_and_requested(kind, limits, cost)
    if kind is LimitKind.BUDGET:
        message = (
            f"You exceeded your current quota of {kind.value}: Limit {limit}, Used {status.used}, Requested "
            f"{requested}. The quota resets at the start of the next month (UTC)."
        )
    elif status.retry_ms is None:
        message = f"Request too large for tenant {tenant.name} on {kind.value}: Limit {limit}, Requested {requested}."
    else:
        message = (
            f"Rate limit reached for tenant {tenant.name} on {kind.value}: Limit {limit}, Used {status.used}, "
            f"Requested {requested}. Please try again in {duration(status.retry_ms)}."
        )
    headers = retry_headers(status.retry_ms)
    return RateLimited(message, kind, status.retry_ms, headers, openai_headers(limits, status))


def retry_headers(retry_ms: int | None) -> dict[str, str]:
    """Returns when to retry, or the header that keeps OpenAI's and Anthropic's SDKs from retrying."""
    if retry_ms is None:
        return {"x-should-retry": "false"}
    return {"retry-after": str(max(1, math.ceil(retry_ms / 1000))), "retry-after-ms": str(retry_ms)}


def _limit_and_requested(kind: LimitKind, limits: TenantLimits, cost: RequestCost) -> tuple[int, int]:
    return {
        LimitKind.REQUESTS: (limits.requests_per_minute, cost.requests),
        LimitKind.INPUT_TOKENS: (limits.input_tokens_per_minute, cost.input_tokens),
        LimitKind.OUTPUT_TOKENS: (limits.output_tokens_per_minute, cost.output_tokens),
        LimitKind.CONCURRENCY: (limits.concurrent_requests, cost.requests),
        LimitKind.BUDGET: (limits.tokens_per_month, cost.tokens),
    }[kind]
