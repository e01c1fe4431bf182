"""Keys and values in 8 bits: e4m3 numbers, with a scale for each KV head."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 448.0  # of e4m3; larger numbers would become NaN


def quantize_kv(kv: Tensor, kv_scale: Tensor) -> Tensor:
    """Returns kv [num_tokens, 2, num_kv_heads, head_dim] / kv_scale [2, num_kv_heads], rounded to e4m3."""
    scaled = kv.float() / kv_scale.unsqueeze(-1)
    return scaled.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def dequantize_kv(cache: Tensor, kv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns cache [num_blocks, 2, num_kv_heads, block_size, head_dim] * kv_scale [2, num_kv_heads]."""
    return cache.to(dtype) * kv_scale.to(dtype)[:, :, None, None]
