"""Memory that large work took, given back to the system: the C library would keep it."""

from __future__ import annotations

import asyncio
import ctypes
import sys

LARGE_BYTES = 1 << 20
_TRIM_SECONDS = 0.2  # after the work: what held its objects has ended, and more may have
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 8 << 20


def trim_memory() -> None:
    """Returns free memory to the system, where the C library is glibc."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def return_large_blocks() -> None:
    """Has every large block returned when it is freed, where the C library is glibc.

    Left alone, it raises its threshold with every larger block: a body of 16 MB would stay with the process.
    """
    set_option = _glibc("mallopt")
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class Trimmer:
    """Trims soon after large work, once for all that ends meanwhile."""

    def __init__(self) -> None:
        self._is_due = False

    def trim_soon(self) -> None:
        """Waits for nothing; needs a running event loop."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
