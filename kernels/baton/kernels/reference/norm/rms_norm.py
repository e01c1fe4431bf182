"""RMSNorm, with the addition to the residual."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension. With `residual`, adds x to it first."""
    if residual is not None:
        x = residual.add_(x)
    if x.dtype == weight.dtype == torch.float32:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled.to(x.dtype) * weight).to(x.dtype)
