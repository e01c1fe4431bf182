"""The rdma path between two processes: every byte arrives, and no fault of the peer holds, spoils or leaks anything."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest
from support.processes.child import Child
from support.transfer import rdma_peer
from support.transfer.rdma_peer import LAYOUT, NUM_BLOCKS, SLOT_BYTES, Pool, RdmaReceiver, make_path, usage

from baton.rpc.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Mismatch,
    NoCapacity,
    ServiceError,
    Unavailable,
    Unsupported,
)
from baton.worker.core import BlockId
from baton.worker.transfer.base import Piece
from baton.worker.transfer.bulk import Slots
from baton.worker.transfer.conversion.blocks import conversion_to
from baton.worker.transfer.kinds.rdma import nixl as rdma_nixl
from baton.worker.transfer.kinds.rdma.descriptors import decode_region, encode_region
from baton.worker.transfer.kinds.rdma.host_staging import HostStaging
from baton.worker.transfer.kinds.rdma.receiver import QUARANTINE_SECONDS, ReceivingAgent
from baton.worker.transfer.wire.checksum import checksum_of

pytestmark = pytest.mark.skipif(not rdma_nixl.installed(), reason="NIXL is not installed (pip install '.[rdma]')")

WAIT_SECONDS = 20.0
BLOCKS_PER_SLOT = SLOT_BYTES // LAYOUT.layer_bytes(0)


def piece(block_ids, layer=0, num_layers=1):
    return Piece(layer, 0, len(block_ids), [BlockId(block) for block in block_ids], 0, num_layers)


FULL = piece(range(BLOCKS_PER_SLOT))


@pytest.fixture(scope="module")
def pool():
    return Pool(seed=1)


@pytest.fixture
def make_peer():
    peers = []

    def make(**settings):
        peers.append(Child(RdmaReceiver, **settings))
        return peers[-1]

    yield make
    for peer in peers:
        peer.kill()


@pytest.fixture(scope="module")
def steady_peer():
    """One that no test harms."""
    peer = Child(RdmaReceiver, max_peers=256)
    yield peer
    peer.kill()


@pytest.fixture(scope="module")
def _stoppable_peer():
    peer = Child(RdmaReceiver, max_peers=256)
    yield peer
    peer.kill()


@pytest.fixture
def stoppable_peer(_stoppable_peer):
    """One that runs again after the test."""
    yield _stoppable_peer
    resume(_stoppable_peer)


@pytest.fixture
def open_path(pool):
    paths = []

    def make(of=pool, **settings):
        paths.append(make_path(of, **settings))
        return paths[-1]

    yield make
    for path in paths:
        path.close()


@pytest.fixture
def path(open_path):
    return open_path()


@pytest.fixture
def connect(path):
    senders = []

    def make(peer, by=path):
        senders.append(by.connect(peer.call("accept", by.offer())))
        return senders[-1]

    yield make
    for sender in senders:
        sender.close()


def wait(pending):
    assert pending.wait(WAIT_SECONDS), "the copy did not end"


def put_at_once(path, slots):
    sender = path.connect(slots)
    try:
        wait(sender.put(FULL, 0, None))
    finally:
        sender.close()


def stop(peer):
    """Returns when the process has stopped."""
    peer.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED | os.WNOWAIT)


def resume(peer):
    peer.process.send_signal(signal.SIGCONT)


def check_piece(peer, pool, sent, slot, target):
    """What the peer has in the slot, and then in its blocks, is the piece."""
    num_bytes = len(target) * sent.num_layers * LAYOUT.layer_bytes(0)
    layers = [sent.layer, sent.layer + sent.num_layers]
    answer = peer.call("write", slot=slot, layers=layers, blocks=target, num_bytes=num_bytes)
    parts = [pool.kv_bytes[sent.layer : sent.layer + sent.num_layers, block] for block in sent.block_ids]
    assert answer == checksum_of(*(np.ascontiguousarray(part).data.cast("B") for part in parts))
    for layer in range(*layers):
        expected = zlib.crc32(pool.read_blocks(layer, sent.block_ids))
        assert peer.call("read", layer=layer, blocks=target) == expected


# Bytes.


@pytest.mark.parametrize(("layer", "num_layers"), [(0, 1), (2, 1), (1, 2), (0, 3)])
def test_a_piece_arrives_in_the_blocks_that_were_named(steady_peer, pool, connect, layer, num_layers):
    sender = connect(steady_peer)
    sent = piece([3, 9, 4, 20, 21], layer, num_layers)
    wait(sender.put(sent, 2, None))
    check_piece(steady_peer, pool, sent, 2, [50, 2, 7, 33, 8])


def test_slots_fill_at_the_same_time_and_again(steady_peer, pool, connect):
    sender = connect(steady_peer)
    random = np.random.default_rng(7)
    for _ in range(5):
        pieces = [piece(random.permutation(NUM_BLOCKS)[: random.integers(1, BLOCKS_PER_SLOT)]) for _ in range(4)]
        copies = [sender.put(sent, slot, None) for slot, sent in enumerate(pieces)]
        for slot, (sent, pending) in enumerate(zip(pieces, copies, strict=True)):
            wait(pending)
            check_piece(steady_peer, pool, sent, slot, list(range(len(sent.block_ids))))


def test_any_ticket_moves_every_copy_on(steady_peer, connect):
    sender = connect(steady_peer)
    copies = [sender.put(FULL, slot, None) for slot in range(4)]
    wait(copies[-1])
    deadline = time.monotonic() + WAIT_SECONDS
    while not all(pending.done() for pending in copies):
        assert time.monotonic() < deadline


def test_a_part_of_the_heads_goes_to_its_place(open_path, pool):
    """From one rank of one to the second of two, which holds heads 2 and 3."""
    halves = dataclasses.replace(LAYOUT, tp_size=2, tp_rank=1)
    conversion = conversion_to(LAYOUT, halves)
    # The receiver has whole blocks, and takes what is sent as its second half of the heads.
    received = Pool()
    receiving, sending = open_path(received), open_path()
    receiver = receiving.accept(sending.offer())
    sender = sending.connect(receiver.slots)
    sent = piece([5, 6], 1, 2)
    wait(sender.put(sent, 0, conversion))
    receiver.write(0, range(1, 3), [BlockId(8), BlockId(1)], (2, 2))
    heads = pool.kv_bytes.reshape(LAYOUT.num_layers, -1, 2, 4, 16 * 64 * 4)
    written = received.kv_bytes.reshape(heads.shape)
    assert np.array_equal(written[1:3, [8, 1], :, 2:], heads[1:3, [5, 6], :, 2:])
    assert not written[:, :, :, :2].any()
    sender.close()
    receiver.close(True)


# What does not fit.


@pytest.mark.parametrize("slot", [-1, 4, 1 << 40])
def test_slots_out_of_range_are_refused_by_both_ends(path, steady_peer, connect, slot):
    with pytest.raises(InvalidRequest, match="out of range"):
        connect(steady_peer).put(piece([1]), slot, None)
    receiver = path.accept(path.offer())
    with pytest.raises(InvalidRequest, match="out of range"):
        receiver.checksum(slot, 1)
    with pytest.raises(InvalidRequest, match="out of range"):
        receiver.write(slot, range(1), [BlockId(0)], None)
    receiver.close(True)


def test_pieces_larger_than_a_slot_are_refused_by_both_ends(path, steady_peer, pool, connect):
    sender = connect(steady_peer)
    with pytest.raises(InvalidRequest, match=f"the receiver's slots have {SLOT_BYTES}"):
        sender.put(piece(range(BLOCKS_PER_SLOT + 1)), 0, None)
    receiver = path.accept(path.offer())
    with pytest.raises(InvalidRequest, match=f"in a slot of {SLOT_BYTES}"):
        receiver.checksum(0, SLOT_BYTES + 1)
    with pytest.raises(InvalidRequest, match=f"in a slot of {SLOT_BYTES}"):
        receiver.write(0, range(1), [BlockId(block) for block in range(BLOCKS_PER_SLOT + 1)], None)
    receiver.close(True)
    wait(sender.put(FULL, 0, None))  # a piece that was refused harms no other
    check_piece(steady_peer, pool, FULL, 0, list(FULL.block_ids))


def test_a_slot_takes_one_piece_at_a_time(stoppable_peer, connect):
    sender = connect(stoppable_peer)
    stop(stoppable_peer)
    sender.put(FULL, 0, None)
    with pytest.raises(InvalidRequest, match="slot 0 is still being filled"):
        sender.put(FULL, 0, None)


# Metadata.


def slots_of(path):
    return path.accept(path.offer()).slots


def changed(slots, **values):
    region = decode_region(slots.blob, slots.num_slots * slots.slot_bytes)
    return dataclasses.replace(slots, blob=encode_region(dataclasses.replace(region, **values)))


def test_metadata_that_nixl_cannot_read_is_a_mismatch(path):
    slots = slots_of(path)
    metadata = decode_region(slots.blob, slots.num_slots * slots.slot_bytes).metadata
    for wrong in (b"x", bytes(500), metadata[:-1], metadata[: len(metadata) // 2], metadata[1:]):
        with pytest.raises(Mismatch, match="the NIXL metadata of"):
            path.connect(changed(slots, metadata=wrong))
    path.connect(slots).close()


def test_metadata_of_another_agent_is_a_mismatch(path):
    with pytest.raises(Mismatch, match="is of another agent"):
        path.connect(changed(slots_of(path), agent="somebody"))


def test_memory_that_is_not_registered_is_not_written(path):
    slots = slots_of(path)
    region = decode_region(slots.blob, slots.num_slots * slots.slot_bytes)
    elsewhere = dataclasses.replace(region.memory, address=region.memory.address + (1 << 40))
    with pytest.raises(Unavailable, match="cannot start a copy"):
        path.connect(changed(slots, memory=elsewhere))


@pytest.mark.parametrize("slots", [Slots(0, 1, b""), Slots(65, 1, b""), Slots(1, 0, b""), Slots(1, 2**31, b"")])
def test_numbers_of_slots_have_bounds(path, slots):
    with pytest.raises(Mismatch, match="the maximum is 64 of"):
        path.connect(slots)


def test_refused_connections_leave_no_resources(path):
    slots = slots_of(path)
    wrong = changed(slots, metadata=b"nothing")
    with pytest.raises(Mismatch):
        path.connect(wrong)
    before = usage()
    for _ in range(40):  # more than the peers that are allowed
        with pytest.raises(Mismatch):
            path.connect(wrong)
    assert usage()["descriptors"] == before["descriptors"]
    assert usage()["threads"] == before["threads"]


# Faults.


def test_a_peer_that_is_killed_amid_a_copy_fails_every_copy(make_peer, connect):
    peer = make_peer()
    sender = connect(peer)
    wait(sender.put(piece([1]), 0, None))
    stop(peer)
    copies = [sender.put(FULL, slot, None) for slot in range(4)]
    assert not copies[0].wait(0.05)
    peer.process.kill()
    for pending in copies:
        with pytest.raises(Unavailable):
            pending.wait(WAIT_SECONDS)
    with pytest.raises(Unavailable, match="has failed"):
        sender.put(piece([1]), 0, None)


def test_a_peer_that_was_restarted_is_another_one(make_peer, pool, path, connect):
    killed = make_peer()
    old_slots = killed.call("accept", path.offer())
    sender = path.connect(old_slots)
    wait(sender.put(FULL, 0, None))
    killed.kill()
    restarted = make_peer()
    again = connect(restarted)
    wait(again.put(FULL, 3, None))
    check_piece(restarted, pool, FULL, 3, list(FULL.block_ids))
    # The old one's slots lead nowhere, whether they are known or met for the first time.
    with pytest.raises(ServiceError):
        sender.put(FULL, 1, None).wait(WAIT_SECONDS)
    sender.close()
    with pytest.raises(ServiceError):
        put_at_once(path, old_slots)
    wait(again.put(FULL, 0, None))


def test_a_peer_that_stops_for_a_moment_gets_everything(stoppable_peer, pool, connect):
    sender = connect(stoppable_peer)
    stop(stoppable_peer)
    copies = [sender.put(FULL, slot, None) for slot in range(4)]
    assert not any(pending.wait(0.05) for pending in copies)
    resume(stoppable_peer)
    for slot, pending in enumerate(copies):
        wait(pending)
        check_piece(stoppable_peer, pool, FULL, slot, list(FULL.block_ids))


def test_connecting_to_a_stopped_peer_has_a_deadline(stoppable_peer, open_path):
    path = open_path(connect_seconds=0.2)
    slots = stoppable_peer.call("accept", path.offer())
    stop(stoppable_peer)
    with pytest.raises(Unavailable, match=r"cannot reach .* over rdma: nothing arrived in 0.2 s"):
        path.connect(slots)


def test_a_copy_to_a_stopped_peer_has_a_deadline(stoppable_peer, open_path, connect):
    sender = connect(stoppable_peer, open_path(copy_seconds=0.2))
    stop(stoppable_peer)
    pending = sender.put(FULL, 0, None)
    with pytest.raises(DeadlineExceeded, match=f"did not accept {SLOT_BYTES} bytes in 0.2 s"):
        pending.wait(WAIT_SECONDS)


def test_an_abort_ends_copies_that_the_peer_does_not_take(stoppable_peer, connect):
    sender = connect(stoppable_peer)
    stop(stoppable_peer)
    copies = [sender.put(FULL, slot, None) for slot in range(4)]
    aborting = threading.Timer(0.1, sender.abort)
    aborting.start()
    for pending in copies:
        with pytest.raises(Unavailable, match=r"aborted|has failed"):
            pending.wait(WAIT_SECONDS)
    aborting.join()
    sender.abort()
    sender.close()
    sender.close()


def test_late_writes_of_an_aborted_sender_reach_no_other_senders_slots(stoppable_peer, pool, path):
    slots = stoppable_peer.call("accept", path.offer())
    sender = path.connect(slots)
    stop(stoppable_peer)
    for slot in range(4):
        sender.put(piece(range(BLOCKS_PER_SLOT), layer=1), slot, None)
    sender.abort()
    sender.close()
    resume(stoppable_peer)
    stoppable_peer.call("close_receiver", gone=True)
    other = stoppable_peer.call("accept", path.offer())
    address = [decode_region(each.blob, SLOT_BYTES * 4).memory.address for each in (slots, other)]
    assert address[0] != address[1]
    again = path.connect(other)
    wait(again.put(FULL, 0, None))
    check_piece(stoppable_peer, pool, FULL, 0, list(FULL.block_ids))
    again.close()


def test_a_receiver_that_closes_is_reached_no_more(open_path, path):
    receiving = open_path()
    sender = path.connect(receiving.accept(path.offer()).slots)
    wait(sender.put(FULL, 0, None))
    receiving.close()
    with pytest.raises(Unavailable):
        sender.put(FULL, 1, None).wait(WAIT_SECONDS)
    sender.close()
    with pytest.raises(Unavailable, match="is closed"):
        receiving.accept(path.offer())


# What is held.


def test_many_connections_leave_nothing_at_either_end(path, pool, steady_peer):
    def connect_once():
        sender = path.connect(steady_peer.call("accept", path.offer()))
        wait(sender.put(piece([1, 2]), 1, None))
        sender.close()
        steady_peer.call("close_receiver", gone=True)

    for _ in range(5):
        connect_once()
    before = usage(), steady_peer.call("usage")
    for _ in range(40):
        connect_once()
    deadline = time.monotonic() + WAIT_SECONDS
    while growth := grown(before, (usage(), steady_peer.call("usage"))):
        assert time.monotonic() < deadline, growth
        time.sleep(0.05)  # the peer hears of an end a little later


def grown(before, after):
    """By how much more than of itself. A connection that is left over costs 20 descriptors, a thread and 256 KiB."""
    growths = [{key: now[key] - then[key] for key in now} for now, then in zip(after, before, strict=True)]
    allowed = {"descriptors": 2, "threads": 0, "kib": 40 * 256}
    return [growth for growth in growths if any(growth[key] > allowed[key] for key in growth)]


def test_peers_are_bounded_at_both_ends(open_path):
    path = open_path(max_peers=2)
    receivers = [path.accept(path.offer()) for _ in range(2)]
    with pytest.raises(NoCapacity, match="2 senders have rdma staging"):
        path.accept(path.offer())
    senders = [path.connect(receiver.slots) for receiver in receivers]
    with pytest.raises(NoCapacity, match="2 rdma connections are open"):
        path.connect(receivers[0].slots)
    senders.pop().close()
    senders.append(path.connect(receivers[1].slots))
    for sender in senders:
        sender.close()


def test_an_idle_path_takes_no_core(path):
    slots_of(path)
    began = time.process_time(), time.monotonic()
    time.sleep(0.3)
    assert time.process_time() - began[0] < 0.5 * (time.monotonic() - began[1])


def test_regions_serve_again_after_a_while(pool):
    now = 100.0
    agent = ReceivingAgent(rdma_nixl.load(), "regions", HostStaging(pool), 4096, 2, lambda: now)
    first, _ = agent.take()
    second, _ = agent.take()
    agent.give_back(first)
    with pytest.raises(NoCapacity):
        agent.take()
    now += QUARANTINE_SECONDS
    assert agent.take()[0] is first
    agent.give_back(second)
    now += QUARANTINE_SECONDS
    assert agent.take()[0] is second
    agent.close()


def test_memory_that_a_sender_may_still_write_is_reused_with_another_agent(open_path):
    path = open_path(max_peers=2)
    lost, used = path.accept(path.offer()), path.accept(path.offer())
    sender = path.connect(lost.slots)
    wait(sender.put(FULL, 0, None))
    lost.close(False)
    with pytest.raises(NoCapacity, match="1 of them are lost"):
        path.accept(path.offer())
    used.close(False)
    receivers = [path.accept(path.offer()) for _ in range(2)]
    with pytest.raises(Unavailable):  # fenced
        sender.put(FULL, 1, None).wait(WAIT_SECONDS)
    sender.close()
    again = path.connect(receivers[1].slots)
    wait(again.put(FULL, 0, None))
    assert receivers[1].checksum(0, SLOT_BYTES) == checksum_of(path_bytes(FULL))
    again.close()


def path_bytes(sent):
    return Pool(seed=1).read_blocks(sent.layer, sent.block_ids)


# The library.


def test_a_missing_library_is_named_with_its_package(monkeypatch):
    with pytest.raises(Unsupported, match="pip install nixl-cu11"):
        rdma_nixl.load(11)
    monkeypatch.setattr(rdma_nixl, "_PACKAGES", ("nixl_cu99",))
    assert not rdma_nixl.installed()
    with pytest.raises(Unsupported, match="transport rdma needs NIXL"):
        rdma_nixl.load()


def test_no_usable_network_is_an_error():
    program = f"from {rdma_peer.__name__} import Pool, make_path; make_path(Pool())"
    environment = {**os.environ, "UCX_TLS": "cma", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
    assert ended.returncode == 1
    assert b"baton.rpc.errors.Unavailable: NIXL has no usable UCX backend here" in ended.stderr
