"""A kvstore on a real Redis Cluster of three masters."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from kvstore_node import eventually, split
from stack import wait_until

from baton.kvstore.redis_store import RedisStore
from baton.kvstore.store import StoreError
from baton.kvstore.worker_blocks import restore
from baton.services import ports

NUM_SLOTS = 16_384
BUS = 10_000  # a node's second port, above its first


class RedisCluster:
    def __init__(self, folder):
        free = [port for port in ports.free_ports(20) if ports.why_unusable(f"127.0.0.1:{port + BUS}") is None]
        self.ports = free[:3]
        self._folder = folder
        self._processes = {}

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.ports[0]}"

    def start(self):
        for port in self.ports:
            self.start_node(port)
        share = NUM_SLOTS // len(self.ports) + 1
        for number, port in enumerate(self.ports):
            with self.client(port) as client:
                slots = range(number * share, min(NUM_SLOTS, (number + 1) * share))
                client.execute_command("CLUSTER", "ADDSLOTS", *slots)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.ports[0])
        wait_until(self._is_whole, "the cluster is whole", 30)

    def start_node(self, port):
        program = shutil.which("redis-server") or str(Path(sys.executable).parent / "redis-server")
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        flags = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "")
        cluster = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        with (folder / "redis.log").open("ab") as log:
            self._processes[port] = subprocess.Popen([program, *flags, *cluster], stdout=log, stderr=log)
        wait_until(lambda: self._answers(port), "redis answers")

    def stop_node(self, port):
        process = self._processes.pop(port)
        process.kill()
        process.wait(5)

    def stop(self):
        for process in self._processes.values():
            process.kill()
            process.wait(5)

    def client(self, port):
        return redis.Redis(port=port)

    def _answers(self, port):
        with contextlib.suppress(redis.RedisError), self.client(port) as client:
            return client.ping()
        return False

    def _is_whole(self):
        for port in self.ports:
            with self.client(port) as client:
                facts = client.execute_command("CLUSTER", "INFO")
                if b"cluster_state:ok" not in facts or b"cluster_known_nodes:3" not in facts:
                    return False
        return True


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
            numbers = {int.from_bytes(one, "little") for one in split(worker.tiers().get(1, b""))}
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


async def test_workers_spread_over_the_masters_and_come_back_from_all_of_them(cluster, start_kvstore, connect):
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


async def test_a_master_that_lost_everything_is_written_anew(cluster, start_kvstore, connect):
    kvstore = await start_kvstore(redis_url=cluster.url)
    workers = [await connect.worker(kvstore, worker_id=f"w{n}", blocks={n}) for n in range(9)]
    for worker in workers:
        await worker.join()
    await saved(cluster, *workers)
    for port in cluster.ports[1:]:
        with cluster.client(port) as client:
            client.flushall()
    await saved(cluster, *workers)


async def test_without_one_master_everything_goes_on_and_is_written_when_it_is_back(
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
