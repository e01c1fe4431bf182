"""Limits on a real Redis Cluster of three masters: tenants by master, moved slots, and a lost master."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
import redis
from redis.crc import key_slot
from support.gateway.access_rig import refused, replica, tenant, use
from support.gateway.rest_harness import until
from support.redis.cluster import RedisCluster

from baton.gateway.access.errors import LimitKind
from baton.gateway.access.limits.usage import RequestCost, TokensUsed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def port_of(cluster, name):
    """The master that has a tenant's keys."""
    slot = key_slot(f"{{{name}}}".encode())
    with cluster.client(cluster.ports[0]) as client:
        for first, last, (_, port, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return port
    raise AssertionError(slot)


def one_on_each(cluster, prefix, **limits):
    """A tenant for each master, by its port."""
    found = {}
    for number in range(200):
        name = f"{prefix}-{number}"
        found.setdefault(port_of(cluster, name), tenant(name, **limits))
    assert set(found) == set(cluster.ports)
    return found


async def test_replicas_agree_about_tenants_of_every_master(cluster):
    limits = {
        "requests_per_minute": 10,
        "input_tokens_per_minute": 1000,
        "concurrent_requests": 4,
        "tokens_per_month": 5000,
    }
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(replica(f"redis://127.0.0.1:{port}", 3)) for port in cluster.ports]
        for who in one_on_each(cluster, "agree", **limits).values():
            for number in range(9):
                await use(gateways[number % 3].limiter, who, RequestCost(10, 10))
            held = await gateways[0].limiter.reserve(who, RequestCost(10, 10))
            for gateway in gateways:
                error = await refused(gateway.limiter, who, RequestCost(1, 1))
                assert error.kind is LimitKind.REQUESTS
            gateways[0].limiter.settle(held, TokensUsed(5, 0))
        assert sum(gateway.counters.local_decisions for gateway in gateways) == 0
        assert not any(gateway.counters.redis_errors for gateway in gateways)
        await until(lambda: all(gateway.limiter.num_gateways == 3 for gateway in gateways), 20)


async def test_moved_slots_are_followed_with_their_usage(cluster):
    who = one_on_each(cluster, "moved", requests_per_minute=6)[cluster.ports[0]]
    slot, target = key_slot(f"{{{who.name}}}".encode()), cluster.ports[1]
    async with replica(cluster.url) as gateway:
        for _ in range(3):
            await use(gateway.limiter, who, RequestCost())
        await asyncio.to_thread(move, cluster, slot, cluster.ports[0], target, lambda: None)
        for _ in range(3):
            await use(gateway.limiter, who, RequestCost())
        await refused(gateway.limiter, who, RequestCost())
        assert gateway.counters.local_decisions == 0
        assert port_of(cluster, who.name) == target


async def test_while_a_slot_is_on_its_way_its_tenants_are_held_to_a_share_that_counts_afterwards(cluster):
    """Redis answers no question about several keys of which some are not there yet."""
    limit = 60
    who = one_on_each(cluster, "moving", requests_per_minute=limit)[cluster.ports[2]]
    slot, source, target = key_slot(f"{{{who.name}}}".encode()), cluster.ports[2], cluster.ports[1]
    async with replica(cluster.url) as gateway:
        await use(gateway.limiter, who, RequestCost())

        async def half_way():
            share = limit // gateway.limiter.num_gateways
            for _ in range(share - 1):
                await use(gateway.limiter, who, RequestCost())
            assert gateway.counters.local_decisions == share - 1
            await refused(gateway.limiter, who, RequestCost())
            return share

        loop = asyncio.get_running_loop()
        used = await asyncio.to_thread(
            move, cluster, slot, source, target, lambda: asyncio.run_coroutine_threadsafe(half_way(), loop).result(30)
        )
        before = gateway.counters.local_decisions
        for _ in range(limit - used):
            await use(gateway.limiter, who, RequestCost())
        await refused(gateway.limiter, who, RequestCost())
        assert gateway.counters.local_decisions == before


async def test_during_the_loss_of_a_master_its_tenants_get_a_share_and_others_continue(cluster):
    tenants = one_on_each(cluster, "lost", requests_per_minute=100)
    lost = cluster.ports[2]
    with cluster.client(cluster.ports[0]) as client:
        client.config_set("cluster-require-full-coverage", "no")
    with cluster.client(cluster.ports[1]) as client:
        client.config_set("cluster-require-full-coverage", "no")
    async with replica(cluster.url, replicas=2, timeout=1.0) as gateway:
        for who in tenants.values():
            await use(gateway.limiter, who, RequestCost())
        cluster.stop_node(lost)
        try:
            before = gateway.counters.local_decisions
            share = 100 // gateway.limiter.num_gateways
            for _ in range(share - 1):
                await use(gateway.limiter, tenants[lost], RequestCost())
            assert gateway.counters.local_decisions >= before + share - 1
            error = await refused(gateway.limiter, tenants[lost], RequestCost())
            assert f"Limit {share}," in error.message
            assert gateway.link.up
            now = gateway.counters.local_decisions
            for port in cluster.ports[:2]:
                await use(gateway.limiter, tenants[port], RequestCost())
            assert gateway.counters.local_decisions == now
        finally:
            await asyncio.to_thread(cluster.start_node, lost)

        async def decided_in_redis():
            now = gateway.counters.local_decisions
            await use(gateway.limiter, one_on_each(cluster, "back", requests_per_minute=100)[lost], RequestCost())
            return gateway.counters.local_decisions == now

        for _ in range(200):
            if await decided_in_redis():
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the node that is back is not used")


def move(cluster, slot, source, target, half_way):
    """Moves a slot as redis-cli does; calls back where its keys are at the target and it is still the source's."""
    with cluster.client(source) as old, cluster.client(target) as new:
        names = {port: _id_of(cluster, port) for port in (source, target)}
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        while keys := old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            old.execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *keys)
        answer = half_way()
        for port in (target, *(port for port in cluster.ports if port != target)):
            with cluster.client(port) as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target])
    return answer


def _id_of(cluster, port):
    with redis.Redis(port=port) as client:
        return client.execute_command("CLUSTER", "MYID").decode()
