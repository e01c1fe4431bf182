"""The memory of this process, as its C library reports it."""

from __future__ import annotations

import ctypes
from pathlib import Path


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    """Returns the allocated bytes; without glibc, the resident set size."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return _of_statm(1)
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def address_space_bytes() -> int:
    """Returns the size of the address space; 0 if unknown."""
    return _of_statm(0)


def _of_statm(column: int) -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[column]) * 4096
    except OSError:
        return 0
