"""The blocks of an index in the order in which they came: blocks that follow each other in a prompt lie side by side.

A line is a block's fingerprint and its code. A lookup that has one block's line guesses those of the next blocks and
compares, so that whole prompts are read as a few pieces of memory. Wrong guesses are looked up in the table.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Fingerprints: TypeAlias = NDArray[np.uint64]  # [n], never 0
LineNumbers: TypeAlias = NDArray[np.int64]  # [n]
Codes: TypeAlias = NDArray[np.uint32]  # [n], never 0 for a stored block

Item = TypeVar("Item", bound=np.generic)

_MIN_FREE = 1024
# Capacity before the first copy: copying everything would delay lookups.
_RESERVED = 1 << 25
# MAP_NORESERVE has a name from Python 3.13 on.
_LAZILY: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000} if sys.platform == "linux" else {}


class Lines:
    """12 bytes a line. Lines of no block have fingerprint and code 0; a guess never meets them."""

    def __init__(self) -> None:
        self.fingerprints = zeros((_RESERVED,), np.uint64)
        self.codes = zeros((_RESERVED,), np.uint32)
        self._end = 0
        self._free = np.zeros(_MIN_FREE, np.uint32)  # of no block, in [:_num_free]
        self._num_free = 0

    @property
    def end(self) -> int:
        """Upper bound of all lines that were ever used."""
        return self._end

    @property
    def num_bytes(self) -> int:
        """Memory in use, without what is only reserved."""
        return self._end * 12 + self._free.nbytes

    def take(self, count: int) -> LineNumbers:
        """Returns lines for consecutive blocks, growing if possible."""
        reused = min(count, self._num_free)
        self._num_free -= reused
        fresh = count - reused
        while self._end + fresh > self.codes.size:
            self.fingerprints, self.codes = doubled(self.fingerprints), doubled(self.codes)
        begin, self._end = self._end, self._end + fresh
        lines = np.arange(begin - reused, self._end)
        if reused:
            lines[:reused] = self._free[self._num_free : self._num_free + reused]
        return lines

    def give(self, lines: LineNumbers) -> None:
        """Takes lines back, each once; they are empty from now on."""
        self.fingerprints[lines] = 0
        self.codes[lines] = 0
        end = self._num_free + lines.size
        if end > self._free.size:
            grown = np.zeros(max(end, 2 * self._free.size), np.uint32)
            grown[: self._num_free] = self._free[: self._num_free]
            self._free = grown
        self._free[self._num_free : end] = lines
        self._num_free = end


def zeros(shape: tuple[int, ...], dtype: type[Item]) -> NDArray[Item]:
    """Returns an array whose memory the system allocates only when it is written."""
    length = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, length, **_LAZILY)
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError):
        return np.zeros(shape, dtype)  # where address space is limited
    return np.frombuffer(memory, dtype).reshape(shape)


def doubled(array: NDArray[Item]) -> NDArray[Item]:
    """Doubles the array, with zeros at its end."""
    grown = zeros((2 * array.shape[0], *array.shape[1:]), array.dtype.type)
    grown[: array.shape[0]] = array
    return grown
