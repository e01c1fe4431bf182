"""The slots of staging memory on a CUDA device that senders fill, each region for one sender at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from baton.rpc.errors import NoCapacity
from baton.worker.transfer.kinds.cuda_memory import DeviceMemory

# After a sender's end of the connection is closed: a process that dies closes it before its last copies have ended.
QUARANTINE_SECONDS = 1.0


class Regions:
    """Regions of the same size, made when they are needed and used again."""

    def __init__(self, region_bytes: int, max_regions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._region_bytes = region_bytes
        self._max_regions = max_regions
        self._clock = clock
        self._all: list[DeviceMemory] = []
        self._free: deque[tuple[float, DeviceMemory]] = deque()  # from when on it may serve again
        self._lock = threading.Lock()

    def take(self) -> DeviceMemory:
        """One that nobody else can write. Raises NoCapacity when all are in use."""
        with self._lock:
            if self._free and self._free[0][0] <= self._clock():
                return self._free.popleft()[1]
            if len(self._all) >= self._max_regions:
                raise NoCapacity(
                    f"{self._max_regions} senders have staging memory here, more get none", retry_after_ms=1000
                )
            region = DeviceMemory(self._region_bytes)
            self._all.append(region)
            return region

    def give_back(self, region: DeviceMemory) -> None:
        """Its sender is gone."""
        with self._lock:
            self._free.append((self._clock() + QUARANTINE_SECONDS, region))

    def close(self) -> None:
        """Frees those that nobody uses; the process's end frees the rest."""
        with self._lock:
            free, self._free = self._free, deque()
        for _, region in free:
            region.close()
