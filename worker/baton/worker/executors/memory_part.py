"""The parts of an executor's memory that sleep and wake up. Their numbers are those of the contract."""

from __future__ import annotations

import enum

from baton.rpc.errors import Unsupported
from baton.v1 import control_pb2


class MemoryPart(enum.IntEnum):
    """A part of the memory that is released in sleep."""

    WEIGHTS = control_pb2.MEMORY_PART_WEIGHTS
    KV_CACHE = control_pb2.MEMORY_PART_KV_CACHE

    @property
    def number(self) -> control_pb2.MemoryPart.ValueType:
        """Returns the part's number in the contract."""
        return control_pb2.MemoryPart.ValueType(self.value)


ALL_PARTS = frozenset(MemoryPart)


def require_all(parts: frozenset[MemoryPart], executor: str) -> None:
    """Raises Unsupported unless all parts wake up, for an executor that wakes up as a whole."""
    if parts != ALL_PARTS:
        raise Unsupported(f"executor={executor} wakes up as a whole: name both weights and kv_cache, or no part")
