"""A process that receives over the rdma path, told what to do by JSON lines on its standard input.

Over the path alone: {"do": "accept", "offer": hex} -> {"slots": [number, bytes, hex]}; write SLOT LAYERS BLOCKS -> the
slot's checksum; close GONE. As a worker does: serve PORT -> its port; open TRANSFER BLOCKS; poll -> what happened.
Both: read LAYER BLOCKS -> their checksum; usage -> descriptors, threads, resident KiB. Errors are answered as
{"error": message}.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import torch

from baton.rpc.errors import ServiceError
from baton.worker.core import BlockId
from baton.worker.executors.host.kv_memory import KvMemory
from baton.worker.kv_spec import full_spec
from baton.worker.transfer.base import Inbound
from baton.worker.transfer.bulk import BulkReceiver, Slots
from baton.worker.transfer.kinds.rdma.host_staging import HostStaging
from baton.worker.transfer.kinds.rdma.path import RdmaPath
from baton.worker.transfer.transports import Transports

LAYOUT = full_spec(bytes(16), "float32", num_layers=3, num_kv_heads=4, head_dim=64, block_size=16)
NUM_BLOCKS = 64
SLOT_BYTES = 1 << 20
EPOCH = 7
GENERATION = 0xFEED
_ANSWER_SECONDS = 60.0  # of a start, too


class Pool:
    """As much of an executor as transfers see."""

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


class Peer:
    """The other process, seen from the test."""

    def __init__(self, **settings):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def ask(self, do, **values):
        """Its answer. Killed where there is none."""
        timer = threading.Timer(_ANSWER_SECONDS, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        finally:
            timer.cancel()
        assert "error" not in answer, answer["error"]
        return answer

    def accept(self, offer):
        num_slots, slot_bytes, blob = self.ask("accept", offer=offer.hex())["slots"]
        return Slots(num_slots, slot_bytes, bytes.fromhex(blob))

    def end(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class _Receiver:
    def __init__(self, **settings):
        self.pool = Pool()
        self.path = make_path(self.pool, **settings)
        self.receivers: list[BulkReceiver] = []

    def accept(self, offer):
        receiver = self.path.accept(bytes.fromhex(offer))
        self.receivers.append(receiver)
        return {"slots": [receiver.slots.num_slots, receiver.slots.slot_bytes, receiver.slots.blob.hex()]}

    def write(self, slot, layers, blocks, num_bytes):
        receiver = self.receivers[-1]
        checksum = receiver.checksum(slot, num_bytes)
        receiver.take(slot, num_bytes)
        receiver.write(slot, range(*layers), [BlockId(block) for block in blocks], None)
        return {"checksum": checksum}

    def serve(self, port):
        self.transports = Transports(
            self.pool, "127.0.0.1", port, "127.0.0.1", lambda: None, paths={"rdma": self.path, "tcp": None}
        )
        return {"addresses": [address.SerializeToString().hex() for address in self.transports.addresses]}

    def open(self, transfer_id, blocks):
        block_ids = tuple(BlockId(block) for block in blocks)
        self.transports.open(Inbound(transfer_id, EPOCH, GENERATION, block_ids, True))
        return {}

    def poll(self):
        return {"events": [type(event).__name__ for event in self.transports.poll()]}

    def read(self, layer, blocks):
        return {"checksum": zlib.crc32(self.pool.read_blocks(layer, blocks))}

    def close(self, gone):
        self.receivers.pop().close(gone)
        return {}

    def usage(self):
        return usage()


def main():
    receiver = _Receiver(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(receiver, request.pop("do"))(**request)
        except ServiceError as error:
            answer = {"error": error.message}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
