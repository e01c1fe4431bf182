"""Several kvstores on one Redis: each serves the events of all workers, whichever kvstore they publish to."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest
from support.fleet.kvstore_node import FakeWorker, Replica, eventually
from support.processes import ports
from support.processes.stack import wait_until

from baton.router.index.client import IndexClient
from baton.router.index.prefix_index import PrefixIndex
from baton.services.up.readiness import is_ready
from baton.services.up.tandem import Probe


@pytest.fixture
async def pair(redis_server, start_kvstore, connect):
    """Two replicas that follow each other."""
    replicas = [await start_kvstore(redis_url=redis_server.url, lease_ms=2000) for _ in range(2)]
    probes = [await connect.worker(one, worker_id=f"probe{n}") for n, one in enumerate(replicas)]
    for probe in probes:
        await probe.join()
    for one in replicas:
        reader = await connect.replica(one)
        await eventually(lambda reader=reader: {"probe0", "probe1"} <= reader.workers.keys(), "they found each other")
        reader.task.cancel()
    return replicas


async def test_every_replica_serves_every_worker(pair, connect):
    first, second = pair
    here = await connect.worker(first, worker_id="w1", blocks={1})
    there = await connect.worker(second, worker_id="w2", blocks={2})
    for worker in (here, there):
        await worker.join()
    readers = [await connect.replica(one) for one in pair]
    await here.store(10)
    await there.store(20)
    for reader in readers:
        await eventually(lambda reader=reader: reader.held("w1") == {1, 10}, "w1")
        await eventually(lambda reader=reader: reader.held("w2") == {2, 20}, "w2")


async def test_a_worker_that_moves_to_another_replica_continues_without_a_snapshot(pair, connect):
    first, second = pair
    readers = [await connect.replica(one) for one in pair]
    old = await connect.worker(first, blocks={1}, term=1)
    await old.join()
    await old.store(2)
    for reader in readers:
        await eventually(lambda reader=reader: reader.held() == {1, 2}, "both know it")
    await old.close()
    new = await connect.worker(second, blocks={1, 2}, sequence=1, term=2)
    assert not await new.join(), "the second heard everything from the first"
    await new.store(3)
    for reader in readers:
        await eventually(lambda reader=reader: reader.held() == {1, 2, 3}, "both follow")
        assert reader.kinds.count("snapshot") == 1 + 2  # and the probes'


async def test_of_two_streams_at_two_replicas_the_newer_one_wins(pair, connect):
    first, second = pair
    old = await connect.worker(first, blocks={1}, term=1)
    await old.join()
    new = await connect.worker(second, blocks={1}, term=2)
    reader = await connect.replica(second)
    await eventually(lambda: reader.held() == {1}, "the second knows it")
    await new.join()
    await new.store(5)

    async def is_refused():
        try:
            await old.heartbeat()
        except Exception as error:
            return "another stream publishes" in str(error)
        return False

    await eventually(is_refused, "the first has heard of the newer stream")
    reader = await connect.replica(first)
    await eventually(lambda: reader.held() == {1, 5}, "the first takes it from the second")


async def test_no_replica_drops_another_replicas_workers(redis_server, pair, start_kvstore, connect):
    first, second = pair
    worker = await connect.worker(first, blocks={1})
    await worker.join()
    beating = asyncio.create_task(worker.keep_beating())
    await second.end()
    third = await start_kvstore(redis_url=redis_server.url, retention_ms=600, lease_ms=400)
    reader = await connect.replica(third)
    await eventually(lambda: reader.held() == {1}, "the third counts it")
    await asyncio.sleep(1.5)  # longer than what it loaded from redis is kept unconfirmed
    assert reader.held() == {1}
    await third.end()
    beating.cancel()
    fourth = await start_kvstore(redis_url=redis_server.url)
    reader = await connect.replica(fourth)
    await eventually(lambda: "w1" in reader.workers, "redis has it still")


async def test_workers_of_a_replica_that_is_gone_count_until_their_lease_and_again_elsewhere(
    redis_server, start_kvstore, connect
):
    first, second = [await start_kvstore(redis_url=redis_server.url, lease_ms=500) for _ in range(2)]
    worker = await connect.worker(first, blocks={1}, term=1)
    await worker.join()
    beating = asyncio.create_task(worker.keep_beating())
    reader = await connect.replica(second)
    await eventually(lambda: reader.held() == {1}, "the second knows it")
    beating.cancel()
    await first.end()
    await eventually(lambda: "w1" in reader.silent, "silent")
    again = await connect.worker(second, blocks={1}, term=2)
    assert not await again.join()
    await eventually(lambda: reader.held() == {1}, "it counts again")
    assert reader.kinds.count("snapshot") == 1


async def test_replicas_keep_exchanging_events_without_redis(redis_server, pair, connect):
    first, second = pair
    redis_server.stop()
    worker = await connect.worker(first, blocks={1})
    reader = await connect.replica(second)
    await worker.join()
    await worker.store(2)
    await eventually(lambda: reader.held() == {1, 2}, "through the first")


async def test_a_reader_of_a_replica_gets_only_its_own_publishers(pair, connect):
    first, second = pair
    here = await connect.worker(first, worker_id="w1", blocks={1})
    there = await connect.worker(second, worker_id="w2", blocks={2})
    for worker in (here, there):
        await worker.join()
    everything = await connect.replica(first)
    await eventually(lambda: {"w1", "w2"} <= everything.workers.keys(), "the first knows both")
    peer = await connect.replica(first, Replica(first.address, own_only=True))
    assert peer.workers.keys() == {"w1", "probe0"}


class Node:
    """A kvstore as a process."""

    def __init__(self, redis_url, log):
        (port,) = ports.free_ports(1)
        self.address = f"127.0.0.1:{port}"
        words = ("kvstore", "--listen", self.address, "--redis-url", redis_url)
        self.process = psutil.Popen(
            [sys.executable, "-m", "baton.services.cli", *words], stdout=log, stderr=subprocess.STDOUT
        )

    async def until_ready(self):
        wait = asyncio.to_thread(wait_until, lambda: asyncio.run(is_ready(Probe.GRPC_HEALTH, self.address)), "up", 30)
        await wait

    def end(self):
        if self.process.is_running():
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(5)


@pytest.fixture
async def nodes(redis_server, tmp_path):
    with (tmp_path / "kvstores.log").open("ab") as log:
        started = [Node(redis_server.url, log) for _ in range(2)]
        try:
            for node in started:
                await node.until_ready()
            yield started
        finally:
            for node in started:
                node.end()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_router_is_right_again_soon_after_its_replica_is_killed_or_hangs(nodes, fault):
    client = IndexClient(index := PrefixIndex(), [node.address for node in nodes])
    following = asyncio.create_task(client.run())
    await eventually(lambda: client.connected, "the router follows one", 20)
    followed, other = sorted(nodes, key=lambda node: node.address != client.address)
    worker = await FakeWorker(other.address, "w1", blocks=set(range(100))).connect()
    await worker.join()
    beating = asyncio.create_task(worker.keep_beating())
    try:
        await eventually(lambda: index.num_blocks("w1") == 100, "through the one that it follows", 20)
        os.kill(followed.process.pid, fault)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await worker.remove(*range(50))
        await worker.store(500)
        beating = asyncio.create_task(worker.keep_beating())
        await eventually(lambda: index.num_blocks("w1") == 51, "through the other one", 10)
        assert client.address == other.address
        assert client.num_resyncs == 0
    finally:
        for task in (beating, following):
            task.cancel()
        await asyncio.gather(beating, following, return_exceptions=True)
        await worker.close()
