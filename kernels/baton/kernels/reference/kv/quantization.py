"""Keys and values in 8 bits: e4m3 numbers, and what each KV head's are multiplied with."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 448.0  # of e4m3; what lies beyond would become NaN


def quantize_kv(kv: Tensor, kv_scale: Tensor) -> Tensor:
    """kv [num_tokens, 2, num_kv_heads, head_dim] / kv_scale [2, num_kv_heads], the nearest e4m3 number."""
    scaled = kv.float() / kv_scale.unsqueeze(-1)
    return scaled.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def dequantize_kv(cache: Tensor, kv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """cache [num_blocks, 2, num_kv_heads, block_size, head_dim] * kv_scale [2, num_kv_heads]."""
    return cache.to(dtype) * kv_scale.to(dtype)[:, :, None, None]
