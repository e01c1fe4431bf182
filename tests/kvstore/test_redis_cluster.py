"""A kvstore on a real Redis Cluster of three masters."""

import pytest
from support.fleet.kvstore_node import eventually, split
from support.redis.cluster import RedisCluster

from baton.kvstore.index.packed_blocks import Home
from baton.kvstore.index.worker_blocks import restore
from baton.kvstore.store.redis_store import RedisStore
from baton.kvstore.store.store import StoreError


@pytest.fixture
def cluster(tmp_path):
    cluster = RedisCluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


async def what_it_has(cluster):
    store = RedisStore(cluster.url, "baton", 5.0)
    found = {}
    try:
        async for kept in store.load():
            worker = restore(kept.snapshot, kept.batches)
            numbers = {int.from_bytes(one, "little") for one in split(worker.homes().get(Home(1), b""))}
            found[worker.worker_id] = (worker.epoch, worker.sequence, numbers)
    except StoreError:
        return None
    finally:
        await store.close()
    return found


async def saved(cluster, *workers, seconds=15):
    expected = {worker.worker_id: (worker.epoch, worker.sequence, worker.blocks) for worker in workers}

    async def agrees():
        return await what_it_has(cluster) == expected

    await eventually(agrees, "the cluster has everything", seconds)


async def test_workers_are_spread_over_the_masters_and_restored_from_all(cluster, start_kvstore, connect):
    kvstore = await start_kvstore(redis_url=cluster.url)
    workers = [await connect.worker(kvstore, worker_id=f"w{n}", blocks=set(range(n, 9000))) for n in range(12)]
    for worker in workers:
        await worker.join()
        await worker.store(10_000 + len(worker.blocks))
    await saved(cluster, *workers)
    for port in cluster.ports:
        with cluster.client(port) as client:
            assert client.keys("baton:*:snapshot"), "every master has a share"
    await kvstore.end()
    again = await start_kvstore(redis_url=cluster.url)
    replica = await connect.replica(again)
    for worker in workers:
        back = await connect.worker(again, worker_id=worker.worker_id, blocks=worker.blocks, sequence=worker.sequence)
        assert not await back.join()
        await eventually(lambda worker=worker: replica.held(worker.worker_id) == worker.blocks, "as before")


async def test_replicas_find_each_other_through_a_cluster(cluster, start_kvstore, connect):
    first, second = [await start_kvstore(redis_url=cluster.url) for _ in range(2)]
    worker = await connect.worker(first, blocks={1})
    await worker.join()
    reader = await connect.replica(second)
    await eventually(lambda: reader.held() == {1}, "through the first", 10)


async def test_a_master_that_lost_everything_is_rewritten(cluster, start_kvstore, connect):
    kvstore = await start_kvstore(redis_url=cluster.url)
    workers = [await connect.worker(kvstore, worker_id=f"w{n}", blocks={n}) for n in range(9)]
    for worker in workers:
        await worker.join()
    await saved(cluster, *workers)
    for port in cluster.ports[1:]:
        with cluster.client(port) as client:
            client.flushall()
    await saved(cluster, *workers)


async def test_without_one_master_events_are_buffered_and_written_on_its_return(
    cluster, start_kvstore, connect, caplog
):
    kvstore = await start_kvstore(redis_url=cluster.url, redis_timeout_ms=300)
    replica = await connect.replica(kvstore)
    workers = [await connect.worker(kvstore, worker_id=f"w{n}", blocks={n}) for n in range(9)]
    for worker in workers:
        await worker.join()
    await saved(cluster, *workers)
    cluster.stop_node(cluster.ports[2])
    await eventually(lambda: "cannot be reached" in caplog.text or "in time" in caplog.text, "it is noticed", 15)
    assert "RPUSHX" not in caplog.text, "no data in the log"
    for worker in workers:
        await worker.store(100)
    for worker in workers:
        await eventually(lambda worker=worker: replica.held(worker.worker_id) == worker.blocks, "told all the same")
    cluster.start_node(cluster.ports[2])
    await saved(cluster, *workers, seconds=40)
