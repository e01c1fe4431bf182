"""Limits in one process: windows, shares, months, and headers."""

import random

import pytest
from support.gateway.access_rig import Clock, refused, tenant, use

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.errors import LimitKind, RateLimited
from baton.gateway.access.identity import TenantLimits
from baton.gateway.access.limits.ledger import Ledger
from baton.gateway.access.limits.limiter import LocalLimiter
from baton.gateway.access.limits.messages import anthropic_headers, duration, openai_headers
from baton.gateway.access.limits.usage import LimitStatus, RequestCost, TokensUsed
from baton.gateway.access.limits.window import CELL_MS, CELLS, Window


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def wall_clock():
    return Clock(1_800_000_000.0)  # 2027-01-15


@pytest.fixture
def limiter(clock, wall_clock):
    return LocalLimiter(Ledger(clock, wall_clock), AccessCounters(), 1)


async def test_no_minute_exceeds_the_limit_and_a_saturating_tenant_nearly_reaches_it(limiter, clock):
    """A million milliseconds of a tenant that always asks, in amounts of every size."""
    rng, limit, who = random.Random(7), 10_000, tenant(output_tokens_per_minute=10_000)
    taken = []
    while clock.now < 1_001_000:
        cost = RequestCost(1, rng.randint(1, 90))
        try:
            await use(limiter, who, cost)
            taken.append((clock.now, cost.output_tokens))
        except RateLimited as error:
            clock.pass_ms(min(error.retry_after_ms, rng.randint(1, 400)))
    for start, _ in taken[:: len(taken) // 200]:
        assert sum(amount for at, amount in taken if start <= at < start + 60) <= limit
    minutes = (taken[-1][0] - taken[0][0]) / 60
    assert sum(amount for _, amount in taken) / minutes >= 0.98 * limit


async def test_retry_after_is_when_it_fits(limiter, clock):
    who = tenant(input_tokens_per_minute=100)
    for _ in range(10):
        await use(limiter, who, RequestCost(10, 0))
        clock.pass_ms(1000)
    error = await refused(limiter, who, RequestCost(25, 0))
    clock.pass_ms(error.retry_after_ms - 1)
    await refused(limiter, who, RequestCost(25, 0))
    clock.pass_ms(1)
    await use(limiter, who, RequestCost(25, 0))


def test_corrections_find_their_cell_or_nothing():
    window, naive = Window(), []
    rng, now = random.Random(3), 0.0
    for _ in range(5000):
        now += rng.choice((0, 1, 100, 3000))
        if naive and rng.random() < 0.5:
            entry = rng.choice(naive[-50:])
            change = -rng.randint(0, entry[1])
            window.correct(entry[0], now, (0, change, 0))
            if entry[0] >= int(now // CELL_MS) - CELLS:
                entry[1] += change
        else:
            amount = rng.randint(0, 100)
            naive.append([window.add(now, (1, amount, 0)), amount])
        window.advance(now)
        kept = [entry for entry in naive if entry[0] >= int(now // CELL_MS) - CELLS]
        assert window.totals == [len(kept), sum(entry[1] for entry in kept), 0]


async def test_a_month_ends_with_its_budget(limiter, wall_clock):
    who = tenant(tokens_per_month=100)
    held = await limiter.reserve(who, RequestCost(30, 60))
    assert (await refused(limiter, who, RequestCost(5, 6))).kind is LimitKind.BUDGET
    limiter.settle(held, TokensUsed(30, 10))
    await use(limiter, who, RequestCost(30, 30))
    error = await refused(limiter, who, RequestCost(1, 0))
    assert (error.openai_type, error.openai_code, error.retry_after_ms) == ("insufficient_quota",) * 2 + (None,)
    wall_clock.now += 20 * 86400
    await use(limiter, who, RequestCost(50, 50))
    wall_clock.now -= 600  # ten minutes back, and a month that is over does not come again
    wall_clock.now -= 20 * 86400
    await refused(limiter, who, RequestCost(1, 0))


async def test_a_share_is_a_part_and_never_nothing(clock, wall_clock):
    limiter = LocalLimiter(Ledger(clock, wall_clock), AccessCounters(), 4)
    who = tenant(requests_per_minute=9, concurrent_requests=1)
    for _ in range(2):
        await use(limiter, who, RequestCost())
    assert "Limit 2" in (await refused(limiter, who, RequestCost())).message
    assert TenantLimits(concurrent_requests=1, requests_per_minute=9).share(4) == TenantLimits(2, 0, 0, 1, 0)


async def test_tenants_do_not_see_each_other(limiter):
    await use(limiter, tenant("one", requests_per_minute=1), RequestCost())
    await use(limiter, tenant("two", requests_per_minute=1), RequestCost())
    await refused(limiter, tenant("one", requests_per_minute=1), RequestCost())


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0s"),
        (12, "12ms"),
        (1000, "1s"),
        (8640, "8.64s"),
        (60_000, "1m0s"),
        (360_500, "6m0.5s"),
        (7_500_000, "2h5m0s"),
    ],
)
def test_durations_are_written_as_openai_does(milliseconds, text):
    assert duration(milliseconds) == text


def test_headers_are_openais_and_anthropics():
    limits = TenantLimits(requests_per_minute=10, input_tokens_per_minute=100, output_tokens_per_minute=200)
    status = LimitStatus(requests=3, input_tokens=50, output_tokens=150, reset_ms=60_250)
    assert openai_headers(limits, status) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "7",
        "x-ratelimit-reset-requests": "1m0.25s",
        "x-ratelimit-limit-tokens": "200",
        "x-ratelimit-remaining-tokens": "50",
        "x-ratelimit-reset-tokens": "1m0.25s",
    }
    told = anthropic_headers(limits, status, 1_800_000_000.0)
    assert told["anthropic-ratelimit-input-tokens-remaining"] == "50"
    assert told["anthropic-ratelimit-output-tokens-limit"] == "200"
    assert told["anthropic-ratelimit-requests-reset"] == "2027-01-15T08:01:01Z"
    assert openai_headers(TenantLimits(concurrent_requests=1), LimitStatus()) == {}
