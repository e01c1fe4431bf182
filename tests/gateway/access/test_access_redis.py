"""Limits shared by gateways in a real Redis, and enforcement while Redis is unreachable, wiped or wrong."""

import asyncio
import subprocess
import time
from contextlib import AsyncExitStack

import pytest
import redis
from support.gateway.access_rig import Clock, pretended_redis, refused, replica, tenant, use
from support.gateway.scripted_services import until
from support.network.tls_rig import make_certs
from support.redis.program import tls_redis_program

from baton.gateway.access.errors import LimitKind, RateLimited
from baton.gateway.access.limits.ledger import Ledger
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.gateway.access.redis.link import RedisLink

MINUTE = "baton:minute:{acme}"


@pytest.fixture
def store(redis_server):
    client = redis.Redis.from_url(redis_server.url)
    yield client
    client.close()


async def num_admitted(who, *gateways):
    """Returns the number of requests, alternating between gateways, that are admitted before one is refused."""
    for number in range(1000):
        try:
            await use(gateways[number % len(gateways)].limiter, who, RequestCost())
        except RateLimited:
            return number
    raise AssertionError("no limit")


async def test_replicas_share_each_limit_and_name_it(redis_server):
    cases = [
        (tenant(requests_per_minute=2), RequestCost(), LimitKind.REQUESTS),
        (tenant(input_tokens_per_minute=20), RequestCost(10, 99), LimitKind.INPUT_TOKENS),
        (tenant(output_tokens_per_minute=20), RequestCost(99, 10), LimitKind.OUTPUT_TOKENS),
        (tenant(concurrent_requests=2), RequestCost(), LimitKind.CONCURRENCY),
        (tenant(tokens_per_month=40), RequestCost(10, 10), LimitKind.BUDGET),
    ]
    async with replica(redis_server.url) as one, replica(redis_server.url) as other:
        for number, (who, cost, kind) in enumerate(cases):
            who = tenant(f"t{number}", **{name: getattr(who.limits, name) for name in who.limits.__slots__})
            first = await one.limiter.reserve(who, cost)
            await other.limiter.reserve(who, cost)
            for gateway in (one, other):
                error = await refused(gateway.limiter, who, cost)
                assert error.kind is kind
                assert kind.value in error.message
                assert (error.retry_after_ms is None) == (kind is LimitKind.BUDGET)
            one.limiter.settle(first, TokensUsed())
            if kind is not LimitKind.REQUESTS:
                await use(one.limiter, who, cost)
        assert one.counters.local_decisions == other.counters.local_decisions == 0
        assert not one.counters.redis_errors


async def test_unused_reservations_are_returned_and_excess_usage_is_charged(redis_server):
    who = tenant(output_tokens_per_minute=100, input_tokens_per_minute=1000)
    async with replica(redis_server.url) as gateway:
        held = await gateway.limiter.reserve(who, RequestCost(10, 100))
        await refused(gateway.limiter, who, RequestCost(0, 1))
        gateway.limiter.settle(held, TokensUsed(10, 30))
        gateway.limiter.settle(held, TokensUsed(0, 0))  # a second end changes nothing
        again = await gateway.limiter.reserve(who, RequestCost(0, 70))
        assert again.status.output_tokens == 100
        assert again.status.input_tokens == 10
        gateway.limiter.settle(again, TokensUsed(0, 75))
        error = await refused(gateway.limiter, who, RequestCost(0, 1))
        assert "Used 105" in error.message


async def test_a_refused_request_reserves_nothing(redis_server):
    who = tenant(requests_per_minute=10, output_tokens_per_minute=10, concurrent_requests=5, tokens_per_month=1000)
    async with replica(redis_server.url) as gateway:
        for _ in range(20):
            await refused(gateway.limiter, who, RequestCost(1, 11))
        for _ in range(5):
            await gateway.limiter.reserve(who, RequestCost(1, 2))
        error = await refused(gateway.limiter, who, RequestCost())
        assert error.kind is LimitKind.CONCURRENCY


async def test_a_request_above_the_limit_is_refused_for_good(redis_server):
    async with replica(redis_server.url) as gateway:
        error = await refused(gateway.limiter, tenant(output_tokens_per_minute=10), RequestCost(1, 11))
        assert error.retry_after_ms is None
        assert "too large" in error.message
        assert error.headers == {"x-should-retry": "false"}


async def test_retry_after_is_the_end_of_the_minute(redis_server):
    """A minute of 240 cells of 5 ms."""
    who = tenant(requests_per_minute=3)
    async with replica(redis_server.url, cell_ms=5) as gateway:
        for _ in range(3):
            await use(gateway.limiter, who, RequestCost())
        error = await refused(gateway.limiter, who, RequestCost())
        assert 0 < error.retry_after_ms <= 1205
        await asyncio.sleep(error.retry_after_ms / 1000)
        await use(gateway.limiter, who, RequestCost())


async def test_three_gateways_hold_a_tenant_to_its_tokens_within_2_percent(redis_server):
    """Three minutes of 2.4 s each, by Redis's clock. Every gateway sends as much as is admitted."""
    cell_ms, limit, cost = 10, 30_000, 50
    who = tenant(output_tokens_per_minute=limit, input_tokens_per_minute=1 << 40)
    admitted: list[tuple[float, int]] = []

    async def greedy(limiter, end):
        while time.monotonic() < end:
            sent = time.monotonic()
            try:
                held = await limiter.reserve(who, RequestCost(5, 2 * cost))
            except RateLimited:
                await asyncio.sleep(0.001)
            else:
                admitted.append((sent, cost))
                limiter.settle(held, TokensUsed(5, cost))

    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(replica(redis_server.url, 3, cell_ms)) for _ in range(3)]
        minute = 240 * cell_ms / 1000
        began = time.monotonic()
        await asyncio.gather(*(greedy(gateway.limiter, began + 2.5 * minute) for gateway in gateways))
        assert sum(gateway.counters.local_decisions for gateway in gateways) == 0
    times = [at for at, _ in admitted]
    for start in times[:: len(times) // 50]:
        within = sum(tokens for at, tokens in admitted if start <= at < start + minute - 0.02)
        assert within <= 1.02 * limit
    assert sum(tokens for at, tokens in admitted if at < began + minute) >= 0.98 * limit


async def test_a_crashed_gateways_requests_end_with_its_lease(redis_server):
    who = tenant(concurrent_requests=1)
    async with replica(redis_server.url, lease_ms=1000) as survivor:
        async with replica(redis_server.url, lease_ms=1000) as crashing:
            await crashing.limiter.reserve(who, RequestCost())
            await refused(survivor.limiter, who, RequestCost())
        for _ in range(500):
            try:
                held = await survivor.limiter.reserve(who, RequestCost())
                break
            except RateLimited:
                await asyncio.sleep(0.01)
        # A living one's are renewed.
        await asyncio.sleep(1.5)
        async with replica(redis_server.url, lease_ms=1000) as other:
            await refused(other.limiter, who, RequestCost())
        survivor.limiter.settle(held, TokensUsed())


async def test_usage_is_sent_again_to_a_wiped_redis(redis_server, store):
    who = tenant(output_tokens_per_minute=100, tokens_per_month=10_000)
    async with replica(redis_server.url) as gateway:
        await use(gateway.limiter, who, RequestCost(0, 90))
        await until(lambda: store.hgetall("baton:months:{acme}"))
        await use(gateway.limiter, who, RequestCost(0, 1))  # hears the month
        store.flushall()
        await use(gateway.limiter, who, RequestCost(0, 1))  # finds that it was wiped
        assert gateway.counters.redis_lost == 1
        error = await refused(gateway.limiter, who, RequestCost(0, 20))
        assert error.kind is LimitKind.OUTPUT_TOKENS
        await until(lambda: int(next(iter(store.hgetall("baton:months:{acme}").values()), 0)) >= 92)


async def test_scripts_that_redis_forgot_are_sent_again(redis_server, store):
    async with replica(redis_server.url) as gateway:
        for _ in range(2):
            await use(gateway.limiter, tenant(requests_per_minute=9, tokens_per_month=99), RequestCost(1, 1))
            store.script_flush()
        assert not gateway.counters.redis_errors


async def test_without_redis_each_gateway_enforces_its_share_including_its_usage(redis_server):
    who = tenant(requests_per_minute=30)
    async with replica(redis_server.url, 3) as one, replica(redis_server.url, 3) as other:
        for _ in range(6):
            await use(one.limiter, who, RequestCost())
        redis_server.stop()
        await until(lambda: not one.link.up and not other.link.up)
        for _ in range(4):
            await use(one.limiter, who, RequestCost())
        for _ in range(10):
            await use(other.limiter, who, RequestCost())
        for gateway in (one, other):
            error = await refused(gateway.limiter, who, RequestCost())
            assert error.kind is LimitKind.REQUESTS
            assert "Limit 10" in error.message
        # It is back, empty: both tell it their minute, and the rest is theirs to share.
        redis_server.start()
        await until(lambda: one.link.up and other.link.up)
        assert 8 <= await num_admitted(who, one, other) <= 11
        assert await num_admitted(who, other, one) <= 1


async def test_gateways_known_to_redis_share_a_limit_despite_the_settings(redis_server):
    who = tenant(requests_per_minute=10)
    async with replica(redis_server.url, lease_ms=600) as one, replica(redis_server.url, lease_ms=600) as other:
        await until(lambda: one.limiter.num_gateways == other.limiter.num_gateways == 2)
        redis_server.stop()
        await until(lambda: not one.link.up and not other.link.up)
        assert await num_admitted(who, one) == await num_admitted(who, other) == 5


async def test_a_gateway_that_never_saw_redis_enforces_its_share(free_port):
    who = tenant(requests_per_minute=4, tokens_per_month=100)
    async with replica(f"redis://127.0.0.1:{free_port}/0", 2) as gateway:
        for _ in range(2):
            await use(gateway.limiter, who, RequestCost(5, 5))
        assert (await refused(gateway.limiter, who, RequestCost(5, 5))).kind is LimitKind.REQUESTS
        assert gateway.counters.local_decisions == 2
        assert not gateway.counters.redis_up


async def test_a_redis_that_hangs_costs_one_deadline_and_then_nothing(redis_server, store):
    who = tenant(requests_per_minute=100)
    async with replica(redis_server.url, timeout=0.3) as gateway:
        await use(gateway.limiter, who, RequestCost())
        store.execute_command("CLIENT", "PAUSE", 60_000)
        began = time.monotonic()
        await asyncio.gather(*(use(gateway.limiter, who, RequestCost()) for _ in range(5)))
        # Those whose turn comes when the link has been given up are told that it is down.
        assert gateway.counters.redis_errors["timeout"] >= 1
        assert gateway.counters.redis_errors.total() == 5
        assert time.monotonic() - began < 5
        await until(lambda: not gateway.link.up)
        await use(gateway.limiter, who, RequestCost())
        assert gateway.counters.local_decisions == 6


async def test_a_readonly_redis_and_wrong_types_are_counted_and_the_share_is_enforced(redis_server, store):
    who = tenant(requests_per_minute=4)
    async with replica(redis_server.url, 2) as gateway:
        store.set(MINUTE, "a string")
        await use(gateway.limiter, who, RequestCost())
        store.delete(MINUTE)
        store.replicaof("127.0.0.1", 1)
        await use(gateway.limiter, who, RequestCost())
        assert (await refused(gateway.limiter, who, RequestCost())).message.startswith("Rate limit reached")
        assert gateway.counters.redis_errors["refused"] == 3
        assert gateway.counters.local_decisions == 2


async def test_implausible_answers_of_redis_are_ignored():
    """It answers with numbers that cannot be, then with bytes that are no protocol."""
    lies = [b"+OK\r\n", b":1\r\n", b"*11\r\n" + b":-1\r\n" * 11, b"*2\r\n:0\r\n:0\r\n", b"$-1\r\n", b"HTTP/1.1 400\r\n"]
    told = iter(lies)
    who = tenant(requests_per_minute=len(lies))
    liar = pretended_redis(lambda: next(told))
    async with liar as url, replica(url) as gateway:
        for _ in lies:
            await gateway.limiter.reserve(who, RequestCost())
        assert gateway.counters.redis_errors.total() >= len(lies)
        assert gateway.counters.local_decisions == len(lies)
        await refused(gateway.limiter, who, RequestCost())


@pytest.mark.parametrize(
    ("who", "cost"),
    [
        (tenant(requests_per_minute=5), RequestCost()),
        (tenant(output_tokens_per_minute=50), RequestCost(1, 10)),
        (tenant(concurrent_requests=5), RequestCost()),
        (tenant(tokens_per_month=50), RequestCost(5, 5)),
    ],
)
async def test_a_redis_that_admits_everything_is_believed_up_to_the_limit(who, cost):
    """Each answer is plausible, but not all of them together."""
    admitted = b"*11\r\n" + b"".join(b":%d\r\n" % n for n in (0, 0, -1, 1, 5, 10, 60_000, 9, 9, 202611, 0))
    liar = pretended_redis(lambda: admitted)
    async with liar as url, replica(url) as gateway:
        for _ in range(5):
            await gateway.limiter.reserve(who, cost)
        for _ in range(3):
            await refused(gateway.limiter, who, cost)
        assert gateway.counters.redis_errors["refused"] >= 3


async def test_a_clock_of_redis_that_jumps_opens_no_limit(redis_server, store):
    """The record as it looks when Redis's clock went ten minutes back, or forward."""
    who = tenant(requests_per_minute=3)
    async with replica(redis_server.url) as gateway:
        for _ in range(2):
            await use(gateway.limiter, who, RequestCost())
        for jump in (2400, -2400):
            store.hincrby(MINUTE, "cell", jump)
            assert await num_admitted(who, gateway) <= 1


async def test_gateways_whose_clocks_are_ten_minutes_apart_agree(redis_server):
    who = tenant(requests_per_minute=10, concurrent_requests=3, tokens_per_month=1000)
    clocks = [(Clock(5.0), Clock(1_800_000_000.0)), (Clock(90_000.0), Clock(1_800_000_600.0))]
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(replica(redis_server.url, ledger=Ledger(*pair))) for pair in clocks
        ]
        held = [await gateway.limiter.reserve(who, RequestCost(1, 1)) for gateway in (one, other, one)]
        assert (await refused(other.limiter, who, RequestCost())).kind is LimitKind.CONCURRENCY
        for gateway, reservation in zip((one, other, one), held, strict=True):
            gateway.limiter.settle(reservation, TokensUsed(1, 1))
        assert await num_admitted(who, one, other) == 7
        assert one.counters.redis_lost == other.counters.redis_lost == 0


async def test_a_client_that_leaves_while_redis_decides_holds_nothing(redis_server, store):
    who = tenant(concurrent_requests=1)
    async with replica(redis_server.url) as gateway:
        await use(gateway.limiter, who, RequestCost())
        store.execute_command("CLIENT", "PAUSE", 200)
        leaving = asyncio.create_task(gateway.limiter.reserve(who, RequestCost()))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert gateway.ledger.account("acme").running == 0
        async with replica(redis_server.url) as other:
            await use(other.limiter, who, RequestCost())


async def test_a_password_and_a_database_are_used(redis_server, store):
    store.config_set("requirepass", "hush")
    async with RedisLink(redis_server.url.replace("//", "//:hush@").replace("/0", "/3"), 5.0) as link:
        assert link.up
        await link.execute("SET", "there", 1)
    async with RedisLink(redis_server.url, 5.0) as link:
        assert not link.up
    client = redis.Redis.from_url(redis_server.url.replace("/0", "/3"), password="hush")
    assert client.get("there") == b"1"
    client.close()


async def test_a_redis_over_tls_is_asked_and_one_of_another_ca_is_not(tmp_path, free_port):
    program = tls_redis_program()
    if program is None:
        pytest.skip("no redis-server on the PATH speaks TLS")
    certificates, other = make_certs(tmp_path / "certs", hosts=("localhost",)), make_certs(tmp_path / "other")
    shown = ("--tls-cert-file", str(certificates / "edge.crt"), "--tls-key-file", str(certificates / "edge.key"))
    ca = ("--tls-ca-cert-file", str(certificates / "ca.crt"), "--tls-auth-clients", "no")
    where = ("--port", "0", "--tls-port", str(free_port), "--bind", "127.0.0.1", "--save", "")
    process = subprocess.Popen(  # noqa: ASYNC220
        [program, *where, *shown, *ca], stdout=subprocess.DEVNULL
    )
    try:
        url = f"rediss://localhost:{free_port}/0?ssl_ca_certs="
        async with replica(f"{url}{certificates / 'ca.crt'}") as good, replica(f"{url}{other / 'ca.crt'}") as bad:
            await until(lambda: good.link.up, 20)
            who = tenant(requests_per_minute=2)
            await use(good.limiter, who, RequestCost())
            await use(good.limiter, who, RequestCost())
            await refused(good.limiter, who, RequestCost())
            assert good.counters.local_decisions == 0
            await use(bad.limiter, who, RequestCost())
            assert bad.counters.local_decisions == 1
            assert not bad.link.up
    finally:
        process.kill()
        process.wait(10)
