"""Kinds of transports to measure: their workers' blocks, and the raw copies with which they are compared.

Both ends run in separate processes. The raw copy moves the same bytes in pieces of the same size, without Baton's code.
The receiver's `told` must be picklable.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from bench.transfer.gpu import CudaIpcKind, NcclKind
from bench.transfer.words import Words, WordsSender

from baton.worker.core import BlockId
from baton.worker.executors.base import Executor
from baton.worker.kv_spec import full_spec
from baton.worker.transfer.bulk import BulkPath
from baton.worker.transfer.kinds.factory import make_paths

NUM_LAYERS = 32
BYTES_PER_BLOCK_LAYER = 64 << 10  # an 8B model's: 8 heads of 128, 16 tokens, bf16
PIECE_BYTES = 4 << 20


class RawReceiver(Protocol):
    """The receiving end of the raw copy."""

    told: Any  # the address for the sender

    def receive(self, num_bytes: int) -> None:
        """Waits until this many bytes were received."""

    def close(self) -> None:
        """Frees all resources."""


class RawSender(Protocol):
    """The sending end of the raw copy."""

    def send(self, num_bytes: int) -> None:
        """Sends this many bytes."""

    def close(self) -> None:
        """Frees all resources."""


class Kind(Protocol):
    """A kind of transport to measure."""

    name: str
    piece_bytes: int

    def prepare(self, role: str) -> None:
        """Prepares the process of the `receiver` or the `sender`, before everything else."""

    def make_executor(self, num_blocks: int) -> Executor:
        """Returns blocks of either end, filled with noise, as [num_layers, num_blocks, bytes]."""

    def make_paths(self, executor: Executor) -> Mapping[str, BulkPath | None]:
        """Returns the paths of Transports: only this kind, so that no other one is used."""

    def raw_receiver(self, num_bytes: int) -> RawReceiver:
        """Returns the receiving end for up to this many bytes."""

    def raw_sender(self, told: Any, num_bytes: int) -> RawSender:
        """Returns the sending end."""


class HostKv:
    """The part of an executor with blocks in host memory that a transport uses."""

    def __init__(self, num_blocks: int) -> None:
        self.kv_spec = full_spec(bytes(16), "bfloat16", NUM_LAYERS, 8, 128, 16)
        self.kv_bytes = np.random.default_rng(0).integers(
            0, 256, (NUM_LAYERS, num_blocks, BYTES_PER_BLOCK_LAYER), np.uint8
        )

    def read_blocks(self, layer: int, block_ids: list[BlockId]) -> memoryview:
        return memoryview(self.kv_bytes[layer].take(block_ids, axis=0)).cast("B")

    def write_blocks(self, layer: int, block_ids: list[BlockId], data: memoryview) -> None:
        self.kv_bytes[layer][list(block_ids)] = np.frombuffer(data, np.uint8).reshape(len(block_ids), -1)


class TcpKind:
    """Plain sockets on loopback, compared with one socket between two ranges of memory."""

    name = "tcp"
    piece_bytes = PIECE_BYTES

    def prepare(self, role: str) -> None:
        """Does nothing."""

    def make_executor(self, num_blocks: int) -> Executor:
        return HostKv(num_blocks)  # type: ignore[return-value]

    def make_paths(self, executor: Executor) -> Mapping[str, BulkPath | None]:
        return make_paths(self.name, executor, PIECE_BYTES, None)

    def raw_receiver(self, num_bytes: int) -> RawReceiver:
        return _SocketReceiver(num_bytes)

    def raw_sender(self, told: Any, num_bytes: int) -> RawSender:
        return _SocketSender(told, num_bytes)


class RdmaKind(TcpKind):
    """NIXL over the network that UCX finds, between host memories, compared with one socket."""

    name = "rdma"


class HostIpcKind(TcpKind):
    """Shared memory of a host, compared with one copy into shared memory."""

    name = "ipc"

    def raw_receiver(self, num_bytes: int) -> RawReceiver:
        return _MemoryReceiver(num_bytes)

    def raw_sender(self, told: Any, num_bytes: int) -> RawSender:
        return _MemorySender(told, num_bytes)


class _SocketReceiver:
    def __init__(self, num_bytes: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.told = self._listener.getsockname()
        self._sock: socket.socket | None = None
        self._target = memoryview(bytearray(b"\1") * num_bytes)

    def receive(self, num_bytes: int) -> None:
        if self._sock is None:
            self._sock, _ = self._listener.accept()
        left = self._target[:num_bytes]
        while left:
            left = left[self._sock.recv_into(left[:PIECE_BYTES], 0, socket.MSG_WAITALL) :]

    def close(self) -> None:
        self._listener.close()
        if self._sock is not None:
            self._sock.close()


class _SocketSender:
    def __init__(self, address: tuple[str, int], num_bytes: int) -> None:
        self._sock = socket.create_connection(address)
        self._source = memoryview(np.random.default_rng(0).bytes(num_bytes))

    def send(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, PIECE_BYTES):
            self._sock.sendall(self._source[start : min(start + PIECE_BYTES, num_bytes)])

    def close(self) -> None:
        self._sock.close()


class _MemoryReceiver:
    """A receiver whose sender writes its memory, and then sends a byte on a socket."""

    def __init__(self, num_bytes: int) -> None:
        self._words = Words()
        self._descriptor = os.memfd_create("baton-bench")
        os.ftruncate(self._descriptor, num_bytes)
        self.told = (self._words.told, os.getpid(), self._descriptor)

    def receive(self, num_bytes: int) -> None:
        self._words.receive()

    def close(self) -> None:
        os.close(self._descriptor)
        self._words.close()


class _MemorySender:
    def __init__(self, told: tuple[tuple[str, int], int, int], num_bytes: int) -> None:
        address, process, descriptor = told
        self._words = WordsSender(address)
        with Path(f"/proc/{process}/fd/{descriptor}").open("r+b") as shared:
            self._memory = np.frombuffer(mmap.mmap(shared.fileno(), num_bytes), np.uint8)
        self._memory[:] = 1  # touches all pages before the measurement
        self._source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)

    def send(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, num_bytes)
            self._memory[start:stop] = self._source[start:stop]
        self._words.send()

    def close(self) -> None:
        self._words.close()


_ALL: tuple[Kind, ...] = (TcpKind(), HostIpcKind(), RdmaKind(), CudaIpcKind(), NcclKind())
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
