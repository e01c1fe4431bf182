"""The simulator's adapters: nothing is read but a path, and loading takes the time that a device would need."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from baton.rpc.errors import NotFound
from baton.worker.adapters.memory import HostAdapter

_BYTES = 84 << 20  # rank 16 on all linears of an 8B model
_RANK = 16


def digest_of(path: str) -> bytes:
    """Returns the digest of the adapter at a path."""
    return hashlib.blake2b(path.encode(), digest_size=16, person=b"baton-sim-lora").digest()


@dataclass(frozen=True, slots=True)
class SimAdapter:
    """Implements HostAdapter."""

    digest: bytes
    rank: int = _RANK
    num_bytes: int = _BYTES


class SimAdapters:
    """Implements AdapterMemory. Any path but an empty one is an adapter; its digest is of the path."""

    def __init__(
        self, num_slots: int, read_seconds: float, write_seconds: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.num_slots = num_slots
        self.salts = np.zeros(num_slots + 1, np.uint64)  # that change a row's output, by its slot; the last is 0
        self._read_seconds = read_seconds
        self._write_seconds = write_seconds
        self._sleep = sleep

    def digest(self, path: str) -> bytes:
        if not path:
            raise NotFound("lora_path is empty; give a folder", field="lora_path")
        return digest_of(path)

    def read(self, path: str) -> SimAdapter:
        adapter = SimAdapter(self.digest(path))
        self._sleep(self._read_seconds)
        return adapter

    def write(self, slot: int, adapter: HostAdapter) -> None:
        self._sleep(self._write_seconds)
        self.salts[slot] = int.from_bytes(cast(SimAdapter, adapter).digest[:8], "little") | 1
