"""Two processes that move KV to each other, each with a GPU of its own, or both with the only one."""

from __future__ import annotations

import torch

_HAS_TWO = torch.cuda.device_count() > 1


def environ_of(end: int) -> dict[str, str]:
    """What makes a process the pair's end 0 or 1.

    NCCL takes two ranks on one GPU only where each says that it is on another host (NCCL_HOSTID, in NCCL's user guide);
    they talk over sockets then.
    """
    if _HAS_TWO:
        return {"CUDA_VISIBLE_DEVICES": str(end)}
    return {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": f"end-{end}"}
