"""A receiver over the RDMA path for a separate process: only the path, or a worker's transports."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import torch

from baton.worker.core import BlockId
from baton.worker.executors.host.kv_memory import KvMemory
from baton.worker.kv_spec import full_spec
from baton.worker.transfer.base import Inbound
from baton.worker.transfer.bulk import BulkReceiver
from baton.worker.transfer.kinds.rdma.host_staging import HostStaging
from baton.worker.transfer.kinds.rdma.path import RdmaPath
from baton.worker.transfer.transports import Transports

LAYOUT = full_spec(bytes(16), "float32", num_layers=3, num_kv_heads=4, head_dim=64, block_size=16)
NUM_BLOCKS = 64
SLOT_BYTES = 1 << 20
EPOCH = 7
GENERATION = 0xFEED


class Pool:
    """The part of an executor that transfers use."""

    def __init__(self, seed=None):
        self.kv_spec = LAYOUT
        memory = KvMemory(LAYOUT, NUM_BLOCKS, torch.float32)
        self.read_blocks, self.write_blocks, self.kv_bytes = memory.read, memory.write, memory.groups[0].bytes
        if seed is not None:
            memory.groups[0].bytes[:] = torch.randint(
                0, 256, memory.groups[0].bytes.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
            ).numpy()


def make_path(pool, **settings):
    return RdmaPath(HostStaging(pool), SLOT_BYTES, **settings)


def usage():
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "kib": resident >> 10,
    }


class RdmaReceiver:
    """A pool, and the receiving side of a path to it."""

    def __init__(self, **settings):
        self.pool = Pool()
        self.path = make_path(self.pool, **settings)
        self.receivers: list[BulkReceiver] = []

    def accept(self, offer):
        """Returns the slots for a sender."""
        self.receivers.append(self.path.accept(offer))
        return self.receivers[-1].slots

    def write(self, slot, layers, blocks, num_bytes):
        """Copies a slot into blocks and returns its checksum."""
        receiver = self.receivers[-1]
        checksum = receiver.checksum(slot, num_bytes)
        receiver.take(slot, num_bytes)
        receiver.write(slot, range(*layers), [BlockId(block) for block in blocks], None)
        return checksum

    def serve(self, port):
        """Starts a worker's transports and returns their addresses, encoded."""
        self.transports = Transports(
            self.pool, "127.0.0.1", port, "127.0.0.1", lambda: None, paths={"rdma": self.path, "tcp": None}
        )
        return [address.SerializeToString() for address in self.transports.addresses]

    def open(self, transfer_id, blocks):
        block_ids = tuple(BlockId(block) for block in blocks)
        self.transports.open(Inbound(transfer_id, EPOCH, GENERATION, block_ids, True))

    def poll(self):
        """Returns the names of the transports' events."""
        return [type(event).__name__ for event in self.transports.poll()]

    def read(self, layer, blocks):
        """Returns the checksum of one layer of blocks."""
        return zlib.crc32(self.pool.read_blocks(layer, blocks))

    def close_receiver(self, gone):
        self.receivers.pop().close(gone)

    def usage(self):
        return usage()
