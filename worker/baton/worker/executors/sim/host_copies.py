"""The simulator's host memory. Its copies take time, and read and write at the worst times that a device might.

A copy out reads its block as late as before the next step, or at its end. A copy in overwrites its blocks with nonsense
at once, and with the contents at its end. So the output changes if a block is reused too early, or read before it has
landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.worker.core import BlockId, HostSlot
from baton.worker.executors.base import LandedCopies, RestoreCopy
from baton.worker.executors.sim.kv import SimKv, UInt64

_NONSENSE = np.uint64(0xA5A5A5A5A5A5A5A5)


@dataclass(slots=True)
class _Out:
    copies: Sequence[tuple[BlockId, HostSlot]]
    num_before: int  # steps launched before it
    begins: float
    ends: float
    read: bool = False


@dataclass(slots=True)
class _In:
    restore: RestoreCopy
    num_before: int  # steps that must be computed before it
    seconds: float
    ends: float


class SimHost:
    """Implements baton.worker.executors.base.HostCopies. One copy at a time in each direction."""

    def __init__(
        self,
        kv: SimKv,
        num_slots: int,
        staging_blocks: int,
        seconds_per_block: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.num_slots = num_slots
        self.num_launched = 0  # steps; updated by the executor
        self._kv = kv
        self._words: UInt64 = np.zeros((num_slots, len(kv.words), kv.block_size), np.uint64)
        self._staging_blocks = staging_blocks
        self._seconds_per_block = seconds_per_block
        self._clock = clock
        self._sleep = sleep
        self._num_computed = 0
        self._out: deque[_Out] = deque()
        self._in: deque[_In] = deque()

    def capacity(self) -> int:
        """Returns the free blocks of staging memory."""
        return self._staging_blocks - sum(len(out.copies) for out in self._out)

    def offload(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> None:
        """Queues copies to the host after the steps launched so far."""
        begins = max(self._clock(), self._out[-1].ends if self._out else 0.0)
        ends = begins + len(copies) * self._seconds_per_block
        self._out.append(_Out(copies, self.num_launched, begins, ends))

    def restore(self, restore: RestoreCopy) -> None:
        """Queues copies from the host."""
        seconds = len(restore.copies) * self._seconds_per_block
        begins = max(self._clock(), self._in[-1].ends if self._in else 0.0)
        self._in.append(_In(restore, self.num_launched if restore.fenced else 0, seconds, begins + seconds))
        if not restore.fenced:
            self._blocks()[:, [block_id for _, block_id in restore.copies]] = _NONSENSE

    def slot_bytes(self, slot: HostSlot) -> memoryview:
        return memoryview(self._words[slot].reshape(-1).view(np.uint8))

    def hurry(self) -> None:
        """Does nothing."""

    def poll(self) -> LandedCopies:
        """Returns the copies that have landed since the last call."""
        landed = LandedCopies()
        now = self._clock()
        while self._out and self._out[0].ends <= now and self._out[0].num_before <= self._num_computed:
            out = self._out.popleft()
            self._read(out)
            landed.slots += [slot for _, slot in out.copies]
            landed.offload_seconds += out.ends - out.begins
        while self._in and self._in[0].ends <= now and self._in[0].num_before <= self._num_computed:
            arrived = self._in.popleft()
            copies = arrived.restore.copies
            words = self._words[[slot for slot, _ in copies]]
            self._blocks()[:, [block_id for _, block_id in copies]] = words.swapaxes(0, 1)
            landed.restores.append((arrived.restore.restore_id, arrived.seconds))
        return landed

    def wait(self, seconds: float) -> None:
        """Sleeps until a restore lands, or for `seconds`."""
        if self._in:
            seconds = min(seconds, self._in[0].ends - self._clock())
        if seconds > 0:
            self._sleep(seconds)

    def before_step(self) -> None:
        """Reads the blocks of copies out that precede the next step. Called before each step."""
        for out in self._out:
            if out.num_before <= self._num_computed:
                self._read(out)
        self._num_computed += 1

    def _read(self, out: _Out) -> None:
        if not out.read:
            out.read = True
            words = self._blocks()[:, [block_id for block_id, _ in out.copies]]
            self._words[[slot for _, slot in out.copies]] = words.swapaxes(0, 1)

    def _blocks(self) -> UInt64:
        """Returns the pool itself, [num_layers, num_blocks, block_size]."""
        return self._kv.words.reshape(len(self._kv.words), -1, self._kv.block_size)
