"""The arguments that the kernels of packed weights share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.kernels.packed.weight import PackedWeight

# Columns that a thread reads at once, in 16 bytes.
LANE_COLUMNS = {"e4m3": 16, "bytes": 16, "e2m1": 32, "words": 32, "nf4": 32, "fp4": 32}
_IN_BYTES = ("e2m1", "nf4", "fp4")


def pointers(weight: PackedWeight, nothing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what is stored, scales and zeros; `nothing` for those that the weight lacks."""
    scale, zero = (nothing if one is None else one for one in (weight.scale, weight.zero))
    return _readable(weight), scale, zero


def constants(weight: PackedWeight, k: int, block_k: int, most: int) -> dict[str, Any]:
    """Returns the constants of a weight for steps of `block_k` columns, of which `most` may share one scale."""
    factors = weight.zero if weight.scale is None else weight.scale
    return {
        "K": k,
        "NUMBERS": weight.numbers,
        "BITS": weight.bits,
        "NUM_GROUPS": 1 if factors is None else factors.shape[1],
        "GROUP": weight.group,
        "SCALE_ROWS": weight.scale_rows,
        "SCALED": weight.scale is not None,
        "ZEROED": weight.zero is not None,
        "ZERO_PLUS": weight.zero_plus,
        "UNIT": _unit(weight, min(block_k, most)),
    }


def row_pointers(weight: PackedWeight, nothing: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors of rows and the bias."""
    return (
        nothing if weight.row_scale is None else weight.row_scale,
        nothing if weight.bias is None else weight.bias,
    )


def row_constants(weight: PackedWeight) -> dict[str, Any]:
    return {"ROW_SCALED": weight.row_scale is not None, "DIVIDES": weight.divides, "BIASED": weight.bias is not None}


def expert_steps(weight: PackedWeight) -> dict[str, int]:
    """Returns how far an expert's elements are behind those of the one before it."""
    steps = {
        "STORED_STEP": _readable(weight),
        "SCALE_STEP": weight.scale,
        "ZERO_STEP": weight.zero,
        "ORDER_STEP": weight.order,
    }
    return {name: 0 if tensor is None else tensor.numel() for name, tensor in steps.items()}


def _readable(weight: PackedWeight) -> Tensor:
    """Returns what is stored as kernels load it: two numbers a byte as words of 8."""
    return weight.stored.view(torch.int32) if weight.numbers in _IN_BYTES else weight.stored


def _unit(weight: PackedWeight, most: int) -> int:
    """Returns how many columns, a power of 2, surely share scale and zero."""
    unit = most
    while weight.group % unit:
        unit //= 2
    return unit


def has_e4m3(device: torch.device) -> bool:
    """Returns whether kernels may use floats of 8 bits."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
