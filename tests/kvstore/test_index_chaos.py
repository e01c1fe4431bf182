"""Truth under faults, with real processes: two kvstores on one Redis, a router's copy, and publishers that roam.

Each worker keeps what it holds in a set. Whatever is killed, hung, wiped or filled, no block may count for long after
its eviction, and once the fault is over the router must know exactly what each worker holds.
"""

import asyncio
import os
import random
import signal
import time

import pytest
import redis
from support.fleet.index_fleet import Node, Roamer
from support.fleet.kvstore_node import blocks, eventually

from baton.router.index.client import IndexClient
from baton.router.index.prefix_index import PrefixIndex

NUM_WORKERS = 4
UNIVERSE = 400  # block numbers of each worker
SETTLED_SECONDS = 15
OLDEST_SECONDS = 4  # a second, and what a loaded machine adds


def phantoms(index, workers):
    """For each block that counts for a worker which evicted it: how many seconds ago."""
    now = time.monotonic()
    return [
        now - when
        for worker in workers
        for number, when in worker.gone.items()
        if index.lookup(blocks(number)).get(worker.worker_id)
    ]


def is_right(index, workers):
    """Returns whether the router's index has exactly the blocks of each worker."""
    return all(index.num_blocks(one.worker_id) == len(one.blocks) for one in workers) and not phantoms(index, workers)


async def observe(index, workers, oldest):
    """Keeps the age of the oldest phantom that was ever seen."""
    while True:
        oldest.append(max(phantoms(index, workers), default=0.0))
        await asyncio.sleep(0.02)


async def churn(workers, draw):
    """Workers store and evict without end."""
    while True:
        worker = draw.choice(workers)
        some = draw.sample(range(UNIVERSE), 8)
        if draw.random() < 0.5:
            worker.store([one for one in some if one not in worker.blocks])
        else:
            worker.remove([one for one in some if one in worker.blocks])
        await asyncio.sleep(0.005)


async def kill_and_restart(node, redis_server):
    node.process.kill()
    node.process.wait(5)
    await asyncio.sleep(1)
    node.start()


async def hang(node, redis_server):
    os.kill(node.process.pid, signal.SIGSTOP)
    await asyncio.sleep(2)
    os.kill(node.process.pid, signal.SIGCONT)


async def hang_redis(node, redis_server):
    redis_server.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(2)
    redis_server.process.send_signal(signal.SIGCONT)


async def restart_redis(node, redis_server):
    redis_server.stop()
    await asyncio.sleep(1)
    redis_server.start()


async def wipe_redis(node, redis_server):
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()


async def fill_redis(node, redis_server):
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("maxmemory", 1)
        await asyncio.sleep(1)
        client.config_set("maxmemory", 0)


@pytest.fixture
async def nodes(redis_server, tmp_path):
    started = [Node(redis_server.url, tmp_path / f"kvstore{number}.log") for number in range(2)]
    try:
        for node in started:
            node.start()
        for node in started:
            await node.until_ready()
        yield started
    finally:
        for node in started:
            node.end()


@pytest.mark.parametrize(
    "fault", [kill_and_restart, hang, hang_redis, restart_redis, wipe_redis, fill_redis], ids=lambda one: one.__name__
)
async def test_the_routers_index_is_correct_soon_after_a_fault_and_complete_in_the_end(nodes, redis_server, fault):
    draw = random.Random(fault.__name__)
    addresses = [node.address for node in nodes]
    workers = [Roamer(f"w{number}", addresses) for number in range(NUM_WORKERS)]
    index = PrefixIndex()
    client = IndexClient(index, addresses)
    tasks = [asyncio.create_task(client.run()), *(asyncio.create_task(one.run()) for one in workers)]
    try:
        await eventually(lambda: client.is_whole and len(index.worker_ids) == NUM_WORKERS, "everybody is there", 20)
        churning = asyncio.create_task(churn(workers, draw))
        await asyncio.sleep(0.5)
        observing = asyncio.create_task(observe(index, workers, oldest := []))
        tasks.append(observing)
        (followed,) = [node for node in nodes if node.address == client.address]
        await fault(followed, redis_server)
        await asyncio.sleep(1)
        churning.cancel()
        await asyncio.gather(churning, return_exceptions=True)
        began = time.monotonic()
        await eventually(lambda: is_right(index, workers), "the router knows everything", SETTLED_SECONDS)
        took = time.monotonic() - began
        print(f"{fault.__name__}: the oldest phantom {max(oldest):.2f} s, everything right after {took:.2f} s")
        assert max(oldest) < OLDEST_SECONDS
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
