"""A bulk path on the CPU, in one process, whose copies run later and in order, like those of a device's streams.

A copy reads the blocks, the slot's block ids and the slot when it runs. Each slot has one event: when it is recorded
again, it represents the later copy.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from support.transfer.transport_ends import HostKv

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockId
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import Announce, Slots

NUM_SLOTS = 3


class Stream:
    """Runs queued work in order, each after a pause."""

    def __init__(self, seed: int, longest_pause: float) -> None:
        self._random = random.Random(seed)
        self._longest_pause = longest_pause
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.num_queued = 0
        self.num_done = 0
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self.num_queued += 1
        self._queue.put(work)

    def end(self) -> None:
        """Ends the stream after queued work."""
        self._queue.put(None)
        self._thread.join(10.0)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self._random.random() * self._longest_pause)
            work()
            self.num_done += 1


class Event:
    """An event of a stream, which can be recorded again."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._number = 0

    def record(self) -> Event:
        self._number = self._stream.num_queued
        return self

    def done(self) -> bool:
        return self._stream.num_done >= self._number

    def wait(self, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() >= ends:
                return False
            time.sleep(1e-4)
        return True


class StreamPath:
    """Implements BulkPath. Both ends are in one process: a blob is an index in the shared `receivers`."""

    def __init__(
        self, executor: HostKv, slot_bytes: int, receivers: dict[int, StreamReceiver], longest_pause: float
    ) -> None:
        self._executor = executor
        self._slot_bytes = slot_bytes
        self._receivers = receivers
        self._longest_pause = longest_pause
        self._numbers = itertools.count(1)

    def offer(self) -> bytes:
        return b""

    def accept(self, offer: bytes) -> StreamReceiver:
        number = next(self._numbers)
        stream = Stream(number, self._longest_pause)
        receiver = self._receivers[number] = StreamReceiver(self._executor, self._slot_bytes, number, stream)
        return receiver

    def connect(self, slots: Slots) -> StreamSender:
        receiver = self._receivers[int.from_bytes(slots.blob, "little")]
        return StreamSender(self._executor, receiver, Stream(len(self._receivers), self._longest_pause))

    def close(self) -> None:
        """Does nothing, because the ends own all resources."""


class StreamReceiver:
    """Implements BulkReceiver, with counters of its slots."""

    writes_ahead = True

    def __init__(self, executor: HostKv, slot_bytes: int, number: int, stream: Stream) -> None:
        self._kv = executor.kv_bytes
        self._stream = stream
        self._events = [Event(stream) for _ in range(NUM_SLOTS)]
        self._ids: list[list[BlockId]] = [[] for _ in range(NUM_SLOTS)]
        self._expected = [0] * NUM_SLOTS
        self._aborted = False
        self.memory = np.zeros((NUM_SLOTS, slot_bytes), np.uint8)
        self.counters = [0] * NUM_SLOTS
        self.slots = Slots(NUM_SLOTS, slot_bytes, number.to_bytes(4, "little"))

    def announced(self, slot: int, num_bytes: int) -> None:
        self._expected[slot] += 1

    def take(self, slot: int, num_bytes: int) -> None:
        raise AssertionError("no piece here has a checksum")

    def checksum(self, slot: int, num_bytes: int) -> int:
        raise AssertionError("no piece here has a checksum")

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> _Written:
        expected = self._expected[slot]
        self._ids[slot] = list(block_ids)

        def scatter() -> None:
            while self.counters[slot] < expected and not self._aborted:
                time.sleep(1e-4)
            ids = self._ids[slot]
            shape = len(ids), len(layers), self._kv.shape[2]
            values = self.memory[slot, : np.prod(shape)].reshape(shape)
            for index, layer in enumerate(layers):
                self._kv[layer, ids] = values[:, index]

        self._stream.put(scatter)
        return _Written(self, self._events[slot].record())

    @property
    def aborted(self) -> bool:
        return self._aborted

    def abort(self) -> None:
        self._aborted = True

    def close(self, sender_gone: bool) -> None:
        self.abort()
        self._stream.end()


class _Written:
    def __init__(self, receiver: StreamReceiver, event: Event) -> None:
        self._receiver = receiver
        self._event = event

    def done(self) -> bool:
        return self._checked(self._event.done())

    def wait(self, seconds: float) -> bool:
        return self._checked(self._event.wait(seconds))

    def _checked(self, done: bool) -> bool:
        if done and self._receiver.aborted:
            raise DataLoss("the connection was cut while a piece was on its way")
        return done


class StreamSender:
    """Implements BulkSender."""

    announces_first = True

    def __init__(self, executor: HostKv, receiver: StreamReceiver, stream: Stream) -> None:
        self._kv = executor.kv_bytes
        self._receiver = receiver
        self._stream = stream
        self._events = [Event(stream) for _ in range(NUM_SLOTS)]
        self._ids: list[list[BlockId]] = [[] for _ in range(NUM_SLOTS)]

    def put(self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce) -> Event:
        layers = range(piece.layer, piece.layer + piece.num_layers)
        self._ids[slot] = list(piece.block_ids)

        def gather() -> None:
            ids = self._ids[slot]
            values = np.stack([self._kv[layer, ids] for layer in layers], axis=1).reshape(-1)
            self._receiver.memory[slot, : len(values)] = values

        def count() -> None:
            self._receiver.counters[slot] += 1

        self._stream.put(gather)
        announce()
        self._stream.put(count)
        return self._events[slot].record()

    def abort(self) -> None:
        """Does nothing, because copies end by themselves."""

    def close(self) -> None:
        self._stream.end()
