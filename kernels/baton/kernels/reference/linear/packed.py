"""Linears on a CPU whose matrix is laid out once for oneDNN, with the activation or the addition in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

# By our names of activations: oneDNN's name, and its algorithm.
_ACTIVATIONS = {"": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}


def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this PyTorch and this CPU have linears of this dtype over packed matrices."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def pack(weight: Tensor) -> Tensor:
    """Returns a copy of weight [out_features, in_features] in oneDNN's layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def fuses(activation: str) -> bool:
    """Returns whether `packed_linear` computes the activation."""
    return activation in _ACTIVATIONS


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, activation: str = "") -> Tensor:
    """Returns activation(x @ weight^T + bias) for x [num_rows, in_features]."""
    name, algorithm = _ACTIVATIONS[activation]
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, name, [], algorithm)
    return out


def packed_sum(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Returns x @ weight^T + bias + residual."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
    return out
