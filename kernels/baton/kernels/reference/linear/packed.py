"""Linears on a CPU by oneDNN, over matrices as they are or laid out for it, with the activation in the same pass."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

_LEAST_VALUES = 1 << 18  # a call costs 20 us more than one of the BLAS
# By our names of activations: oneDNN's name, and its algorithm.
_ACTIVATIONS = {"": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}


@cache
def beats_blas() -> bool:
    """Returns whether oneDNN is faster than this PyTorch's BLAS: MKL multiplies one row by a single thread."""
    has_mkl = bool(torch.backends.mkl.is_available())
    return has_mkl and can_pack(torch.float32)


def is_large(weight: Tensor) -> bool:
    """Returns whether oneDNN multiplies a matrix faster than MKL does. Half precision always takes oneDNN."""
    return weight.dtype is torch.float32 and weight.numel() >= _LEAST_VALUES


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


def packed_rows(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x @ weight^T + bias for x [num_rows, in_features], whose rows do not depend on each other, bit for bit.

    oneDNN sums the products of two rows or more in one order, for any number of them, and that of one row in another.
    """
    if len(x) != 1:
        return packed_linear(x, packed, bias)
    return packed_linear(functional.pad(x, (0, 0, 0, 1)), packed, bias)[:1]


def packed_sum(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Returns x @ weight^T + bias + residual."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
    return out
