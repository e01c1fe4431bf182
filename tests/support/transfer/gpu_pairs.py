"""Two processes that transfer KV to each other, on one GPU each, or both on the only one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.processes.child import Child

_HAS_TWO = torch.cuda.device_count() > 1


def environ_of(end: int) -> dict[str, str]:
    """Returns the environment variables of end 0 or 1 of the pair.

    NCCL accepts two ranks on one GPU only if they report different hosts (NCCL_HOSTID, in NCCL's user guide). They then
    exchange data over sockets.
    """
    if _HAS_TWO:
        return {"CUDA_VISIBLE_DEVICES": str(end)}
    return {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": f"end-{end}"}


def other_end(factory: Callable[..., object], *arguments: Any) -> Child:
    """Starts the process of end 1."""
    return Child(factory, *arguments, environ=environ_of(1))
