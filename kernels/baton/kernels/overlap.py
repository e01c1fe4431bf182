"""Programmatic dependent launch: a kernel may start before the previous one has ended (Hopper and newer).

A kernel with OVERLAP first allows its successor to start, then waits for its predecessor before it accesses memory that
other kernels write or read. Only weights may be read earlier. Every program must wait, or the successor could overtake
the predecessor.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def overlaps(tensor: Tensor) -> bool:
    """Returns whether kernels on the tensor's device may overlap."""
    return tensor.is_cuda and _supports_overlap(tensor.device.index)


@cache
def _supports_overlap(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= (9, 0)
