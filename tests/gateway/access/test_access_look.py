"""A question that only looks: the answer of a reservation, and nothing reserved."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from support.gateway.access_rig import replica, tenant
from support.processes import ports
from support.processes.stack import RedisServer

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.errors import LimitKind, RateLimited
from baton.gateway.access.limits.ledger import Ledger
from baton.gateway.access.limits.limiter import Limiter, LocalLimiter
from baton.gateway.access.limits.usage import RequestCost, TokensUsed

LOOK = RequestCost(1, 1, dry_run=True)
CASES = (
    (tenant(requests_per_minute=2), LimitKind.REQUESTS),
    (tenant(input_tokens_per_minute=20), LimitKind.INPUT_TOKENS),
    (tenant(output_tokens_per_minute=20), LimitKind.OUTPUT_TOKENS),
    (tenant(concurrent_requests=2), LimitKind.CONCURRENCY),
    (tenant(tokens_per_month=40), LimitKind.BUDGET),
)


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with ExitStack() as cleanup:
        server = RedisServer(tmp_path_factory.mktemp("redis"), ports.free_ports(1)[0])
        server.start()
        cleanup.callback(server.stop)
        yield server


async def check(limiter: Limiter, who, kind: LimitKind) -> None:
    for _ in range(5):  # more looks than the limit allows requests
        look = await limiter.reserve(who, LOOK)
        limiter.settle(look, TokensUsed(99, 99))
    held = [await limiter.reserve(who, RequestCost(10, 10)) for _ in range(2)]
    with pytest.raises(RateLimited) as caught:
        await limiter.reserve(who, LOOK)
    assert caught.value.kind is kind
    for one in held:
        limiter.settle(one, TokensUsed(0, 0))
    if kind is not LimitKind.REQUESTS:  # a request stays counted for its minute
        await limiter.reserve(who, LOOK)


@pytest.mark.parametrize(("who", "kind"), CASES)
async def test_looking_in_memory(who, kind):
    ledger = Ledger()
    await check(LocalLimiter(ledger, AccessCounters(), 1), who, kind)
    account = ledger.account(who.name)
    assert (account.running, account.reserved) == (0, 0)


@pytest.mark.parametrize(("who", "kind"), CASES)
async def test_looking_in_redis(redis, who, kind):
    import redis as client

    client.Redis.from_url(redis.url).flushall()
    async with replica(redis.url) as gateway:
        await check(gateway.limiter, who, kind)
        account = gateway.ledger.account(who.name)
        assert (account.running, account.reserved) == (0, 0)
        assert account.window.totals[1:] == [0, 0]
