"""The way of KV events from the engine to an index: numbering, snapshots, reconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from support.processes import ports
from support.processes.stack import wait_until
from support.processes.worker_harness import running_worker, submit

from baton.rpc.server.server import Context, RpcServer, Service
from baton.v1 import control_pb2, index_pb2, index_pb2_grpc, kv_pb2
from baton.worker.core import Tier
from baton.worker.front.event_window import EventWindow
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.kv.event_log import EventLog
from baton.worker.link.frames import Kind


@dataclass
class FakeCache:
    epoch: int = 5
    events: list[StoredEvent | RemovedEvent] = field(default_factory=list)
    hashes: bytes = b""
    host_hashes: bytes = b""
    partly: dict[tuple[int, ...], bytes] = field(default_factory=dict)  # on the device, by the groups that hold it

    def take_events(self) -> list[StoredEvent | RemovedEvent]:
        events, self.events = self.events, []
        return events

    def cached_by_groups(self, tier: Tier) -> dict[tuple[int, ...], bytes]:
        return {(): self.hashes} | self.partly if tier is Tier.DEVICE else {(): self.host_hashes}


class Harness:
    """An event log over a fake cache and a clock that the test moves."""

    def __init__(self) -> None:
        self.cache = FakeCache()
        self.now = 0.0
        self.sent: list[tuple[int, index_pb2.PublishRequest]] = []
        self.log = EventLog(self.cache, "w1", self._send, lambda: self.now)

    def _send(self, kind: int, channel: int, payload: bytes) -> None:
        assert kind == Kind.PUBLISH
        self.sent.append((channel, index_pb2.PublishRequest.FromString(payload)))

    def take(self) -> list[index_pb2.PublishRequest]:
        taken, self.sent = [message for _, message in self.sent], []
        return taken

    def happen(self, *events: StoredEvent | RemovedEvent) -> None:
        """The cache changes, and the batch's time passes."""
        self.cache.events += events
        self.log.collect()
        self.now += 1
        self.log.collect()


@pytest.fixture
def harness() -> Harness:
    return Harness()


def block(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_a_stream_begins_with_a_hello_and_batches_count_from_one(harness: Harness) -> None:
    harness.log.open(1)
    harness.happen(StoredEvent(block(1)))
    harness.happen(RemovedEvent(block(1)))
    hello, first, second = harness.take()
    assert (hello.hello.worker_id, hello.hello.epoch, hello.hello.sequence) == ("w1", 5, 0)
    assert (first.batch.sequence, second.batch.sequence) == (1, 2)
    assert first.batch.events[0].stored.block_hashes == block(1)
    assert second.batch.events[0].removed.block_hashes == block(1)


def test_changes_close_together_share_a_batch_in_order(harness: Harness) -> None:
    harness.log.open(1)
    for number in range(3):
        harness.cache.events.append(StoredEvent(block(number)))
        harness.log.collect()
    assert harness.log.deadline == pytest.approx(0.02)
    harness.now = 0.03
    harness.log.collect()
    _, batch = harness.take()
    assert [event.stored.block_hashes for event in batch.batch.events] == [block(0), block(1), block(2)]
    assert harness.log.deadline is None


def test_removed_blocks_are_published_at_once_with_waiting_events(harness: Harness) -> None:
    harness.log.open(1)
    harness.cache.events.append(StoredEvent(block(1)))
    harness.log.collect()
    assert harness.log.deadline is not None
    harness.cache.events.append(RemovedEvent(block(2)))
    harness.log.collect()
    assert harness.log.deadline is None
    _, batch = harness.take()
    assert [event.WhichOneof("event") for event in batch.batch.events] == ["stored", "removed"]


def test_a_snapshot_is_ordered_between_earlier_and_later_batches(harness: Harness) -> None:
    harness.log.open(1)
    harness.happen(StoredEvent(block(1)))
    harness.cache.events.append(StoredEvent(block(2)))
    harness.cache.hashes = block(1) + block(2)
    harness.log.snapshot()
    harness.happen(StoredEvent(block(3)))
    _, first, second, snapshot, third = harness.take()
    assert (first.batch.sequence, second.batch.sequence, third.batch.sequence) == (1, 2, 3)
    assert (snapshot.snapshot.barrier, snapshot.snapshot.first, snapshot.snapshot.last) == (2, True, True)
    assert snapshot.snapshot.block_hashes == block(1) + block(2)


def test_a_large_snapshot_comes_in_parts_of_one_barrier(harness: Harness) -> None:
    harness.log.open(1)
    harness.cache.hashes = b"".join(map(block, range(10_000)))
    harness.log.snapshot()
    _, *parts = harness.take()
    assert [(part.snapshot.first, part.snapshot.last) for part in parts] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip
    assert b"".join(part.snapshot.block_hashes for part in parts) == harness.cache.hashes


def test_an_empty_cache_has_a_snapshot_too(harness: Harness) -> None:
    harness.log.open(1)
    harness.log.snapshot()
    _, snapshot = harness.take()
    assert (snapshot.snapshot.first, snapshot.snapshot.last, snapshot.snapshot.block_hashes) == (True, True, b"")


def test_undelivered_events_are_visible_in_the_next_hello(harness: Harness) -> None:
    harness.log.open(1)
    harness.happen(StoredEvent(block(1)))
    harness.log.close(1)
    harness.happen(StoredEvent(block(2)))
    harness.take()
    harness.log.open(2)
    (hello,) = harness.take()
    assert hello.hello.sequence > 1


def test_a_new_epoch_is_published_unasked_and_numbered_from_one(harness: Harness) -> None:
    harness.log.open(1)
    harness.happen(StoredEvent(block(1)))
    harness.take()
    harness.cache.epoch = 6
    harness.happen(StoredEvent(block(2)))
    snapshot, batch = harness.take()
    assert (snapshot.snapshot.epoch, snapshot.snapshot.barrier) == (6, 0)
    assert (batch.batch.epoch, batch.batch.sequence) == (6, 1)


class Index(index_pb2_grpc.IndexServiceServicer):
    """A store that keeps its messages, and requests a snapshot of every unknown worker."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.epoch = 0
        self.sequence = -1
        self.is_waiting = False  # for a snapshot
        self.num_snapshots = 0
        self.num_heartbeats = 0
        self.last_told = (0, 0)  # by a heartbeat: epoch and sequence
        self.is_hung = False
        self.gaps: list[str] = []

    async def Publish(  # noqa: N802
        self, requests: AsyncIterator[index_pb2.PublishRequest], context: Context
    ) -> AsyncIterator[index_pb2.PublishResponse]:
        async for request in requests:
            if self.is_hung:
                continue
            wanted = self._apply(request)
            yield index_pb2.PublishResponse(acknowledged_sequence=max(0, self.sequence), snapshot_wanted=wanted)

    def _apply(self, request: index_pb2.PublishRequest) -> bool:
        match request.WhichOneof("message"):
            case "hello":
                hello = request.hello
                can_follow = 0 < hello.first_kept <= self.sequence + 1 <= hello.sequence
                self.is_waiting = hello.epoch != self.epoch or not (hello.sequence == self.sequence or can_follow)
                return self.is_waiting
            case "snapshot":
                self.num_snapshots += 1
                part = request.snapshot
                if part.first:
                    self.hashes.clear()
                self.epoch, self.sequence, self.is_waiting = part.epoch, part.barrier, False
                self.hashes |= _split(part.block_hashes)
            case "batch" if not self.is_waiting:
                batch = request.batch
                if (batch.epoch, batch.sequence) != (self.epoch, self.sequence + 1):
                    self.gaps.append(f"{batch.epoch}/{batch.sequence} after {self.epoch}/{self.sequence}")
                self.sequence = batch.sequence
                for event in batch.events:
                    self.hashes |= _split(event.stored.block_hashes)
                    self.hashes -= _split(event.removed.block_hashes)
            case "heartbeat":
                self.num_heartbeats += 1
                self.last_told = (request.heartbeat.epoch, request.heartbeat.sequence)
        return False


def _split(hashes: bytes) -> set[bytes]:
    return {hashes[i : i + 16] for i in range(0, len(hashes), 16)}


@contextlib.asynccontextmanager
async def serving_index(address: str, index: Index) -> AsyncIterator[None]:
    register = index_pb2_grpc.add_IndexServiceServicer_to_server
    async with RpcServer(address, (Service("baton.v1.IndexService", index, register),), grace_seconds=0.0):
        yield


async def until(condition: object, what: str, seconds: float = 20.0) -> None:
    await asyncio.to_thread(wait_until, condition, what, seconds)


async def test_the_index_has_the_workers_blocks(free_port: int) -> None:
    index = Index()
    address = f"127.0.0.1:{ports.free_ports(1)[0]}"
    # 40 blocks: the load evicts, so that both kinds of events are on the way.
    async with (
        serving_index(address, index),
        running_worker(free_port, kvstore=address, num_blocks=40) as worker,
    ):
        await until(lambda: index.num_snapshots, "the first snapshot")
        stream = worker.stream()
        for i in range(20):
            await stream.generate(submit(0, [5 + i] * (16 * (1 + i % 7)), max_tokens=4))
        cached = (await worker.stats()).num_cached_blocks
        await until(lambda: len(index.hashes) == cached, f"{cached} blocks in the index")
        await until(lambda: index.last_told == (index.epoch, index.sequence), "a heartbeat has the last batch")
        assert index.gaps == []
        assert index.sequence > 0
        await until(lambda: index.num_heartbeats, "a heartbeat")


async def test_a_reset_empties_the_index_and_a_new_epoch_fills_it(free_port: int) -> None:
    index = Index()
    address = f"127.0.0.1:{ports.free_ports(1)[0]}"
    async with serving_index(address, index), running_worker(free_port, kvstore=address) as worker:
        await worker.stream().generate(submit(0, list(range(5, 105))))
        await until(lambda: len(index.hashes) == 6, "the prompt's blocks")
        epoch = (await worker.control.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())).epoch
        await until(lambda: index.epoch == epoch and not index.hashes, "an empty index")
        await worker.stream().generate(submit(0, list(range(5, 53))))
        await until(lambda: len(index.hashes) == 3, "the new epoch's blocks")
        assert index.gaps == []


async def test_a_worker_serves_without_an_index_and_publishes_when_it_returns(free_port: int) -> None:
    address = f"127.0.0.1:{ports.free_ports(1)[0]}"
    async with running_worker(free_port, kvstore=address) as worker:
        (slot,) = await worker.stream().generate(submit(0, list(range(5, 53))))
        assert len(slot.tokens) == 8
        for number in (3, 6):
            index = Index()
            async with serving_index(address, index):
                await until(lambda index=index, number=number: len(index.hashes) == number, "the blocks so far")
            await worker.stream().generate(submit(0, list(range(200, 248))))


async def test_another_replica_gets_only_missing_messages(free_port: int) -> None:
    index = Index()
    first, second = (f"127.0.0.1:{port}" for port in ports.free_ports(2))
    async with running_worker(free_port, kvstore=f"{first},{second}") as worker:
        async with serving_index(first, index):
            await until(lambda: index.num_snapshots == 1, "the snapshot")
            await worker.stream().generate(submit(0, list(range(5, 53))))
            await until(lambda: len(index.hashes) == 3, "the blocks")
        await worker.stream().generate(submit(0, list(range(200, 248))))
        # The second knows what the first did, and not what happened while neither was there.
        async with serving_index(second, index):
            await until(lambda: len(index.hashes) == 6, "what was not acknowledged")
        assert index.num_snapshots == 1
        assert index.gaps == []


async def test_a_replica_that_does_not_answer_is_left_for_another(free_port: int) -> None:
    silent, index = Index(), Index()
    silent.is_hung = True
    first, second = (f"127.0.0.1:{port}" for port in ports.free_ports(2))
    async with (
        serving_index(first, silent),
        serving_index(second, index),
        running_worker(free_port, kvstore=f"{first},{second}"),
    ):
        await until(lambda: index.num_heartbeats, "the one that answers is found", 15)


def test_the_window_keeps_unacknowledged_batches_and_a_few_more() -> None:
    window = EventWindow(max_bytes=1000)
    for sequence in range(1, 8):
        window.add(5, sequence, bytes([sequence]) * 100)
    assert window.first_kept == 1
    assert [one[0] for one in window.since(4)] == [5, 6, 7]
    window.acknowledge(5)
    assert window.first_kept == 1, "another replica may be a little behind"
    for sequence in range(8, 15):
        window.add(5, sequence, bytes([sequence]) * 100)
    assert window.first_kept == 5, "its size is bounded"
    assert window.since(14) == []
    window.add(6, 1, b"new epoch")
    assert window.first_kept == 1
    assert window.since(0) == [b"new epoch"]
    window.begin(7)
    assert window.first_kept == 0


def test_the_window_drops_batches_acknowledged_long_ago() -> None:
    window = EventWindow()
    for sequence in range(1, 11):
        window.add(5, sequence, bytes(100 << 10))
    window.acknowledge(9)
    assert window.first_kept == 8
    window.acknowledge(3)
    assert window.first_kept == 8


def test_events_and_snapshots_name_the_tier(harness: Harness) -> None:
    harness.log.open(1)
    harness.happen(StoredEvent(block(1), Tier.HOST), RemovedEvent(block(1)))
    harness.cache.hashes, harness.cache.host_hashes = block(2), block(1)
    harness.log.snapshot()
    _, batch, device, host = harness.take()
    assert [event.WhichOneof("event") for event in batch.batch.events] == ["stored", "removed"]
    assert batch.batch.events[0].stored.tier == kv_pb2.KV_TIER_HOST
    assert batch.batch.events[1].removed.tier == kv_pb2.KV_TIER_DEVICE
    assert (device.snapshot.tier, device.snapshot.block_hashes) == (kv_pb2.KV_TIER_DEVICE, block(2))
    assert (host.snapshot.tier, host.snapshot.block_hashes) == (kv_pb2.KV_TIER_HOST, block(1))
    assert [(part.snapshot.first, part.snapshot.last) for part in (device, host)] == [(True, False), (False, True)]


def test_events_and_snapshots_name_the_groups_that_hold_a_block(harness: Harness) -> None:
    harness.log.open(1)
    harness.happen(StoredEvent(block(1)), StoredEvent(block(2), groups=(1,)))
    harness.cache.hashes, harness.cache.partly = block(1), {(0, 2): block(3)}
    harness.log.snapshot()
    _, batch, whole, partly = harness.take()
    assert [list(event.stored.groups) for event in batch.batch.events] == [[], [1]]
    assert (list(whole.snapshot.groups), whole.snapshot.block_hashes) == ([], block(1))
    assert (list(partly.snapshot.groups), partly.snapshot.block_hashes) == ([0, 2], block(3))


def test_a_block_evicted_from_a_group_is_published_at_once(harness: Harness) -> None:
    harness.log.open(1)
    harness.take()
    harness.cache.events.append(StoredEvent(block(1), groups=(0,)))
    harness.log.collect()
    assert [message.WhichOneof("message") for message in harness.take()] == ["batch"]


def test_a_cache_that_is_all_in_host_memory_has_a_snapshot_of_one_part(harness: Harness) -> None:
    harness.log.open(1)
    harness.cache.host_hashes = block(1)
    harness.log.snapshot()
    _, host = harness.take()
    assert (host.snapshot.first, host.snapshot.last, host.snapshot.tier) == (True, True, kv_pb2.KV_TIER_HOST)
