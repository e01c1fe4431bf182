"""The dtype of KV on a device, and its name in KvSpec."""

from __future__ import annotations

import torch

from baton.worker.config import WorkerConfig


def kv_dtype(config: WorkerConfig, compute: torch.dtype) -> torch.dtype:
    """Returns the dtype of the KV pool."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8_e4m3" else compute


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in KvSpec."""
    return str(dtype).removeprefix("torch.").removesuffix("fn")
