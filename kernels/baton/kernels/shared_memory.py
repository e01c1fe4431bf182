"""How much shared memory a program may take: 227 KB on data-centre cards since Hopper, 99 KB on many others."""

from __future__ import annotations

from functools import cache

import torch

_HOPPER = 227 * 1024  # what the interpreter pretends to have


def shared_memory(device: torch.device) -> int:
    """Bytes a program."""
    return _of_card(device.index) if device.type == "cuda" else _HOPPER


@cache
def _of_card(device_index: int | None) -> int:
    return int(torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin)
