"""The rdma path between two processes: every byte arrives, what does not fit is refused, and nothing leaks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from support.transfer import rdma_peer
from support.transfer.rdma_checks import (
    BLOCKS_PER_SLOT,
    FULL,
    WAIT_SECONDS,
    check_piece,
    piece,
    slots_of,
    wait,
)
from support.transfer.rdma_peer import LAYOUT, NUM_BLOCKS, SLOT_BYTES, Pool, usage

from baton.rpc.errors import InvalidRequest, Mismatch, NoCapacity, Unavailable, Unsupported
from baton.worker.core import BlockId
from baton.worker.transfer.bulk import Slots
from baton.worker.transfer.conversion.blocks import conversion_to
from baton.worker.transfer.kinds.rdma import nixl as rdma_nixl
from baton.worker.transfer.kinds.rdma.descriptors import decode_region, encode_region
from baton.worker.transfer.kinds.rdma.host_staging import HostStaging
from baton.worker.transfer.kinds.rdma.receiver import QUARANTINE_SECONDS, ReceivingAgent
from baton.worker.transfer.wire.checksum import checksum_of

pytestmark = pytest.mark.skipif(not rdma_nixl.installed(), reason="NIXL is not installed (pip install '.[rdma]')")


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


# Metadata.


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
