"""How far a router's belief is true while nothing is broken: a worker whose cache is too small, a kvstore, a router's
index, in processes of their own but for the index."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.fleet.index_fleet import Node
from support.fleet.kvstore_node import eventually
from support.processes import ports
from support.processes.worker_harness import NAMESPACE, running_worker, submit

from baton.router.index.client import IndexClient
from baton.router.index.prefix_index import PrefixIndex
from baton.rpc.block_hash import hash_blocks

BLOCK_SIZE = 16
NUM_BLOCKS = 600
NUM_DOCUMENTS = 60  # of 8 to 32 blocks: twice what the cache holds
NUM_CLIENTS = 3
NUM_QUESTIONS = 40  # of each


@pytest.fixture
async def kvstore(redis_server, tmp_path):
    node = Node(redis_server.url, tmp_path / "kvstore.log")
    node.start()
    try:
        await node.until_ready()
        yield node
    finally:
        node.end()


async def ask(worker, index, documents, draws):
    """Questions over documents, one after the other. Returns blocks that were believed, and those not found."""
    stream, num_believed, num_phantom = worker.stream(), 0, 0
    for _ in range(NUM_QUESTIONS):
        prompt = draws.choice(documents) + [draws.randrange(5, 1000) for _ in range(20)]
        believed = index.lookup(hash_blocks(NAMESPACE, prompt, BLOCK_SIZE)).get("w", 0)
        (slot,) = await stream.generate(submit(0, prompt, max_tokens=draws.randint(1, 12)))
        found = slot.finish.num_cached_tokens // BLOCK_SIZE
        num_believed += believed
        num_phantom += max(0, believed - found)
    return num_believed, num_phantom


async def test_next_to_nothing_is_believed_that_a_worker_has_evicted(kvstore):
    draws = random.Random(1)
    documents = [
        [draws.randrange(5, 1000) for _ in range(BLOCK_SIZE * draws.randint(8, 32))] for _ in range(NUM_DOCUMENTS)
    ]
    index = PrefixIndex()
    client = asyncio.create_task(IndexClient(index, kvstore.address).run())
    (port,) = ports.free_ports(1)
    fields = {"engine_process": True, "sim_slowness": 1.0, "num_blocks": NUM_BLOCKS, "kvstore": kvstore.address}
    async with running_worker(port, worker_id="w", block_size=BLOCK_SIZE, **fields) as worker:
        await eventually(lambda: index.epoch("w") is not None, "the worker is known")
        totals = await asyncio.gather(*(ask(worker, index, documents, draws) for _ in range(NUM_CLIENTS)))
        stats = await worker.stats()
    client.cancel()
    num_believed, num_phantom = (sum(column) for column in zip(*totals, strict=True))
    print(f"{num_phantom} of {num_believed} believed blocks were evicted, {stats.counters.num_evicted_blocks} in all")
    assert stats.counters.num_evicted_blocks > NUM_BLOCKS
    assert num_believed > 200
    assert num_phantom <= 0.02 * num_believed  # others' prompts evict between the look and the admission
