"""Pieces that tests send over the RDMA path, and what they check of a peer."""

from __future__ import annotations

import os
import signal
import zlib

import numpy as np
from support.transfer.rdma_peer import LAYOUT, SLOT_BYTES

from baton.worker.core import BlockId
from baton.worker.transfer.base import Piece
from baton.worker.transfer.wire.checksum import checksum_of

WAIT_SECONDS = 20.0
BLOCKS_PER_SLOT = SLOT_BYTES // LAYOUT.layer_bytes(0)


def piece(block_ids, layer=0, num_layers=1):
    return Piece(layer, 0, len(block_ids), [BlockId(block) for block in block_ids], 0, num_layers)


FULL = piece(range(BLOCKS_PER_SLOT))


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


def slots_of(path):
    return path.accept(path.offer()).slots
