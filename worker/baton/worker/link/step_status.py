"""What the engine's device is at, as its front can read it whatever the engine does. Knows no step and no clock."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Self

_RECORD = struct.Struct("=Qd")


class StepBoard:
    """A few bytes that two processes share: one writes, one reads.

    A read amid a write may give a number and a limit that do not belong together; the next one puts it right.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        self._memory = bytearray(_RECORD.size) if memory is None else memory
        self._number = 0

    @classmethod
    def at(cls, descriptor: int) -> Self:
        """The board in a file of `new_file`, which may be closed then."""
        return cls(mmap.mmap(descriptor, _RECORD.size))

    @staticmethod
    def new_file() -> int:
        """A file for one board, in memory where the system has such files. Returns its descriptor."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("step-board")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _RECORD.size)
        return descriptor

    def begin(self, limit_seconds: float) -> None:
        """The device begins with something that takes no longer. 0: with nothing, or with what may take any time."""
        self._number += 1
        _RECORD.pack_into(self._memory, 0, self._number, limit_seconds)

    def read(self) -> tuple[int, float]:
        """A number that grows with each `begin`, and its limit."""
        number, limit = _RECORD.unpack_from(self._memory, 0)
        return number, limit
