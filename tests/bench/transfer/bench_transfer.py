"""Compares KV transfers over each kind of transport with a raw copy of the same bytes in the same run.

baton bench transfer [--kinds tcp,ipc] [--mib 1,16,64,256] [--at-once 1,8] [--repeats 5] [--json PATH]

For GPUs: --kinds cuda-ipc,nccl on a host with two. Each end sees one GPU of BATON_BENCH_DEVICES (0,1).

`of raw` is the transport's rate divided by the raw copy's. `checked` has a checksum on every piece. A transfer lasts
from the first push in the sender's process until the receiver's transport reports the last block. The raw copy lasts
from the call in the sender's process until the receiver's process has been notified of all bytes. With several at once
(--at-once 1,8) all are pushed together, and the raw copy moves the bytes of all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.transfer.kinds import BYTES_PER_BLOCK_LAYER, KINDS, NUM_LAYERS, Kind

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.worker.core import BlockId
from baton.worker.transfer.base import Inbound, Landed, Outbound, Piece, PushFailed
from baton.worker.transfer.transports import Transports

_ANSWER_SECONDS = 60.0
_BLOCK_BYTES = NUM_LAYERS * BYTES_PER_BLOCK_LAYER


def block_ids_of(number: int, first: int, num_blocks: int) -> list[BlockId]:
    """Returns block ids in random order, as in a pool that has been used for a while."""
    return [BlockId(first + i) for i in np.random.default_rng(number).permutation(num_blocks).tolist()]


def make_transports(kind: Kind, num_blocks: int, wake: Callable[[], None]) -> Transports:
    """Returns the transports of one end."""
    executor = kind.make_executor(num_blocks)
    return Transports(executor, "127.0.0.1", 0, "127.0.0.1", wake, kind.make_paths(executor))


class Sender:
    """The sending worker. Its process serves calls from the receiver's process until it is closed."""

    def __init__(self, kind: Kind, num_blocks: int, told: Any) -> None:
        self._kind = kind
        self._transport = make_transports(kind, num_blocks, lambda: None)
        self._pieces: dict[int, list[Piece]] = {}
        self._began = 0.0
        self._raw = kind.raw_sender(told, num_blocks * _BLOCK_BYTES)

    def connect(self, number: int, addresses: list[bytes], checksum: bool, first_block: int, num_blocks: int) -> None:
        """Connects before the first piece, as at the start of a prefill."""
        self._pieces[number] = self._make_pieces(number, first_block, num_blocks)
        from baton.v1 import kv_pb2

        known = [kv_pb2.TransportAddress.FromString(address) for address in addresses]
        self._transport.connect(Outbound(number, known, number, 1, number, checksum))

    def push(self, first_number: int, count: int) -> None:
        """Runs several transfers, one after the other."""
        self._began = time.monotonic()
        for number in range(first_number, first_number + count):
            for piece in self._pieces.pop(number):
                self._transport.push(number, piece)
            self._transport.finish(number)

    def _make_pieces(self, number: int, first_block: int, num_blocks: int) -> list[Piece]:
        """Returns pieces of all blocks, layer by layer. For a short prompt, a piece has several layers."""
        per_piece = self._kind.piece_bytes // BYTES_PER_BLOCK_LAYER
        num_layers = min(NUM_LAYERS, max(1, per_piece // num_blocks))
        block_ids = block_ids_of(number + 1, first_block, num_blocks)
        pieces = []
        for layer in range(0, NUM_LAYERS, num_layers):
            for first in range(0, num_blocks, per_piece):
                ids = block_ids[first : first + per_piece]
                layers = min(num_layers, NUM_LAYERS - layer)
                pieces.append(Piece(layer, first, len(ids), ids, num_layers=layers))
        return pieces

    def forget(self, number: int) -> None:
        """Raises the error of a failed push."""
        failed = [event for event in self._transport.poll() if isinstance(event, PushFailed)]
        self._transport.forget(number)
        if failed:
            raise RuntimeError(failed[0].reason)

    def send_raw(self, num_bytes: int) -> None:
        """Sends the raw copy."""
        self._began = time.monotonic()
        self._raw.send(num_bytes)

    def began(self) -> float:
        """Returns the start of the last push or raw copy, by the host's clock."""
        return self._began

    def close(self) -> None:
        self._transport.close()
        self._raw.close()


def serve(name: str, num_blocks: int, told: Any, pipe: Connection) -> None:
    """Runs the sender's process."""
    KINDS[name].prepare("sender")
    sender = Sender(KINDS[name], num_blocks, told)
    pipe.send(None)
    while True:
        call, *arguments = pipe.recv()
        answer = getattr(sender, call)(*arguments)
        if call not in ("push", "send_raw"):
            pipe.send(answer)
        if call == "close":
            return


class Pair:
    """The receiving worker in this process, and the sending one in another."""

    def __init__(self, kind: Kind, num_blocks: int) -> None:
        kind.prepare("receiver")
        self._told_at = 0.0
        self._landed = threading.Event()
        self._transport = make_transports(kind, num_blocks, self._notify)
        self._raw = kind.raw_receiver(num_blocks * _BLOCK_BYTES)
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        arguments = (kind.name, num_blocks, self._raw.told, theirs)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        self._answer()
        self._number = 0

    def raw(self, num_blocks: int) -> float:
        """Returns the seconds of the raw copy."""
        self._pipe.send(("send_raw", num_blocks * _BLOCK_BYTES))
        self._raw.receive(num_blocks * _BLOCK_BYTES)
        ended = time.monotonic()
        return ended - self._call("began")

    def transfer(self, num_blocks: int, count: int, checksum: bool) -> float:
        """Returns the seconds from the first push to the last byte in its block, of this many transfers at once."""
        numbers = range(self._number + 1, self._number + count + 1)
        self._number += count
        addresses = [address.SerializeToString() for address in self._transport.addresses]
        for index, number in enumerate(numbers):
            first = index * num_blocks
            self._transport.open(Inbound(number, 1, number, tuple(block_ids_of(number, first, num_blocks)), checksum))
            self._call("connect", number, addresses, checksum, first, num_blocks)
        time.sleep(0.02)
        self._pipe.send(("push", numbers[0], count))
        num_landed = 0
        while num_landed < count:
            if not self._landed.wait(_ANSWER_SECONDS):
                raise TimeoutError(f"{count - num_landed} of {count} transfers did not land")
            self._landed.clear()
            num_landed += sum(isinstance(event, Landed) for event in self._transport.poll())
        seconds = self._told_at - self._call("began")
        for number in numbers:
            self._call("forget", number)
        return seconds

    def close(self) -> None:
        """Closes the ends in both processes."""
        self._call("close")
        self._process.join(_ANSWER_SECONDS)
        self._transport.close()
        self._raw.close()

    def _notify(self) -> None:
        """Records the time of an event on the transport's thread, without the main thread's delay."""
        self._told_at = time.monotonic()
        self._landed.set()

    def _call(self, *call: Any) -> Any:
        self._pipe.send(call)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(_ANSWER_SECONDS):
            raise TimeoutError("the sender's process does not answer")
        return self._pipe.recv()


def measure(kind: Kind, sizes: list[int], counts: list[int], repeats: int, checks: bool) -> list[dict[str, Any]]:
    """Returns a record for each size in MiB and number at once."""
    pair = Pair(kind, max(counts) * max(1, (max(sizes) << 20) // _BLOCK_BYTES))
    try:
        return [
            {"kind": kind.name, **rates_of(pair, max(1, (size << 20) // _BLOCK_BYTES), count, repeats, checks)}
            for count in counts
            for size in sizes
        ]
    finally:
        pair.close()


def rates_of(pair: Pair, num_blocks: int, count: int, repeats: int, checks: bool) -> dict[str, Any]:
    """Returns median rates in GB/s. Raw, plain and, if requested, checked transfers take turns."""
    runs: dict[str, Callable[[], float]] = {
        "raw": lambda: pair.raw(count * num_blocks),
        "plain": lambda: pair.transfer(num_blocks, count, False),
    }
    if checks:
        runs["checked"] = lambda: pair.transfer(num_blocks, count, True)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            taken = run()
            if repeat:  # the first warms up
                seconds[name].append(taken)
    num_bytes = num_blocks * _BLOCK_BYTES
    rates = {name: count * num_bytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    return {"mib": num_bytes >> 20, "at_once": count, "gb_per_second": rates}


def row_of(record: dict[str, Any]) -> list[str]:
    """Returns a line of the table."""
    rates = record["gb_per_second"]
    shown = [f"{rates['raw']:.2f}"]
    for name in ("plain", "checked"):
        shown += [f"{rates[name]:.2f}", f"{rates[name] / rates['raw']:.0%}"] if name in rates else ["", ""]
    return [record["kind"], str(record["mib"]), str(record["at_once"]), *shown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="tcp,ipc", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--mib", default="2,16,64,128,256", help="sizes of transfers in MiB")
    parser.add_argument("--at-once", default="1", help="numbers of transfers at once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checks", action=argparse.BooleanOptionalAction, default=True, help="with checksums too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unknown = [name for name in options.kinds.split(",") if name not in KINDS]
    if unknown:
        parser.error(f"--kinds: {unknown[0]!r} is none of {', '.join(KINDS)}")
    sizes = [int(size) for size in options.mib.split(",")]
    counts = [int(count) for count in options.at_once.split(",")]
    facts = machine_facts(["numpy", "torch"])
    kinds = [KINDS[name] for name in options.kinds.split(",")]
    records = [record for kind in kinds for record in measure(kind, sizes, counts, options.repeats, options.checks)]
    print(facts_line(facts))
    header = ["kind", "MiB", "at once", "raw GB/s", "plain GB/s", "of raw", "checked GB/s", "of raw"]
    print(render_table(header, [row_of(record) for record in records], markdown=True))
    write_json(options.json, {"facts": facts, "records": records})


if __name__ == "__main__":
    main()
