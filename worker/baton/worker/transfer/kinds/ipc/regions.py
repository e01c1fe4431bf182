"""Staging memory on a CUDA device, in regions of slots. Each region serves one sender at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from baton.rpc.errors import NoCapacity
from baton.worker.transfer.kinds.cuda_memory import DeviceMemory

# After the sender closed its end: a process that dies closes it before its last copies have ended.
QUARANTINE_SECONDS = 1.0


class Regions:
    """Regions of one size, allocated on demand and reused."""

    def __init__(self, region_bytes: int, max_regions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._region_bytes = region_bytes
        self._max_regions = max_regions
        self._clock = clock
        self._all: list[DeviceMemory] = []
        self._free: deque[tuple[float, DeviceMemory]] = deque()  # with the time from which it may be reused
        self._lock = threading.Lock()

    def take(self) -> DeviceMemory:
        """Returns a region that no sender can write. Raises NoCapacity if all are in use."""
        with self._lock:
            if self._free and self._free[0][0] <= self._clock():
                return self._free.popleft()[1]
            if len(self._all) >= self._max_regions:
                raise NoCapacity(f"{self._max_regions} senders have staging memory, the maximum", retry_after_ms=1000)
            region = DeviceMemory(self._region_bytes)
            self._all.append(region)
            return region

    def give_back(self, region: DeviceMemory) -> None:
        """Frees a region whose sender is gone."""
        with self._lock:
            self._free.append((self._clock() + QUARANTINE_SECONDS, region))

    def close(self) -> None:
        """Frees the unused regions; the end of the process frees the rest."""
        with self._lock:
            free, self._free = self._free, deque()
        for _, region in free:
            region.close()
