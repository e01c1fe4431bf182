"""Memory that large work took, given back to the system: the C library would keep it."""

from __future__ import annotations

import ctypes
import sys


def trim_memory() -> None:
    """Returns free memory to the system, where the C library is glibc."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
