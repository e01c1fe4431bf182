"""KV between two processes that reuse blocks as early as allowed: no transfer gets another's KV."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.transfer.gpu_pairs import other_end
from support.transfer.kv_pusher import EPOCH, GENERATION, WAIT_SECONDS, make_pool, make_transports
from support.transfer.kv_source import Blocks, KvSource, content_of

from baton.worker.core import BlockId
from baton.worker.transfer.base import Inbound, InboundFenced, Landed, PushFenced

NUM_TRANSFERS = 1500
_AT_ONCE = 6
_MOST_BLOCKS = 12  # all at once are fewer than the pools have
_FENCED = 0.3  # of all, at either end

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@dataclass(eq=False)
class _Transfer:
    number: int
    block_ids: list[BlockId]
    has_landed: bool = False  # or it is fenced
    has_left: bool = False  # or it is fenced there


class _Churn:
    """Keeps transfers from a KvSource of another process going into blocks of this one."""

    def __init__(self, kind: str, seed: int) -> None:
        pool = make_pool(2)
        self._blocks = Blocks(pool)
        self._transports = make_transports(kind, pool)
        (address,) = self._transports.addresses
        self._sender = other_end(KvSource, kind, address)
        self._random = random.Random(seed)
        self._open: dict[int, _Transfer] = {}
        self._num_begun = 0  # pushes whose call is not yet answered
        self._sender.wait_ready()
        self.num_landed = 0

    def run(self, count: int) -> None:
        begun = 0
        moved_at = time.monotonic()
        while begun < count or self._open:
            while begun < count and len(self._open) < _AT_ONCE:
                begun += 1
                self._begin(begun)
            if self._look():
                moved_at = time.monotonic()
            assert time.monotonic() < moved_at + WAIT_SECONDS, f"nothing more was told of {sorted(self._open)}"

    def close(self) -> None:
        self._sender.kill()
        self._transports.close()

    def _begin(self, number: int) -> None:
        size = self._random.randint(1, _MOST_BLOCKS)
        one = self._open[number] = _Transfer(number, self._blocks.take(size))
        self._transports.open(Inbound(number, EPOCH, GENERATION, tuple(one.block_ids), False))
        fenced = self._random.random() < _FENCED
        at_sender = fenced and self._random.random() < 0.5
        self._sender.begin("push", number, size, self._random.randint(1, size), at_sender)
        self._num_begun += 1
        if fenced and not at_sender:
            time.sleep(self._random.choice((0.0, 1e-3)))
            self._transports.fence_inbound(number)

    def _look(self) -> bool:
        """Whether anything happened."""
        events = self._transports.poll()
        for event in events:
            if isinstance(event, InboundFenced) and event.transfer_id not in self._open:
                continue  # it had landed, and was over
            assert isinstance(event, Landed | InboundFenced), event
            one = self._open[event.transfer_id]
            if isinstance(event, Landed):
                assert self._blocks.hold(one.block_ids, content_of(one.number, len(one.block_ids))), one.number
                self.num_landed += 1
            if not one.has_landed:
                one.has_landed = True
                self._blocks.give_back(one.block_ids)
        answered = False
        for number in self._answered():
            answered = self._open[number].has_left = True
        for one in [one for one in self._open.values() if one.has_landed and one.has_left]:
            del self._open[one.number]
        return bool(events) or answered

    def _answered(self) -> Iterator[int]:
        """Which transfers' blocks are free at the sender. Those that it fenced come no more."""
        self._sender.begin("events")
        while self._num_begun:
            self._sender.result()
            self._num_begun -= 1
        for event in self._sender.result():
            yield event.push_id
            if isinstance(event, PushFenced):
                self._transports.fence_inbound(event.push_id)


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_no_transfer_gets_blocks_that_are_not_its(kind: str) -> None:
    churn = _Churn(kind, seed=1)
    try:
        churn.run(NUM_TRANSFERS)
    finally:
        churn.close()
    assert churn.num_landed > NUM_TRANSFERS / 2
