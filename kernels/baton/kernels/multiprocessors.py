"""The multiprocessors of a device, which persistent kernels fill with one program each."""

from __future__ import annotations

from functools import cache

import torch


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns their number; 1 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
