"""The kvstore with a real Redis server: restarts, outages, loss, and a full server."""

import asyncio
import logging
import signal
import time
from pathlib import Path

import psutil
import pytest
import redis
from prometheus_client import CollectorRegistry
from support.fleet.kvstore_node import eventually, split, stored
from support.processes import ports

from baton.kvstore.counters import KvstoreCounters
from baton.kvstore.index.index import Index
from baton.kvstore.index.packed_blocks import Home
from baton.kvstore.index.publishers import Publisher, Publishers
from baton.kvstore.index.worker_blocks import WorkerBlocks, restore
from baton.kvstore.store import embedded_redis
from baton.kvstore.store.redis_store import RedisStore
from baton.kvstore.store.write_behind import WriteBehind
from baton.v1 import kv_pb2


@pytest.fixture
def client(redis_server):
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


async def what_redis_has(url, namespace="baton"):
    """Returns the state of a kvstore that would start now: worker -> (epoch, sequence, block numbers)."""
    store = RedisStore(url, namespace, 5.0)
    found = {}
    async for kept in store.load():
        worker = restore(kept.snapshot, kept.batches)
        numbers = {int.from_bytes(one, "little") for one in split(worker.homes().get(Home(1), b""))}
        found[worker.worker_id] = (worker.epoch, worker.sequence, numbers)
    await store.close()
    return found


async def saved(url, worker, seconds=10):
    """Waits until Redis has all of a worker."""

    async def agrees():
        found = await what_redis_has(url)
        return found.get(worker.worker_id) == (worker.epoch, worker.sequence, worker.blocks)

    await eventually(agrees, "redis has everything", seconds)


async def test_snapshot_and_deltas_are_in_redis(redis_server, start_kvstore, connect):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    worker = await connect.worker(kvstore, blocks=set(range(10_000)), sequence=3)
    await worker.join()
    await worker.store(20_000)
    await worker.remove(5)
    await saved(redis_server.url, worker)


async def test_blocks_from_redis_count_once_the_worker_confirms_them(redis_server, start_kvstore, connect):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    worker = await connect.worker(kvstore, blocks={1, 2})
    await worker.join()
    await worker.store(3)
    await worker.close()
    await kvstore.end()
    again = await start_kvstore(redis_url=redis_server.url, listen=kvstore.address)
    replica = await connect.replica(again)
    assert replica.workers["w1"][:2] == (7, 1)
    assert replica.held() is None, "the worker may have died since"
    back = await connect.worker(again, blocks=worker.blocks, sequence=worker.sequence)
    assert not await back.join(), "what redis had is what the worker has"
    await eventually(lambda: replica.held() == {1, 2, 3}, "it counts")
    await back.store(4)
    await saved(redis_server.url, back)


async def test_a_worker_that_changed_meanwhile_is_asked_for_a_snapshot(redis_server, start_kvstore, connect):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    worker = await connect.worker(kvstore, blocks={1, 2})
    await worker.join()
    await kvstore.end()
    again = await start_kvstore(redis_url=redis_server.url)
    replica = await connect.replica(again)
    assert "w1" in replica.workers
    back = await connect.worker(again, blocks={9}, sequence=5)
    assert await back.join()
    await eventually(lambda: replica.held() == {9}, "the new snapshot")


async def test_a_loaded_worker_that_does_not_confirm_is_forgotten(redis_server, start_kvstore, connect):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    worker = await connect.worker(kvstore, blocks={1, 2})
    await worker.join()
    await kvstore.end()
    again = await start_kvstore(redis_url=redis_server.url, retention_ms=700)
    replica = await connect.replica(again)
    await eventually(lambda: "forgotten" in replica.kinds or "w1" not in replica.workers, "forgotten")

    async def is_gone():
        return not await what_redis_has(redis_server.url)

    await eventually(is_gone, "gone from redis too")


async def test_while_redis_is_stopped_events_are_buffered_and_written_later(
    redis_server, start_kvstore, connect, caplog
):
    caplog.set_level(logging.INFO)
    kvstore = await start_kvstore(redis_url=redis_server.url)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    redis_server.stop()
    for number in range(2, 60):
        async with asyncio.timeout(5):
            await worker.store(number)
        await asyncio.sleep(0.01)
    await eventually(lambda: replica.held() == worker.blocks, "routers hear everything")
    await eventually(lambda: errors_in(caplog), "it is logged")
    redis_server.start()
    await saved(redis_server.url, worker)
    assert len(errors_in(caplog)) == 1, "an outage is one line"
    await eventually(lambda: "is back" in caplog.text, "its end is logged too")


def errors_in(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.ERROR and record.name.startswith("baton")
    ]


async def test_a_start_without_redis_serves_and_redis_gets_everything_when_it_is_there(
    redis_server, start_kvstore, connect, caplog
):
    redis_server.stop()
    began = time.monotonic()
    kvstore = await start_kvstore(redis_url=redis_server.url)
    assert time.monotonic() - began < 5
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    assert (await worker.store(2)).acknowledged_sequence == 1
    assert "cannot be reached" in errors_in(caplog)[0]
    redis_server.start()
    await saved(redis_server.url, worker)


async def test_a_wiped_redis_is_rewritten_without_the_workers(redis_server, start_kvstore, connect, client):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1, 2})
    await worker.join()
    await saved(redis_server.url, worker)
    client.flushall()
    await saved(redis_server.url, worker)
    assert replica.held() == {1, 2}
    assert replica.kinds.count("snapshot") == 1


async def test_a_log_that_lost_its_end_is_found_at_the_next_change(redis_server, start_kvstore, connect, client):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    worker = await connect.worker(kvstore)
    await worker.join()
    await saved(redis_server.url, worker)
    for number in range(5):
        await worker.store(number)
    await saved(redis_server.url, worker)
    (log,) = client.keys("baton:*:log")
    client.rpop(log)
    await worker.store(100)
    await saved(redis_server.url, worker)


async def test_a_full_redis_is_survived_and_caught_up_with(redis_server, start_kvstore, connect, client, caplog):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    await saved(redis_server.url, worker)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    await worker.store(2)
    await eventually(lambda: errors_in(caplog), "it is logged")
    await worker.store(3)
    await eventually(lambda: replica.held() == {1, 2, 3}, "routers hear everything")
    assert "is full" in errors_in(caplog)[0]
    client.config_set("maxmemory", 0)
    await saved(redis_server.url, worker)
    assert len(errors_in(caplog)) == 1


async def test_an_unresponsive_redis_delays_no_client(redis_server, start_kvstore, connect, client, caplog):
    kvstore = await start_kvstore(redis_url=redis_server.url, redis_timeout_ms=200)
    worker = await connect.worker(kvstore)
    await worker.join()
    client.execute_command("CLIENT", "PAUSE", 1500, "ALL")
    for number in range(20):
        async with asyncio.timeout(1.4):
            await worker.store(number)
    await eventually(lambda: errors_in(caplog), "it is logged")
    assert "did not answer in time" in errors_in(caplog)[0]
    await saved(redis_server.url, worker)


async def test_a_hung_redis_delays_no_client_and_is_written_when_it_continues(
    redis_server, start_kvstore, connect, caplog
):
    kvstore = await start_kvstore(redis_url=redis_server.url, redis_timeout_ms=200)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore)
    await worker.join()
    await worker.store(1)
    await saved(redis_server.url, worker)
    redis_server.process.send_signal(signal.SIGSTOP)
    try:
        for number in range(2, 20):
            async with asyncio.timeout(5):
                await worker.store(number)
        await eventually(lambda: replica.held() == worker.blocks, "routers hear everything")
        await eventually(lambda: errors_in(caplog), "it is logged")
        assert "did not answer in time" in errors_in(caplog)[0]
    finally:
        redis_server.process.send_signal(signal.SIGCONT)
    await saved(redis_server.url, worker)


async def test_a_redis_that_became_a_replica_is_survived_and_written_when_it_is_master_again(
    redis_server, start_kvstore, connect, client, caplog
):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    await saved(redis_server.url, worker)
    client.execute_command("REPLICAOF", "127.0.0.1", ports.free_ports(1)[0])  # nobody is there
    await worker.store(2)
    await eventually(lambda: "is a read-only replica" in caplog.text, "it is logged")
    await eventually(lambda: replica.held() == {1, 2}, "routers hear everything")
    client.execute_command("REPLICAOF", "NO", "ONE")
    await saved(redis_server.url, worker)


async def test_a_failover_that_lost_the_last_writes_is_noticed_without_any_worker_doing_anything(
    redis_server, start_kvstore, connect, client
):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    await worker.store(2)
    await saved(redis_server.url, worker)
    client.save()  # what the new master has
    await worker.store(3)
    await saved(redis_server.url, worker)
    redis_server.process.kill()
    redis_server.process.wait(5)
    redis_server.start()
    assert (await what_redis_has(redis_server.url))["w1"][1] == 1
    await saved(redis_server.url, worker, 20)


async def test_the_stored_state_is_small(redis_server, start_kvstore, connect, client):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    worker = await connect.worker(kvstore, blocks=set(range(100_000)))
    await worker.join()
    await saved(redis_server.url, worker)
    used = sum(client.memory_usage(key, samples=0) for key in client.keys("baton:*"))
    assert used / 100_000 < 24


async def test_a_long_log_is_compacted_and_old_generations_are_deleted(redis_server, start_kvstore, connect, client):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    worker = await connect.worker(kvstore)
    await worker.join()
    await saved(redis_server.url, worker)
    (first,) = client.keys("baton:*:snapshot")
    for _ in range(4):
        await worker.store(*range(40_000))
        await worker.remove(*range(39_990))
        await saved(redis_server.url, worker)
    # A new generation is written whole before the one before it goes.
    await eventually(lambda: len(client.keys("baton:*:snapshot")) == 1, "one generation")
    assert client.keys("baton:*:snapshot") != [first]
    assert client.scard("baton:{baton}:workers") == 1
    assert len(client.keys("baton:*")) <= 6


async def test_a_new_epoch_leaves_nothing_of_the_old_one(redis_server, start_kvstore, connect, client):
    kvstore = await start_kvstore(redis_url=redis_server.url)
    worker = await connect.worker(kvstore, blocks={1, 2}, worker_id="host:1/odd {name}")
    await worker.join()
    await worker.store(3)
    await saved(redis_server.url, worker)
    worker.epoch, worker.sequence, worker.blocks = 8, 0, set()
    await worker.snapshot()
    await worker.store(4)
    await saved(redis_server.url, worker)
    assert client.keys("*:7:*") == []


async def test_two_namespaces_share_one_redis(redis_server, start_kvstore, connect):
    for namespace in ("one", "two"):
        kvstore = await start_kvstore(redis_url=redis_server.url, redis_namespace=namespace)
        worker = await connect.worker(kvstore, worker_id=namespace)
        await worker.join()
        await kvstore.end()
    assert list(await what_redis_has(redis_server.url, "one")) == ["one"]


async def test_pending_writes_are_bounded(redis_server):
    index, publishers = Index(), Publishers()
    publishers.claim("w1", Publisher(1))
    store = RedisStore(redis_server.url, "baton", 1.0)
    counters = KvstoreCounters(CollectorRegistry())
    writer = WriteBehind(index, publishers, store, 10_000, counters, lambda _: None)
    index.restore(WorkerBlocks("w1", 7, 0))
    for sequence in range(1, 200):
        events = [stored(*range(sequence * 10, sequence * 10 + 10))]
        index.apply(kv_pb2.KvEventBatch(worker_id="w1", epoch=7, sequence=sequence, events=events))
        assert writer.backlog_bytes <= 10_000
    running = asyncio.create_task(writer.run())
    await eventually(lambda: writer.is_settled, "all written")
    writer.stop()
    await running
    await writer.flush(20)  # as at a service's end: the last call may have failed
    await store.close()
    found = await what_redis_has(redis_server.url)
    assert found["w1"][1] == 199
    assert len(found["w1"][2]) == 1990


async def test_the_embedded_server_leaves_nothing_behind():
    program = embedded_redis.find_server()
    assert program is not None
    async with embedded_redis.embedded_redis(program, "") as url:
        assert await what_redis_has(url) == {}
        (child,) = [one for one in psutil.Process().children() if "redis" in one.name()]
        folder = Path(url.removeprefix("unix://")).parent
    assert not child.is_running()
    assert not folder.exists()


async def test_the_embedded_server_is_started_again_when_it_dies(start_kvstore, connect):
    kvstore = await start_kvstore(redis_url="", store="embedded")
    worker = await connect.worker(kvstore)
    await worker.join()

    def servers():
        return [one for one in psutil.Process().children() if "redis" in one.name() and one.status() != "zombie"]

    (first,) = servers()
    first.kill()
    await eventually(lambda: servers() and servers() != [first], "a new one")
    assert (await worker.store(1)).acknowledged_sequence == 1


async def test_with_a_data_dir_the_embedded_server_survives_a_restart(start_kvstore, connect, tmp_path):
    kvstore = await start_kvstore(redis_url="", store="embedded", data_dir=str(tmp_path))
    worker = await connect.worker(kvstore, blocks={1, 2})
    await worker.join()
    await kvstore.end()
    again = await start_kvstore(redis_url="", store="embedded", data_dir=str(tmp_path))
    back = await connect.worker(again, blocks={1, 2})
    assert not await back.join()
    assert (await connect.replica(again)).held() == {1, 2}
