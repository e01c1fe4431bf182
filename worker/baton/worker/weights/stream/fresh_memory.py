"""Memory of the host that was not written yet: its pages are given by the range, not by the first write to each."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

from torch import Tensor

_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
_LEAST_BYTES = 64 << 10  # a call costs more than the first writes to a few pages


def populate(tensor: Tensor) -> None:
    """Gives pages to the memory of a tensor, which the caller is about to write. Changes no content.

    Where the system cannot do it, the first writes do.
    """
    if tensor.nbytes < _LEAST_BYTES or not tensor.is_contiguous():
        return
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - first
    _madvise()(first, num_bytes, _POPULATE_WRITE)  # the kernel rounds the length up to whole pages


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """Returns the function of the C library, which lets other threads of Python run meanwhile."""
    if sys.platform != "linux":
        return lambda address, num_bytes, advice: 0
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call: Callable[[int, int, int], int] = function
    return call
