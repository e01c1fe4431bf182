"""Whether a kernel may start while the one before it ends (programmatic dependent launch, Hopper and newer).

A kernel with OVERLAP first lets its successor start, then waits for its predecessor before it touches anything that
another kernel wrote or reads: only weights may be read earlier. Every program must wait, or the kernel behind could run
ahead of the kernel before.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def overlaps(tensor: Tensor) -> bool:
    """Whether kernels on the tensor's device overlap."""
    return tensor.is_cuda and _supports_overlap(tensor.device.index)


@cache
def _supports_overlap(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= (9, 0)
