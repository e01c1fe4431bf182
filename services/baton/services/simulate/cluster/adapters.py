"""A simulated worker's LoRA adapters: the shipped pool, and loads that end on the worker's clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.worker.core import AdapterRef
from baton.worker.engine.adapters.loads import Ended
from baton.worker.executors.sim.adapters import SimAdapters, digest_of


@dataclass(frozen=True, slots=True)
class AdapterMemorySettings:
    """Of each worker. The defaults are rank 16 on all linears of an 8B model, 84 MB, from a network disk."""

    num_slots: int = 16
    num_host: int = 64
    read_seconds: float = 0.3  # from files to host memory
    write_seconds: float = 0.004  # from there to the device
    num_parallel: int = 2  # loads at a time

    def validate(self) -> None:
        """Raises InvalidRequest for values that cannot be."""
        for name in ("num_slots", "num_host", "num_parallel"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 1", field=name)
        for name in ("read_seconds", "write_seconds"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must not be negative", field=name)


def adapter_ref(name: str) -> AdapterRef:
    """Returns the adapter of a name, which is its path too."""
    return AdapterRef(name, name, digest_of(name))


class VirtualAdapters(SimAdapters):
    """Adapters whose loads take no time by themselves: VirtualLoads counts it."""

    def __init__(self, settings: AdapterMemorySettings) -> None:
        super().__init__(settings.num_slots, 0.0, 0.0, lambda seconds: None)


class VirtualLoads:
    """Implements Loads: a few at a time, in their order, each for as long as such loads take."""

    def __init__(self, settings: AdapterMemorySettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._free_at = [0.0] * settings.num_parallel  # a heap: when each place is free
        self._running: list[tuple[float, int, Ended]] = []  # a heap, by the end
        self._serial = 0

    @property
    def due(self) -> float | None:
        return self._running[0][0] if self._running else None

    def start(self, key: object, work: Callable[[], Any]) -> None:
        result = work()
        seconds = self._settings.write_seconds if result is None else self._settings.read_seconds
        ends = max(self._clock(), self._free_at[0]) + seconds
        heapq.heapreplace(self._free_at, ends)
        self._serial += 1
        heapq.heappush(self._running, (ends, self._serial, Ended(key, result, None, seconds)))

    def take(self) -> list[Ended]:
        ended = []
        while self._running and self._running[0][0] <= self._clock():
            ended.append(heapq.heappop(self._running)[2])
        return ended

    def close(self) -> None:
        self._running.clear()
