"""The rdma path while its peer is killed, stopped, aborted or closed: no fault holds or spoils anything."""

from __future__ import annotations

import threading

import pytest
from support.transfer.rdma_checks import (
    BLOCKS_PER_SLOT,
    FULL,
    WAIT_SECONDS,
    check_piece,
    piece,
    put_at_once,
    resume,
    stop,
    wait,
)
from support.transfer.rdma_peer import SLOT_BYTES

from baton.rpc.errors import DeadlineExceeded, InvalidRequest, ServiceError, Unavailable
from baton.worker.transfer.kinds.rdma import nixl as rdma_nixl
from baton.worker.transfer.kinds.rdma.descriptors import decode_region

pytestmark = pytest.mark.skipif(not rdma_nixl.installed(), reason="NIXL is not installed (pip install '.[rdma]')")


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


def test_a_slot_takes_one_piece_at_a_time(stoppable_peer, connect):
    sender = connect(stoppable_peer)
    stop(stoppable_peer)
    sender.put(FULL, 0, None)
    with pytest.raises(InvalidRequest, match="slot 0 is still being filled"):
        sender.put(FULL, 0, None)
