"""Host memory for evicted blocks, for a pool that is in host memory too. A copy is complete when it is started."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

import numpy as np

from baton.rpc.errors import InvalidRequest
from baton.worker.core import BlockId, HostSlot
from baton.worker.executors.base import LandedCopies, RestoreCopy
from baton.worker.executors.host.kv_memory import KvMemory, free_pages, reserve
from baton.worker.executors.host.resources import usable_memory


class HostMemory:
    """Implements baton.worker.executors.base.HostCopies. A slot holds the layers of a block, one after the other."""

    def __init__(self, memory: KvMemory, num_slots: int) -> None:
        self.num_slots = num_slots
        self._blocks = memory.pages  # [num_layers, num_blocks, bytes of one layer of a block]
        num_layers, _, size = self._blocks.shape
        pages = reserve_slots(num_slots, num_layers * size)
        self._pages = pages
        self._slots = np.frombuffer(pages, np.uint8).reshape(num_slots, num_layers, size)
        self._landed = LandedCopies()

    def capacity(self) -> int:
        """Returns the number of slots, because nothing is staged."""
        return self.num_slots

    def offload(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> None:
        started = time.perf_counter()
        for block_id, slot in copies:
            self._slots[slot] = self._blocks[:, block_id]
        self._landed.slots += [slot for _, slot in copies]
        self._landed.offload_seconds += time.perf_counter() - started

    def restore(self, restore: RestoreCopy) -> None:
        started = time.perf_counter()
        for slot, block_id in restore.copies:
            self._blocks[:, block_id] = self._slots[slot]
        self._landed.restores.append((restore.restore_id, time.perf_counter() - started))

    def slot_bytes(self, slot: HostSlot) -> memoryview:
        return memoryview(self._slots[slot].reshape(-1))

    def hurry(self) -> None:
        """Does nothing."""

    def poll(self) -> LandedCopies:
        """Returns the copies since the last call."""
        landed, self._landed = self._landed, LandedCopies()
        return landed

    def wait(self, seconds: float) -> None:
        """Returns at once, because no copy is in progress."""

    def free(self) -> int:
        """Frees the slots' pages. Returns their bytes."""
        return free_pages(self._pages)


def reserve_slots(num_slots: int, bytes_per_block: int) -> mmap.mmap:
    """Reserves memory for blocks. Raises InvalidRequest if this machine does not have enough."""
    num_bytes, usable = num_slots * bytes_per_block, usable_memory()
    if num_bytes >= usable:
        raise InvalidRequest(
            f"host_cache_gb={num_bytes / 1e9:.1f} is more than this machine's {usable / 1e9:.1f} GB of memory",
            field="host_cache_gb",
        )
    return reserve(num_bytes, f"{num_slots} host blocks", "host_cache_gb")
