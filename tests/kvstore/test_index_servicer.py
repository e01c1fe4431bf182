"""Publish to Watch over real gRPC."""

import asyncio

import grpc
import pytest
from support.fleet.kvstore_node import FakeWorker, eventually, stored

from baton.v1 import index_pb2, index_pb2_grpc, kv_pb2


async def test_a_new_worker_is_asked_for_a_snapshot_and_then_acknowledged(start_kvstore, connect):
    worker = await connect.worker(await start_kvstore())
    assert (await worker.hello()).snapshot_wanted
    response = await worker.snapshot()
    assert not response.snapshot_wanted
    assert (await worker.store(1, 2)).acknowledged_sequence == 1
    assert (await worker.remove(1)).acknowledged_sequence == 2


async def test_a_router_that_connected_earlier_gets_the_snapshot_and_every_delta(start_kvstore, connect):
    kvstore = await start_kvstore()
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1, 2}, sequence=4)
    await worker.join()
    await worker.store(3)
    await worker.remove(1)
    await eventually(lambda: replica.held() == {2, 3}, "both deltas")
    assert replica.workers["w1"][:2] == (7, 6)


async def test_a_router_that_comes_later_gets_a_snapshot_of_each_worker(start_kvstore, connect):
    kvstore = await start_kvstore()
    for name in ("w1", "w2"):
        worker = await connect.worker(kvstore, worker_id=name, blocks={ord(name[1])})
        await worker.join()
    await worker.store(100)
    replica = await connect.replica(kvstore)
    assert replica.held("w1") == {ord("1")}
    assert replica.held("w2") == {ord("2"), 100}
    assert replica.kinds[:3] == ["heard", "snapshot", "heard"]
    assert replica.kinds.count("snapshot") == 2


async def test_a_snapshot_of_many_parts_and_the_deltas_after_it_fit_exactly(start_kvstore, connect):
    kvstore = await start_kvstore()
    worker = await connect.worker(kvstore, blocks=set(range(30_000)))
    await worker.join()

    async def keep_storing():
        for number in range(30_000, 30_200):
            await worker.store(number)

    storing = asyncio.create_task(keep_storing())
    replicas = [await connect.replica(kvstore) for _ in range(3)]
    await storing
    for replica in replicas:
        await eventually(lambda replica=replica: replica.held() == worker.blocks, "the same blocks")


async def test_a_gap_makes_routers_drop_the_worker_until_its_snapshot(start_kvstore, connect):
    kvstore = await start_kvstore()
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    await eventually(lambda: replica.held() == {1}, "the first snapshot")
    worker.sequence += 1
    assert (await worker.batch(stored(5))).snapshot_wanted
    await eventually(lambda: replica.held() is None, "the worker is dropped")
    worker.blocks |= {5}
    await worker.snapshot()
    await eventually(lambda: replica.held() == {1, 5}, "the second snapshot")


async def test_batches_sent_before_the_snapshot_request_was_read_are_not_answered_again(start_kvstore, connect):
    worker = await connect.worker(await start_kvstore(), sequence=5)
    assert (await worker.hello()).snapshot_wanted
    for number in range(3):
        worker.sequence += 1
        worker.blocks.add(number)
        await worker.send(batch=stored_batch(worker, number))
    response = await worker.snapshot()
    assert response.acknowledged_sequence == 8
    assert not response.snapshot_wanted


def stored_batch(worker, number, sequence=None):
    return kv_pb2.KvEventBatch(
        worker_id=worker.worker_id, epoch=worker.epoch, sequence=sequence or worker.sequence, events=[stored(number)]
    )


async def test_a_new_epoch_replaces_the_old_one_for_every_router(start_kvstore, connect):
    kvstore = await start_kvstore()
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1, 2})
    await worker.join()
    worker.epoch, worker.sequence, worker.blocks = 8, 0, set()
    await worker.snapshot()
    await eventually(lambda: replica.workers.get("w1") == (8, 0, set()), "the empty snapshot")
    assert (await worker.store(3)).acknowledged_sequence == 1
    await eventually(lambda: replica.held() == {3}, "the delta")


async def test_a_worker_that_returns_in_time_loses_nothing(start_kvstore, connect):
    kvstore = await start_kvstore(lease_ms=3000)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    await worker.store(2)
    await worker.close()
    again = await connect.worker(kvstore, blocks=worker.blocks, sequence=worker.sequence)
    assert not await again.join()
    await eventually(lambda: replica.held() == {1, 2}, "both")
    assert "forgotten" not in replica.kinds
    assert "silent" not in replica.kinds


async def test_a_worker_resends_unacknowledged_batches(start_kvstore, connect):
    kvstore = await start_kvstore()
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    await worker.store(2)
    await worker.close()
    lost = [stored_batch(worker, number, sequence) for sequence, number in ((1, 2), (2, 3), (3, 4))]
    again = await connect.worker(kvstore, sequence=3, kept=lost)
    response = await again.hello()
    assert (response.acknowledged_sequence, response.snapshot_wanted) == (1, False)
    for batch in lost:  # the first one was applied before
        response = await again.send_batch(batch)
    assert response.acknowledged_sequence == 3
    await eventually(lambda: replica.held() == {1, 2, 3, 4}, "all")
    assert replica.kinds.count("snapshot") == 1


async def test_a_worker_that_stays_away_counts_no_more_when_its_lease_ends_and_is_forgotten_later(
    start_kvstore, connect
):
    kvstore = await start_kvstore(lease_ms=300, retention_ms=1000)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    await eventually(lambda: replica.held() == {1}, "the snapshot")
    await worker.close()
    await eventually(lambda: replica.held() is None, "silent")
    assert "w1" in replica.workers
    await eventually(lambda: "w1" not in replica.workers, "forgotten", 5)


async def test_a_worker_that_was_silent_counts_again_as_soon_as_nothing_is_missing(start_kvstore, connect):
    kvstore = await start_kvstore(lease_ms=300)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    await eventually(lambda: "w1" in replica.silent, "silent")
    await worker.heartbeat()
    await eventually(lambda: replica.held() == {1}, "its stream goes on")
    await worker.close()
    await eventually(lambda: "w1" in replica.silent, "silent again")
    missing = stored_batch(worker, 2, 1)
    again = await connect.worker(kvstore, sequence=1, kept=[missing])
    assert not (await again.hello()).snapshot_wanted
    assert replica.held() is None, "a batch is still to come"
    await again.send_batch(missing)
    await eventually(lambda: replica.held() == {1, 2}, "it is there")
    assert replica.kinds.count("snapshot") == 1


async def test_a_worker_that_was_forgotten_while_it_hung_is_asked_for_a_snapshot(start_kvstore, connect):
    kvstore = await start_kvstore(lease_ms=200, retention_ms=200)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1}, term=5)
    await worker.join()
    await eventually(lambda: "forgotten" in replica.kinds, "forgotten")
    assert (await worker.heartbeat()).snapshot_wanted
    assert not (await worker.heartbeat()).snapshot_wanted, "it is asked once"
    await worker.snapshot()
    await eventually(lambda: replica.held() == {1}, "back")


async def test_a_heartbeat_is_answered_where_it_asks(start_kvstore, connect):
    worker = await connect.worker(await start_kvstore(), sequence=3)
    await worker.join()
    await worker.send(heartbeat=index_pb2.PublishHeartbeat())
    await worker.send(heartbeat=index_pb2.PublishHeartbeat())
    worker.sequence += 1
    await worker.send(batch=stored_batch(worker, 7))
    assert (await worker.heartbeat()).acknowledged_sequence == 4


async def test_a_heartbeat_shows_that_the_last_batch_was_lost(start_kvstore, connect):
    worker = await connect.worker(await start_kvstore(), blocks={1}, sequence=3)
    await worker.join()
    told = index_pb2.PublishHeartbeat(wants_answer=True, epoch=worker.epoch, sequence=3)
    assert not (await worker.ask(heartbeat=told)).snapshot_wanted
    worker.blocks.add(2)
    worker.sequence = told.sequence = 4
    assert (await worker.ask(heartbeat=told)).snapshot_wanted
    assert (await worker.snapshot()).acknowledged_sequence == 4
    told.epoch += 1
    assert (await worker.ask(heartbeat=told)).snapshot_wanted, "the snapshot of a new epoch was lost"


async def test_heartbeats_keep_a_worker(start_kvstore, connect):
    kvstore = await start_kvstore(lease_ms=1000)
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    beating = asyncio.create_task(worker.keep_beating())
    await asyncio.sleep(2.5)
    beating.cancel()
    assert replica.held() == {1}
    assert "silent" not in replica.kinds


async def test_the_newest_stream_of_a_worker_wins(start_kvstore, connect):
    kvstore = await start_kvstore()
    old = await connect.worker(kvstore, term=1)
    await old.join()
    new = await connect.worker(kvstore, epoch=8, blocks={4}, term=2)
    await new.join()
    with pytest.raises((AssertionError, grpc.aio.AioRpcError), match=r"another stream publishes worker 'w1'"):
        await old.heartbeat()
    late = await connect.worker(kvstore, term=1)
    with pytest.raises((AssertionError, grpc.aio.AioRpcError), match=r"another stream publishes worker 'w1'"):
        await late.hello()
    assert (await new.store(5)).acknowledged_sequence == 1


async def test_a_returning_reader_gets_only_missing_messages(start_kvstore, connect):
    kvstore = await start_kvstore()
    replica = await connect.replica(kvstore)
    workers = [await connect.worker(kvstore, worker_id=name, blocks={1}) for name in ("w1", "w2", "w3")]
    for worker in workers:
        await worker.join()
    await eventually(lambda: all(replica.held(one.worker_id) == {1} for one in workers), "all")
    replica.task.cancel()
    await workers[0].store(2)
    workers[1].epoch, workers[1].sequence = 8, 0
    await workers[1].snapshot()
    replica.kinds.clear()
    replica.workers["stranger"] = (4, 4, set())
    await connect.replica(kvstore, replica)
    assert [replica.held(one.worker_id) for one in workers] == [{1, 2}, {1}, {1}]
    assert replica.workers["w2"][0] == 8
    assert sorted(replica.kinds) == ["batches", "heard", "heard", "heard", "heartbeat", "silent", "snapshot"]
    assert replica.silent == {"stranger"}, "nobody vouches for it"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({}, "one of its fields must be set"),
        ({"heartbeat": index_pb2.PublishHeartbeat()}, "it must be the hello"),
        ({"hello": index_pb2.PublishHello(epoch=1)}, "hello.worker_id is empty"),
    ],
)
async def test_malformed_first_messages_are_refused_by_name(start_kvstore, connect, message, complaint):
    worker = await connect.worker(await start_kvstore())
    await worker.send(**message)
    with pytest.raises((AssertionError, grpc.aio.AioRpcError), match=complaint):
        await worker.hear()


async def test_a_worker_cannot_speak_for_another(start_kvstore, connect):
    kvstore = await start_kvstore()
    worker = await connect.worker(kvstore)
    await worker.join()
    worker.worker_id = "w2"
    with pytest.raises((AssertionError, grpc.aio.AioRpcError), match=r"on the stream of worker 'w1'"):
        await worker.ask(batch=stored_batch(worker, 1))


async def test_malformed_hashes_end_the_stream_and_drop_the_worker(start_kvstore, connect):
    kvstore = await start_kvstore()
    replica = await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1})
    await worker.join()
    await eventually(lambda: replica.held() == {1}, "the snapshot")
    batch = stored_batch(worker, 2, sequence=1)
    batch.events[0].stored.block_hashes = b"short"
    with pytest.raises((AssertionError, grpc.aio.AioRpcError), match="it must be 16 a block"):
        await worker.ask(batch=batch)
    await eventually(lambda: replica.held() is None, "dropped")


async def test_watchers_get_four_heartbeats_a_second(start_kvstore, connect):
    replica = await connect.replica(await start_kvstore())
    await eventually(lambda: replica.num_heartbeats >= 8, "eight heartbeats")


async def test_a_watcher_that_does_not_read_is_cut_and_others_are_not(start_kvstore, connect):
    kvstore = await start_kvstore(watcher_backlog=1 << 16)
    worker = await connect.worker(kvstore)
    await worker.join()
    reader = await connect.replica(kvstore)
    # A window that stays small: gRPC would read far ahead of a watcher that does not.
    options = (("grpc.http2.bdp_probe", 0),)
    async with grpc.aio.insecure_channel(kvstore.address, options=options) as channel:
        sleeper = index_pb2_grpc.IndexServiceStub(channel).Watch(index_pb2.WatchRequest())
        await sleeper.read()
        for start in range(0, 400_000, 4000):
            await worker.store(*range(start, start + 4000))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_to_the_end(sleeper)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "watch again to get a snapshot" in error.value.details()
    if reader.task.done():
        reader = await connect.replica(kvstore)
    await eventually(lambda: reader.held() == worker.blocks, "the reader has everything")


async def read_to_the_end(call):
    async with asyncio.timeout(10):
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_an_end_with_open_streams_is_quick(start_kvstore, connect):
    kvstore = await start_kvstore()
    worker: FakeWorker = await connect.worker(kvstore)
    await worker.join()
    await connect.replica(kvstore)
    async with asyncio.timeout(8):
        await kvstore.end()
