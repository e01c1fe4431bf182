"""The shared memory of a program: 227 KB on data-center GPUs since Hopper, 99 KB on many others."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

_HOPPER = 227 * 1024  # also used by the interpreter


def shared_memory(device: torch.device) -> int:
    """Returns the bytes per program."""
    return _of_card(device.index) if device.type == "cuda" else _HOPPER


@cache
def _of_card(device_index: int) -> int:
    return int(driver.active.utils.get_device_properties(device_index)["max_shared_mem"])
