"""KV over the TCP transport on loopback, against a raw socket copy of the same bytes in the same run.

python tests/bench/bench_transfer_tcp.py
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

from baton.worker.core import BlockId
from baton.worker.executor.base import KvLayout
from baton.worker.transfer.base import Inbound, Landed, Outbound, Piece
from baton.worker.transfer.transports import Transports

NUM_LAYERS = 32
BYTES_PER_BLOCK_LAYER = 64 << 10  # an 8B model's: 8 heads of 128, 16 tokens, bf16
PIECE_BYTES = 4 << 20
SIZES_MIB = (16, 64, 128, 256)


class HostKv:
    """What the transport asks of an executor, in host memory."""

    def __init__(self, num_blocks: int) -> None:
        self.layout = KvLayout(bytes(16), "bfloat16", NUM_LAYERS, 8, 128, 16, BYTES_PER_BLOCK_LAYER)
        self.blocks = np.random.default_rng(0).integers(
            0, 256, (NUM_LAYERS, num_blocks, BYTES_PER_BLOCK_LAYER), np.uint8
        )

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> memoryview:
        return memoryview(self.blocks[layer].take(block_ids, axis=0)).cast("B")

    def write_blocks(self, layer: int, block_ids: Sequence[BlockId], data: memoryview) -> None:
        self.blocks[layer][list(block_ids)] = np.frombuffer(data, np.uint8).reshape(len(block_ids), -1)


def raw_copy(num_bytes: int) -> float:
    """Seconds for the same pieces over a plain socket, into one buffer."""
    listener = socket.create_server(("127.0.0.1", 0))
    received = threading.Event()

    def receive() -> None:
        sock, _ = listener.accept()
        buffer = memoryview(bytearray(PIECE_BYTES))
        left = num_bytes
        while left:
            left -= sock.recv_into(buffer, min(left, PIECE_BYTES), socket.MSG_WAITALL)
        received.set()
        sock.close()

    thread = threading.Thread(target=receive)
    thread.start()
    data = bytes(PIECE_BYTES)
    with socket.create_connection(listener.getsockname()) as sock:
        began = time.perf_counter()
        for start in range(0, num_bytes, PIECE_BYTES):
            sock.sendall(data[: num_bytes - start])
        received.wait()
        seconds = time.perf_counter() - began
    thread.join()
    listener.close()
    return seconds


def push(sender: Transports, receiver: Transports, landed: threading.Event, number: int, options: tuple[int, bool]):
    """Seconds from the first push to the last byte in its block."""
    num_blocks, checksum = options
    block_ids = [BlockId(i) for i in np.random.default_rng(number).permutation(num_blocks).tolist()]
    receiver.open(Inbound(number, 1, number, tuple(block_ids), checksum))
    sender.connect(Outbound(number, receiver.addresses, number, 1, number, checksum))
    time.sleep(0.05)  # the connection is there in practice: it is dialled while the first chunk is computed
    per_piece = PIECE_BYTES // BYTES_PER_BLOCK_LAYER
    began = time.perf_counter()
    for layer in range(NUM_LAYERS):
        for first in range(0, num_blocks, per_piece):
            piece_ids = block_ids[first : first + per_piece]
            sender.push(number, Piece(layer, first, len(piece_ids), piece_ids))
    sender.finish(number)
    while not any(isinstance(event, Landed) for event in receiver.poll()):
        landed.wait()
        landed.clear()
    seconds = time.perf_counter() - began
    sender.forget(number)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    most_blocks = (max(SIZES_MIB) << 20) // (NUM_LAYERS * BYTES_PER_BLOCK_LAYER)
    landed = threading.Event()
    source, target = HostKv(most_blocks), HostKv(most_blocks)
    sender = Transports(source, "127.0.0.1", 0, "127.0.0.1", lambda: None)  # type: ignore[arg-type]
    receiver = Transports(target, "127.0.0.1", 0, "127.0.0.1", landed.set)  # type: ignore[arg-type]
    number = 0
    print(f"{'MiB':>6} {'raw GB/s':>9} {'tcp GB/s':>9} {'of raw':>7} {'checked GB/s':>13} {'of raw':>7}")
    for size in SIZES_MIB:
        num_bytes = size << 20
        num_blocks = num_bytes // (NUM_LAYERS * BYTES_PER_BLOCK_LAYER)
        rates: dict[str, list[float]] = {"raw": [], "plain": [], "checked": []}
        for _ in range(repeats):
            rates["raw"].append(num_bytes / raw_copy(num_bytes) / 1e9)
            for name in ("plain", "checked"):
                number += 1
                seconds = push(sender, receiver, landed, number, (num_blocks, name == "checked"))
                rates[name].append(num_bytes / seconds / 1e9)
        raw, plain, checked = (statistics.median(rates[name]) for name in ("raw", "plain", "checked"))
        print(f"{size:6} {raw:9.2f} {plain:9.2f} {plain / raw:7.0%} {checked:13.2f} {checked / raw:7.0%}")
    sender.close()
    receiver.close()


if __name__ == "__main__":
    main()
