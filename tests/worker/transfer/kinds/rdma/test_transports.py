"""Transfers over RDMA between two processes, and their faults."""

from __future__ import annotations

import os
import signal
import time
import zlib

import pytest
from support.processes.child import Child
from support.transfer.rdma_peer import EPOCH, GENERATION, LAYOUT, SLOT_BYTES, Pool, RdmaReceiver, make_path, usage

from baton.v1 import kv_pb2
from baton.worker.core import BlockId
from baton.worker.transfer.base import Outbound, Piece, Pushed, PushFailed, PushFenced
from baton.worker.transfer.kinds.rdma import nixl as rdma_nixl
from baton.worker.transfer.transports import Transports

pytestmark = pytest.mark.skipif(not rdma_nixl.installed(), reason="NIXL is not installed (pip install '.[rdma]')")

WAIT_SECONDS = 20.0
SOURCE = [BlockId(block) for block in range(3, 35)]
TARGET = list(range(40, 8, -1))
BLOCKS_PER_PIECE = 8
NUM_BYTES = LAYOUT.num_layers * len(SOURCE) * LAYOUT.layer_bytes(0)


class Sender:
    """A worker's transports, and their events."""

    def __init__(self, pool, **settings):
        self.path = make_path(pool, **settings)
        paths = {"rdma": self.path, "tcp": None}
        self.transports = Transports(
            pool, "127.0.0.1", 0, "127.0.0.1", lambda: None, paths=paths, max_piece_bytes=SLOT_BYTES
        )
        self.events = []

    def connect(self, peer, push_id, addresses):
        peer.call("open", transfer_id=push_id, blocks=TARGET)
        self.transports.connect(Outbound(push_id, addresses, push_id, EPOCH, GENERATION, True))

    def push(self, push_id):
        for layer in range(LAYOUT.num_layers):
            for first in range(0, len(SOURCE), BLOCKS_PER_PIECE):
                block_ids = SOURCE[first : first + BLOCKS_PER_PIECE]
                self.transports.push(push_id, Piece(layer, first, len(block_ids), block_ids))
        self.transports.finish(push_id)

    def wait_for(self, kind):
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            self.events += self.transports.poll()
            for event in self.events:
                if isinstance(event, kind):
                    self.events.remove(event)
                    return event
            assert time.monotonic() < deadline, f"no {kind.__name__}: {self.events}"
            time.sleep(0.005)


@pytest.fixture(scope="module")
def pool():
    return Pool(seed=1)


@pytest.fixture
def make_sender(pool):
    senders = []

    def make(**settings):
        senders.append(Sender(pool, **settings))
        return senders[-1]

    yield make
    for sender in senders:
        sender.transports.close()


@pytest.fixture
def sender(make_sender):
    return make_sender()


@pytest.fixture
def make_peer():
    peers = []

    def make(port=0, **settings):
        peer = Child(RdmaReceiver, **settings)
        peers.append(peer)
        answer = peer.call("serve", port=port)
        return peer, [kv_pb2.TransportAddress.FromString(each) for each in answer]

    yield make
    for peer in peers:
        peer.kill()


def check_landed(peer, pool):
    deadline = time.monotonic() + WAIT_SECONDS
    events = []
    while "Landed" not in events:
        assert time.monotonic() < deadline, events
        events += peer.call("poll")
    for layer in range(LAYOUT.num_layers):
        assert peer.call("read", layer=layer, blocks=TARGET) == zlib.crc32(pool.read_blocks(layer, SOURCE))


def test_rdma_is_chosen_and_every_byte_arrives(sender, make_peer, pool):
    peer, addresses = make_peer()
    for push_id in range(1, 4):
        sender.connect(peer, push_id, addresses)
        sender.push(push_id)
        assert sender.wait_for(Pushed) == Pushed(push_id, 12, NUM_BYTES)
        check_landed(peer, pool)
    totals = sender.transports.totals_by_kind()
    assert (totals["rdma"].num_sent_bytes, totals["tcp"].num_sent_bytes) == (3 * NUM_BYTES, 0)


def test_a_receiver_without_slots_is_served_over_tcp(sender, make_peer, pool):
    peer, addresses = make_peer(max_peers=0)
    sender.connect(peer, 1, addresses)
    sender.push(1)
    sender.wait_for(Pushed)
    check_landed(peer, pool)
    totals = sender.transports.totals_by_kind()
    assert (totals["rdma"].num_fallbacks, totals["tcp"].num_sent_bytes) == (1, NUM_BYTES)


def test_a_receiver_that_is_killed_and_restarted_takes_the_next_push(sender, make_peer, pool):
    peer, addresses = make_peer()
    sender.connect(peer, 1, addresses)
    sender.push(1)
    sender.wait_for(Pushed)
    stop(peer)
    sender.transports.connect(Outbound(2, addresses, 2, EPOCH, GENERATION, True))
    sender.push(2)
    peer.kill()
    assert sender.wait_for(PushFailed).push_id == 2
    sender.transports.fence_outbound(2)
    assert sender.wait_for(PushFenced).push_id == 2
    port = int(addresses[0].address.rpartition(":")[2])
    restarted, same = make_peer(port)
    assert [address.address for address in same] == [address.address for address in addresses]
    sender.connect(restarted, 3, same)
    sender.push(3)
    sender.wait_for(Pushed)
    check_landed(restarted, pool)
    assert sender.transports.totals_by_kind()["tcp"].num_sent_bytes == 0


def test_a_receiver_that_stops_for_a_moment_gets_everything(sender, make_peer, pool):
    peer, addresses = make_peer()
    sender.connect(peer, 1, addresses)
    stop(peer)
    sender.push(1)
    time.sleep(0.1)
    peer.process.send_signal(signal.SIGCONT)
    sender.wait_for(Pushed)
    check_landed(peer, pool)


def test_a_cut_push_leaves_nothing_and_harms_no_other(sender, make_peer, pool):
    peer, addresses = make_peer()

    def cut(push_id):
        sender.connect(peer, push_id, addresses)
        sender.push(push_id)
        sender.transports.cut_outbound(push_id)
        sender.transports.fence_outbound(push_id)
        sender.wait_for(PushFenced)
        sender.transports.forget(push_id)

    for push_id in range(1, 4):
        cut(push_id)
    before = usage()
    for push_id in range(4, 16):
        cut(push_id)
    sender.connect(peer, 100, addresses)
    sender.push(100)
    sender.wait_for(Pushed)
    check_landed(peer, pool)
    deadline = time.monotonic() + WAIT_SECONDS
    # The connection that serves now has what one costs.
    while usage()["descriptors"] > before["descriptors"] + 25:
        assert time.monotonic() < deadline, (before, usage())
        time.sleep(0.05)


def stop(peer):
    """Returns when the process has stopped."""
    peer.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED | os.WNOWAIT)
