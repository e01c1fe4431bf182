"""Two processes that move KV to each other, each with a GPU of its own, or both with the only one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.processes.child import Child

_HAS_TWO = torch.cuda.device_count() > 1


def environ_of(end: int) -> dict[str, str]:
    """Returns the variables that make a process the pair's end 0 or 1.

    NCCL accepts two ranks on one GPU only if each reports another host (NCCL_HOSTID, in NCCL's user guide). They then
    exchange data over sockets.
    """
    if _HAS_TWO:
        return {"CUDA_VISIBLE_DEVICES": str(end)}
    return {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": f"end-{end}"}


def other_end(factory: Callable[..., object], *arguments: Any) -> Child:
    """Starts a process that is the end 1."""
    return Child(factory, *arguments, environ=environ_of(1))
