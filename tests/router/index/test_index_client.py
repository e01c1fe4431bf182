"""The router's end of the Watch stream, with a scripted kvstore."""

import asyncio

import grpc
import pytest
from support.fleet.kvstore_node import blocks, eventually, stored

from baton.router.index import client as index_client
from baton.router.index.client import IndexClient
from baton.router.index.prefix_index import PrefixIndex
from baton.rpc.channel import SERVER_OPTIONS
from baton.v1 import index_pb2, index_pb2_grpc, kv_pb2


class ScriptedKvstore(index_pb2_grpc.IndexServiceServicer):
    """Sends the messages of its queue to the watcher. None ends the stream."""

    def __init__(self):
        self.num_watches = 0
        self.queue = asyncio.Queue()

    async def Watch(self, request, context):  # noqa: N802
        self.num_watches += 1
        self.known = {one.worker_id: (one.epoch, one.sequence) for one in request.known}
        self.queue = asyncio.Queue()
        while (message := await self.queue.get()) is not None:
            yield message

    def snapshot(self, worker_id, *numbers, epoch=1, barrier=0, first=True, last=True):
        self.queue.put_nowait(
            index_pb2.WatchResponse(
                snapshot=kv_pb2.KvSnapshot(
                    worker_id=worker_id, epoch=epoch, barrier=barrier, tier=kv_pb2.KV_TIER_DEVICE,
                    block_hashes=blocks(*numbers), first=first, last=last,
                )
            )
        )  # fmt: skip

    def batch(self, worker_id, sequence, *numbers, epoch=1):
        events = [stored(*numbers)]
        batch = kv_pb2.KvEventBatch(worker_id=worker_id, epoch=epoch, sequence=sequence, events=events)
        self.queue.put_nowait(index_pb2.WatchResponse(batches=[batch]))

    def heartbeat(self, num_messages=0):
        heartbeat = index_pb2.WatchHeartbeat(num_messages=num_messages)
        self.queue.put_nowait(index_pb2.WatchResponse(heartbeat=heartbeat))

    def heard(self, worker_id, epoch=1):
        self.queue.put_nowait(
            index_pb2.WatchResponse(heard=index_pb2.WorkerHeard(worker_id=worker_id, epoch=epoch, term=1))
        )

    def silent(self, worker_id, epoch=1):
        self.queue.put_nowait(index_pb2.WatchResponse(silent=index_pb2.WorkerSilent(worker_id=worker_id, epoch=epoch)))

    def end(self):
        self.queue.put_nowait(None)

    async def until_watched(self, times):
        await eventually(lambda: self.num_watches == times, f"watched {times} times")


@pytest.fixture
async def start_kvstore():
    servers = []

    async def start():
        servicer = ScriptedKvstore()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        index_pb2_grpc.add_IndexServiceServicer_to_server(servicer, server)
        servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
        return servicer

    yield start
    for server in servers:
        await server.stop(None)


@pytest.fixture
async def kvstore(start_kvstore):
    return await start_kvstore()


@pytest.fixture
async def run_client():
    tasks = []

    def run(*addresses, **fields):
        client = IndexClient(PrefixIndex(), addresses, **fields)
        client.index = client._index
        tasks.append(asyncio.create_task(client.run()))
        return client

    yield run
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def client(kvstore, run_client, monkeypatch):
    # What the kvstore says is said to one stream: none is given up because nothing was said on it yet.
    monkeypatch.setattr(index_client, "_CONNECT_SECONDS", 60.0)
    client = run_client(kvstore.address, retention_seconds=0.2)
    await kvstore.until_watched(1)
    return client


async def test_a_gap_drops_the_worker_and_restarts_the_watch(kvstore, client):
    kvstore.snapshot("a", 1)
    kvstore.snapshot("b", 1)
    kvstore.batch("a", 2, 5)
    await kvstore.until_watched(2)
    assert client.index.lookup(blocks(1)) == {"b": 1}
    assert client.num_resyncs == 1
    assert client.num_stale_blocks == 1
    kvstore.snapshot("a", 1, 5, barrier=2)
    await eventually(lambda: client.index.lookup(blocks(1, 5)) == {"a": 2, "b": 1}, "back")


async def test_a_heartbeat_shows_that_a_message_was_lost(kvstore, client):
    kvstore.heard("a")
    kvstore.snapshot("a", 1)
    kvstore.heartbeat(num_messages=2)
    await eventually(lambda: client.index.lookup(blocks(1)) == {"a": 1}, "known")
    kvstore.heartbeat(num_messages=3)
    kvstore.heartbeat(num_messages=6)
    await kvstore.until_watched(2)
    assert client.num_resyncs == 1
    assert client.index.lookup(blocks(1)) == {"a": 1}


async def test_an_incomplete_snapshot_keeps_the_earlier_state(kvstore, client):
    kvstore.snapshot("a", 1)
    kvstore.snapshot("a", 2, barrier=7, last=False)
    kvstore.end()
    await kvstore.until_watched(2)
    assert client.index.lookup(blocks(1)) == {"a": 1}
    kvstore.snapshot("a", 3, barrier=9)
    await eventually(lambda: client.index.lookup(blocks(3)) == {"a": 1}, "the whole one")
    assert client.index.lookup(blocks(2)) == {}


async def test_a_worker_that_a_new_stream_does_not_name_counts_no_more_and_is_dropped_later(kvstore, client):
    kvstore.snapshot("a", 1)
    kvstore.snapshot("b", 1)
    kvstore.heartbeat()
    await eventually(lambda: len(client.index.lookup(blocks(1))) == 2, "both")
    kvstore.end()
    await kvstore.until_watched(2)
    assert client.index.lookup(blocks(1)) == {"a": 1, "b": 1}
    kvstore.heard("a")
    kvstore.heartbeat()
    await eventually(lambda: client.index.lookup(blocks(1)) == {"a": 1}, "b does not count")
    assert client.index.epoch("b") == 1
    await asyncio.sleep(0.25)
    kvstore.heartbeat()
    await eventually(lambda: client.index.epoch("b") is None, "b is dropped")
    assert client.index.num_blocks("a") == 1


async def test_a_new_stream_begins_with_the_current_state_and_continues(kvstore, client):
    kvstore.snapshot("a", 1, barrier=4)
    kvstore.batch("a", 5, 2)
    await eventually(lambda: client.index.position("a") == (1, 5), "the batch")
    kvstore.end()
    await kvstore.until_watched(2)
    assert kvstore.known == {"a": (1, 5)}
    kvstore.heard("a")
    kvstore.batch("a", 5, 2)  # known already
    kvstore.batch("a", 6, 3)
    await eventually(lambda: client.index.lookup(blocks(1, 2, 3)) == {"a": 3}, "the rest")
    assert client.num_resyncs == 0


async def test_a_silent_workers_entries_count_again_after_a_message(kvstore, client):
    kvstore.silent("a")
    kvstore.snapshot("a", 1)
    await eventually(lambda: client.index.epoch("a") == 1, "its entries come")
    assert client.index.lookup(blocks(1)) == {}
    kvstore.heard("a")
    await eventually(lambda: client.index.lookup(blocks(1)) == {"a": 1}, "they count")


async def test_another_replica_is_followed_when_one_ends_or_hangs(start_kvstore, run_client):
    replicas = [await start_kvstore() for _ in range(2)]
    client = run_client(*(one.address for one in replicas))
    await eventually(lambda: sum(one.num_watches for one in replicas) == 1, "one is watched")
    first, second = sorted(replicas, key=lambda one: -one.num_watches)
    first.snapshot("a", 1, barrier=3)
    first.heartbeat()
    await eventually(lambda: client.index.lookup(blocks(1)), "known")
    first.end()
    await second.until_watched(1)
    assert second.known == {"a": (1, 3)}
    second.heard("a")
    second.batch("a", 4, 2)
    await eventually(lambda: client.index.lookup(blocks(1, 2)) == {"a": 2}, "its delta")
    # The second says nothing more.
    await first.until_watched(2)
    assert first.known == {"a": (1, 4)}


async def test_batches_for_a_worker_dropped_by_its_own_word_are_no_gap(kvstore, client):
    kvstore.snapshot("a", 1)
    await eventually(lambda: client.index.lookup(blocks(1)), "known")
    client.index.drop("a")
    kvstore.batch("a", 1, 2)
    kvstore.snapshot("a", 9, epoch=2)
    await eventually(lambda: client.index.lookup(blocks(9)), "the new epoch")
    assert kvstore.num_watches == 1


async def test_batches_of_an_unreported_worker_are_a_gap(kvstore, client):
    kvstore.batch("stranger", 1, 2)
    await kvstore.until_watched(2)


async def test_a_silent_kvstore_is_watched_again(kvstore, client):
    kvstore.snapshot("a", 1)
    began = asyncio.get_running_loop().time()
    await kvstore.until_watched(2)
    assert asyncio.get_running_loop().time() - began > 3
    assert client.index.lookup(blocks(1)) == {"a": 1}


async def test_a_large_drop_is_cleaned_while_others_run(kvstore, client):
    for start in range(0, 100_000, 4000):
        numbers = range(start, start + 4000)
        kvstore.snapshot("a", *numbers, first=start == 0, last=start == 96_000)
    await eventually(lambda: client.index.num_blocks("a") == 100_000, "all parts")
    forgotten = index_pb2.WorkerForgotten(worker_id="a", epoch=1)
    kvstore.queue.put_nowait(index_pb2.WatchResponse(forgotten=forgotten))
    await eventually(lambda: client.index.num_blocks("a") == 0, "dropped")
    assert client.index.lookup(blocks(0)) == {}
    await eventually(lambda: len(client.index) == 0, "cleaned")
