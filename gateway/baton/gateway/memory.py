"""Returns memory to the system after large requests, because the C library would keep it."""

from __future__ import annotations

import asyncio
import ctypes
import sys

LARGE_BYTES = 1 << 20
_TRIM_SECONDS = 0.2  # delay after the work, so that its objects are freed and other work may end too
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
_KEPT_BYTES = 8 << 20


def trim_memory() -> None:
    """Returns free memory to the system. Does nothing without glibc."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def return_large_blocks() -> None:
    """Makes glibc return every large block when it is freed. Does nothing without glibc.

    By default glibc raises its threshold with every larger block: after a body of 16 MB the memory would stay
    allocated.
    """
    set_option = _glibc("mallopt")
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class Trimmer:
    """Trims memory shortly after large work, once for all work that ends in the meantime."""

    def __init__(self) -> None:
        self._is_due = False

    def trim_soon(self) -> None:
        """Schedules a trim without waiting. Needs a running event loop."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
