"""Two ends of a transport in one process, and helpers for tests of transports."""

from __future__ import annotations

import atexit
import functools
import socket
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from support.engine.engine_harness import make_executor
from support.network.tls_rig import make_certs, tls_of

from baton.rpc.identity.identity import WORKER
from baton.v1 import kv_pb2
from baton.worker.core import BlockId
from baton.worker.executors.host.kv_memory import KvMemory
from baton.worker.kv_spec import full_spec
from baton.worker.transfer.base import Inbound, Outbound, Piece
from baton.worker.transfer.kinds.ipc.host import HostIpcPath
from baton.worker.transfer.transports import Transports
from baton.worker.transfer.wire.frames import GREETING_BYTES, Open, encode_open
from baton.worker.transfer.wire.tls import KvTls
from baton.worker.transport_kinds import NAMES

NUM_LAYERS = 2
NUM_BLOCKS = 64
GENERATION = 0xFEED
EPOCH = 7
SLOT_BYTES = 4096
SOURCE = [BlockId(i) for i in (3, 9, 4, 20, 21)]
TARGET = [BlockId(i) for i in (50, 2, 7, 33, 8)]


class HostKv:
    """The part of an executor with blocks in host memory that a transport uses."""

    def __init__(self, num_blocks=NUM_BLOCKS, num_heads=2):
        self.kv_spec = full_spec(bytes(16), "float32", NUM_LAYERS, num_heads, head_dim=2, block_size=4)
        self._memory = KvMemory(self.kv_spec, num_blocks, torch.float32)
        self.kv_bytes = self._memory.groups[0].bytes
        self.read_blocks = self._memory.read
        self.write_blocks = self._memory.write


def filled(executor, seed=0):
    """Fills an executor's blocks with noise. Returns it."""
    rng = np.random.default_rng(seed)
    for layer in range(NUM_LAYERS):
        data = rng.integers(0, 256, NUM_BLOCKS * executor.kv_spec.layer_bytes(layer), np.uint8).tobytes()
        executor.write_blocks(layer, [BlockId(i) for i in range(NUM_BLOCKS)], memoryview(data))
    return executor


def make_kv(kind):
    """Returns KV for a kind: tcp copies blocks out and in, direct lets the socket access them, ipc copies from slots.

    The suffix +tls adds TLS.
    """
    return make_executor(num_blocks=NUM_BLOCKS) if bare(kind) == "tcp" else HostKv()


def bare(kind):
    return kind.removesuffix("+tls")


@functools.cache
def certificates():
    """Returns a folder of certificates, which exists until this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="kv-certs-")
    atexit.register(folder.cleanup)
    return make_certs(Path(folder.name))


def kv_tls(service=WORKER, folder=None):
    """Returns the TLS of a worker, or of another service that poses as one."""
    return KvTls(tls_of(folder or certificates(), service))


def paths_of(kind, executor, slot_bytes=SLOT_BYTES, **values):
    if bare(kind) == "ipc":
        return {"ipc": HostIpcPath(executor, slot_bytes, **values), "tcp": None}
    return {"tcp": None}


class End:
    """A transport, its device, and its events."""

    def __init__(self, executor, paths=None, port=0, **values):
        self.executor = executor
        self.woken = threading.Event()
        self.transport = Transports(executor, "127.0.0.1", port, "127.0.0.1", self.woken.set, paths, EPOCH, **values)
        self.events = []

    @property
    def port(self):
        return int(self.transport.addresses[0].address.partition("/")[0].rpartition(":")[2])

    def wait_for(self, kind, seconds=10.0):
        deadline = time.monotonic() + seconds
        while True:
            self.woken.clear()
            self.events += self.transport.poll()
            found = [event for event in self.events if isinstance(event, kind)]
            if found:
                self.events.remove(found[0])
                return found[0]
            assert time.monotonic() < deadline, f"no {kind.__name__}: {self.events}"
            self.woken.wait(0.05)

    def read(self, block_ids):
        return [bytes(self.executor.read_blocks(layer, block_ids)) for layer in range(NUM_LAYERS)]

    @property
    def piece_bytes(self):
        return self.executor.kv_spec.layer_bytes(0)


class Ends:
    """Creates ends. Closes them, and asserts that this is quick and leaves no thread."""

    def __init__(self):
        self._ends = []

    def make(self, executor=None, kind="tcp", paths=None, **values):
        executor = executor or make_kv(kind)
        if kind.endswith("+tls"):
            values = {"tls": kv_tls(), **values}
        self._ends.append(End(executor, paths or paths_of(kind, executor), **values))
        return self._ends[-1]

    def pair(self, kind):
        """Creates a sender with noise in its blocks, and a receiver."""
        return self.make(filled(make_kv(kind)), kind), self.make(None, kind)

    def close(self):
        for end in self._ends:
            end.transport.close()
        wait_until(lambda: not kv_threads())


def kv_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


def inbound(block_ids, transfer_id=1, generation=GENERATION, epoch=EPOCH, checksum=True):
    return Inbound(transfer_id, epoch, generation, tuple(BlockId(i) for i in block_ids), checksum)


def outbound(receiver, push_id=1, transfer_id=1, generation=GENERATION, epoch=EPOCH, checksum=True, conversion=None):
    addresses = receiver.transport.addresses
    return Outbound(push_id, addresses, transfer_id, epoch, generation, checksum, conversion)


def piece_of(layer, first_index, block_ids, num_layers=1):
    return Piece(layer, first_index, len(block_ids), block_ids, num_layers=num_layers)


def push_all(sender, push_id=1, source=SOURCE):
    for layer in range(NUM_LAYERS):
        sender.transport.push(push_id, piece_of(layer, 0, source[:2]))
        sender.transport.push(push_id, piece_of(layer, 2, source[2:]))
    sender.transport.finish(push_id)


def hand_over(sender, receiver, number=1, checksum=True, target=TARGET):
    """Opens a transfer and pushes all of it."""
    receiver.transport.open(inbound(target, transfer_id=number, checksum=checksum))
    sender.transport.connect(outbound(receiver, push_id=number, transfer_id=number, checksum=checksum))
    push_all(sender, number)


def tcp_address(address):
    return [kv_pb2.TransportAddress(kind=kv_pb2.TRANSPORT_KIND_TCP, address=address)]


def connected(receiver, kind="tcp", offer=b""):
    """Returns a socket that a receiver has accepted."""
    sock = dialled(receiver)
    sock.sendall(encode_open(Open(NAMES[kind], 0, 3, offer, key_of(receiver))))
    sock.recv(GREETING_BYTES + 12, socket.MSG_WAITALL)
    return sock


def key_of(receiver):
    """Returns the key that a receiver sends over control streams."""
    return receiver.transport.addresses[0].key


def dialled(receiver):
    """Returns a connected socket before the greeting."""
    return socket.create_connection(("127.0.0.1", receiver.port), timeout=10)


def wait_until(done, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ended(sock):
    """Returns whether the other end closes or resets the connection."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
