"""Transfers whose copies run long after they were queued, and whose blocks serve others as soon as they may."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from support.transfer.stream_path import StreamPath
from support.transfer.transport_ends import NUM_LAYERS, End, Ends, HostKv, inbound, outbound, piece_of, wait_until

from baton.worker.core import BlockId
from baton.worker.transfer.base import InboundFenced, Landed, Pushed, PushFenced

_NUM_BLOCKS = 96
_SLOT_BYTES = 1 << 14
_AT_ONCE = 6


@dataclass(eq=False)
class _Transfer:
    source: list[BlockId]
    target: list[BlockId]
    content: np.ndarray  # [layers, blocks, bytes]
    is_pushed: bool = False  # or its push is fenced
    has_landed: bool = False  # or it is fenced
    is_fenced: bool = False


class _Pool:
    """Which blocks are free; those that are become garbage at once."""

    def __init__(self, executor: HostKv, seed: int) -> None:
        self._kv = executor.kv_bytes
        self._random = np.random.default_rng(seed)
        self._free = [BlockId(i) for i in range(_NUM_BLOCKS)]

    def take(self, count: int) -> list[BlockId]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, block_ids: list[BlockId]) -> None:
        self.fill(block_ids)
        self._free += block_ids
        self._random.shuffle(self._free)

    def fill(self, block_ids: list[BlockId]) -> np.ndarray:
        content = self._random.integers(0, 256, (NUM_LAYERS, len(block_ids), self._kv.shape[2]), np.uint8)
        self._kv[:, block_ids] = content
        return content


class _Churn:
    """Keeps transfers going between two ends."""

    def __init__(self, sender: End, receiver: End, seed: int) -> None:
        self._sender, self._receiver = sender, receiver
        self._random = random.Random(seed)
        self._sources, self._targets = _Pool(sender.executor, seed), _Pool(receiver.executor, seed + 1)
        self._open: dict[int, _Transfer] = {}
        self._number = 0
        self._pushers: list[threading.Thread] = []
        self.num_landed = 0

    def run(self, count: int) -> None:
        while self._number < count or self._open:
            while self._number < count and len(self._open) < _AT_ONCE:
                self._begin()
            self._sender.woken.wait(0.001)
            self._sender.woken.clear()
            self._look()
        for thread in self._pushers:
            thread.join()

    def _begin(self) -> None:
        self._number += 1
        number, size = self._number, self._random.randint(1, 12)
        source, target = self._sources.take(size), self._targets.take(size)
        self._open[number] = _Transfer(source, target, self._sources.fill(source))
        self._receiver.transport.open(inbound(target, number, number, checksum=False))
        self._sender.transport.connect(outbound(self._receiver, number, number, number, checksum=False))
        pusher = threading.Thread(target=self._push, args=(number, source, self._random.randint(1, size)))
        pusher.start()
        self._pushers.append(pusher)
        kind = self._random.random()
        if kind < 0.15:
            self._open[number].is_fenced = True
            self._receiver.transport.fence_inbound(number)
        elif kind < 0.3:
            self._open[number].is_fenced = True
            self._sender.transport.fence_outbound(number)

    def _push(self, number: int, source: list[BlockId], size: int) -> None:
        for first in range(0, len(source), size):
            piece = piece_of(0, first, source[first : first + size], NUM_LAYERS)
            self._sender.transport.push(number, piece)
        self._sender.transport.finish(number)

    def _look(self) -> None:
        for event in self._sender.transport.poll():
            assert isinstance(event, Pushed | PushFenced), event
            one = self._open.get(event.push_id)
            if one is None or one.is_pushed:
                assert isinstance(event, PushFenced), event  # it was all sent before
                continue
            one.is_pushed = True
            self._sources.give_back(one.source)
            if isinstance(event, PushFenced):
                self._receiver.transport.fence_inbound(event.push_id)
        for event in self._receiver.transport.poll():
            if isinstance(event, InboundFenced) and event.transfer_id not in self._open:
                continue  # it had landed, and was over
            assert isinstance(event, Landed | InboundFenced), event
            one = self._open[event.transfer_id]
            if isinstance(event, Landed):
                kv_bytes = self._receiver.executor.kv_bytes
                assert np.array_equal(kv_bytes[:, one.target], one.content), f"transfer {event.transfer_id}"
                self.num_landed += 1
            if not one.has_landed:
                one.has_landed = True
                self._targets.give_back(one.target)
            if not one.is_pushed and one.is_fenced:
                self._sender.transport.fence_outbound(event.transfer_id)
        for number in [number for number, one in self._open.items() if one.is_pushed and one.has_landed]:
            self._sender.transport.forget(number)
            del self._open[number]


@pytest.fixture
def many():
    made = Ends()
    yield made
    made.close()


@pytest.mark.parametrize("longest_pause", [0.0, 3e-4, 2e-3])
@pytest.mark.parametrize("seed", [1, 2])
def test_blocks_are_reused_as_early_as_allowed_and_no_transfer_gets_others_kv(many, longest_pause, seed):
    receivers = {}
    sender, receiver = [
        many.make(executor, paths={"ipc": StreamPath(executor, _SLOT_BYTES, receivers, longest_pause)})
        for executor in (HostKv(_NUM_BLOCKS), HostKv(_NUM_BLOCKS))
    ]
    churn = _Churn(sender, receiver, seed)
    churn.run(400)
    assert churn.num_landed > 200
    wait_until(lambda: sender.transport.totals().num_sent_pieces)
