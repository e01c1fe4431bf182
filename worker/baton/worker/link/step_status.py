"""The step that the engine's device computes, in memory that the front reads even while the engine is blocked."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Self

_RECORD = struct.Struct("=Qd")


class StepStatus:
    """A few bytes that two processes share: one writes, one reads.

    A read during a write may return a number and a limit of two different steps; the next read corrects that.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        self._memory = bytearray(_RECORD.size) if memory is None else memory
        self._number = 0

    @classmethod
    def at(cls, descriptor: int) -> Self:
        """Maps a file that `new_file` made. The descriptor may be closed afterwards."""
        return cls(mmap.mmap(descriptor, _RECORD.size))

    @staticmethod
    def new_file() -> int:
        """Creates the shared file, in memory where the system supports that. Returns its descriptor."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("step-status")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _RECORD.size)
        return descriptor

    def begin(self, limit_seconds: float) -> None:
        """Records that the device begins work of at most `limit_seconds`. 0: it is idle, or there is no limit."""
        self._number += 1
        _RECORD.pack_into(self._memory, 0, self._number, limit_seconds)

    def read(self) -> tuple[int, float]:
        """Returns a number that grows with each `begin`, and the limit."""
        number, limit = _RECORD.unpack_from(self._memory, 0)
        return number, limit
