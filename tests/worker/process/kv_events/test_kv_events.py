"""KV events over ZeroMQ, read by pyzmq and msgspec as subscribers of vLLM read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from support.engine.engine_harness import BLOCK_SIZE, NAMESPACE, make_executor, make_request, make_rig, prompt_of
from support.processes.worker_harness import running_worker, submit

from baton.rpc.block_hash import hash_blocks
from baton.rpc.errors import InvalidRequest
from baton.worker.core import Tier
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.kv_events_settings import KvEventsSettings, parse_kv_events
from baton.worker.process.kv_events.messages import EventForm
from baton.worker.process.kv_events.published_cache import PublishedCache
from baton.worker.process.kv_events.publisher import ZmqPublisher

END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@contextmanager
def publisher_at(folder, **more) -> Iterator[tuple[ZmqPublisher, KvEventsSettings]]:
    settings = KvEventsSettings(
        endpoint=f"ipc://{folder}/events", replay_endpoint=f"ipc://{folder}/replay", topic="kv", **more
    )
    publisher = ZmqPublisher(settings)
    try:
        yield publisher, settings
    finally:
        publisher.close()


@contextmanager
def socket_to(kind: int, endpoint: str) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.rcvtimeo = 5000
        socket.linger = 0
        socket.connect(endpoint)
        yield socket


def replay(settings: KvEventsSettings, first: int) -> list[tuple[int, bytes]]:
    with socket_to(zmq.DEALER, settings.replay_endpoint) as one:
        one.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            _, sequence, payload = one.recv_multipart()
            if sequence == END:
                return found
            found.append((int.from_bytes(sequence, "big"), payload))


def test_a_subscriber_receives_topic_sequence_and_batch(tmp_path):
    with publisher_at(tmp_path) as (publisher, settings), socket_to(zmq.SUB, settings.endpoint) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        sent = 0
        while not subscriber.poll(20):  # until the subscription has arrived
            publisher.publish([float(sent), [], 0])
            sent += 1
        topic, sequence, payload = subscriber.recv_multipart()
        batch = msgspec.msgpack.decode(payload, type=EventBatch)
        assert topic == b"kv"
        assert int.from_bytes(sequence, "big") == batch.ts  # numbers begin at 0 and grow by 1


def test_kept_batches_are_replayed_from_a_number(tmp_path):
    with publisher_at(tmp_path, buffer_steps=5) as (publisher, settings):
        for number in range(8):
            publisher.publish([float(number), [], 0])
        while [number for number, _ in replay(settings, 0)] != [3, 4, 5, 6, 7]:
            pass
        assert [number for number, _ in replay(settings, 6)] == [6, 7]
        assert replay(settings, 8) == []


def test_too_many_waiting_batches_leave_a_gap_in_the_numbers(tmp_path):
    with publisher_at(tmp_path, max_queue_size=1) as (publisher, _):
        for number in range(2000):
            publisher.publish([float(number), [], 0])
        publisher.close()
        kept = [sequence for sequence, _ in publisher._kept]
        assert publisher.num_dropped == 2000 - len(kept)
        assert all(msgspec.msgpack.decode(payload)[0] == sequence for sequence, payload in publisher._kept)


def run_engine(form: EventForm, num_host_blocks: int = 0) -> tuple[Any, list[list[Any]]]:
    """Runs requests with common prefixes in a small cache, and resets it. Returns the rig and the batches."""
    host = {"num_host_blocks": num_host_blocks} if num_host_blocks else {}
    rig = make_rig(make_executor(num_blocks=24, **host), block_origins=True)
    batches: list[list[Any]] = []
    cache = PublishedCache(rig.engine, form, batches.append)
    for number in range(12):
        if number == 8:
            rig.engine.reset_prefix_cache()
        shared = prompt_of(20, salt=number % 3)
        rig.submit(make_request([*shared, *prompt_of(10, salt=100 + number)], 10))
        while rig.engine.has_work():
            rig.step()
            cache.take_events()
    return rig, batches


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_events_name_the_tokens_of_each_block_and_what_is_cached(num_host_blocks):
    form = EventForm(KvEventsSettings(hash_format="bytes"), BLOCK_SIZE)
    rig, batches = run_engine(form, num_host_blocks)
    held: dict[str, set[bytes]] = {"GPU": set(), "CPU": set()}
    cleared = 0
    for batch in map(msgspec.msgpack.encode, batches):
        for event in msgspec.msgpack.decode(batch, type=EventBatch).events:
            match event:
                case AllBlocksCleared():
                    cleared += 1
                    held = {"GPU": set(), "CPU": set()}
                case BlockRemoved():
                    held[event.medium] -= set(event.block_hashes)
                case BlockStored():
                    held[event.medium] |= set(event.block_hashes)
                    if event.medium == "GPU":
                        parent = event.parent_block_hash or NAMESPACE
                        packed = hash_blocks(parent, event.token_ids, event.block_size)
                        assert packed == b"".join(event.block_hashes)
    assert cleared == 1
    for tier, medium in ((Tier.DEVICE, "GPU"), (Tier.HOST, "CPU")):
        packed = rig.engine.cached_hashes(tier)
        assert held[medium] == {packed[start : start + 16] for start in range(0, len(packed), 16)}


def test_integers_are_the_ends_of_hashes():
    changes = [StoredEvent(bytes(range(16))), RemovedEvent(bytes(range(16)), Tier.HOST)]
    stored, removed = EventForm(KvEventsSettings(), 4).events(changes, {})
    number = int.from_bytes(bytes(range(8, 16)), "big")
    assert stored["block_hashes"] == removed["block_hashes"] == [number]
    assert (stored["medium"], removed["medium"]) == ("GPU", "CPU")
    assert stored["token_ids"] == []


def test_the_array_form_is_that_of_older_subscribers():
    form = EventForm(KvEventsSettings(event_format="array"), 4)
    events = [form.cleared(), *form.events([RemovedEvent(bytes(16))], {})]
    assert form.batch(1.5, events) == [1.5, [["AllBlocksCleared"], ["BlockRemoved", [0], "GPU", 0]], 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no object"),
        ('{"endpont": "tcp://*:1"}', "unknown key 'endpont'; did you mean endpoint"),
        ('{"endpoint": "udp://*:1"}', "must begin with tcp://"),
        ('{"hwm": 0}', "hwm is 0; it must be at least 1"),
        ('{"hwm": true}', "hwm is True; it must be an integer"),
        ('{"publisher": "kafka"}', "give zmq or null"),
        ('{"enable_kv_cache_events": 1}', "must be true or false"),
    ],
)
def test_wrong_settings_are_refused_by_key(text, message):
    with pytest.raises(InvalidRequest, match=message):
        parse_kv_events(text)


def test_events_may_be_off():
    assert parse_kv_events("") is None
    assert not parse_kv_events('{"publisher": "null"}').enabled
    assert not parse_kv_events('{"enable_kv_cache_events": false}').enabled


def test_an_endpoint_in_use_is_named(tmp_path):
    settings = KvEventsSettings(endpoint=f"ipc://{tmp_path}/missing/events")
    with pytest.raises(InvalidRequest, match=r"endpoint 'ipc://.*missing/events' cannot be used"):
        ZmqPublisher(settings)


async def test_a_worker_publishes_what_it_caches(free_port, tmp_path):
    config = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    settings = KvEventsSettings(**config)
    async with running_worker(free_port, kv_events_config=json.dumps(config)) as worker:
        await worker.stream().generate(submit(0, list(range(1, 60)), max_tokens=2))
        found: list[tuple[int, bytes]] = []
        while not found:
            found = await asyncio.to_thread(replay, settings, 0)
    events = msgspec.msgpack.decode(found[0][1], type=EventBatch).events
    assert isinstance(events[0], BlockStored)
    assert events[0].token_ids == list(range(1, 1 + len(events[0].token_ids)))
