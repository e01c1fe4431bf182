"""MXFP4 and NVFP4 of compressed-tensors, weights only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.worker.quantization.quantized.fp4 import MX_GROUP, NV_GROUP
from baton.worker.weights.quantizing import compressed, numbers
from baton.worker.weights.quantizing.scheme import Packed, Scheme

_FLOAT = {"num_bits": 4, "type": "float"}
_BIAS = 127  # of stored exponents
_SATURATES = 8.0  # the least value that is closer to none of e2m1 than half its largest step
_LEAST_NORMAL, _LEAST = 2.0**-6, 2.0**-9  # of e4m3


class MxFp4(Scheme):
    """w = e2m1 * 2^exponent of the group"""

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        kind = {"strategy": "group", "group_size": MX_GROUP, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return compressed.settings("mxfp4-pack-quantized", left_out, {**_FLOAT, **kind})

    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        codes, exponents, values = _with_exponents(numbers.grouped(weight, MX_GROUP))
        tensors = {
            ".weight_packed": numbers.bytes_of(codes.flatten(1)),
            ".weight_scale": (exponents.squeeze(2) + _BIAS).to(torch.uint8),
        }
        return Packed(tensors, values.flatten(1))


class NvFp4(Scheme):
    """w = e2m1 * e4m3 scale of the group / the scale of the whole linear"""

    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        dtypes = dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn")
        kind = {"strategy": "tensor_group", "group_size": NV_GROUP, **dtypes}
        return compressed.settings("nvfp4-pack-quantized", left_out, {**_FLOAT, **kind})

    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        whole = torch.tensor([_whole_scale(largest)])
        values = numbers.grouped(weight, NV_GROUP)
        scale = values.abs().amax(2, keepdim=True) / numbers.E2M1_MOST * whole
        # A subnormal that is rounded down would be too small for the group by more than a step.
        scale = torch.where(scale < _LEAST_NORMAL, (scale / _LEAST).ceil() * _LEAST, scale)
        stored = scale.clamp_max(numbers.FP8_MOST).to(numbers.FP8)
        each = stored.float() / whole
        codes = numbers.to_e2m1(values / torch.where(each > 0, each, 1.0))
        tensors = {
            ".weight_packed": numbers.bytes_of(codes.flatten(1)),
            ".weight_scale": stored.squeeze(2),
            ".weight_global_scale": whole,
        }
        return Packed(tensors, (numbers.from_e2m1(codes) * each).flatten(1))


def _whole_scale(largest: float) -> float:
    """Returns the scale at which the largest magnitude is the largest number, 6 * 448."""
    most = numbers.FP8_MOST * numbers.E2M1_MOST
    return min(most / largest, torch.finfo(torch.float32).max) if largest > 0 else 1.0


def _with_exponents(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes, the exponent of each group, and the values that they mean.

    Of the least exponent at which nothing saturates and the one below it, the one whose squared error is smaller,
    unless a value would saturate by more than half a step of the larger one.
    """
    largest = values.abs().amax(2, keepdim=True)
    fraction, power = torch.frexp(largest / numbers.E2M1_MOST)
    above = torch.where(largest > 0, power - (fraction == 0.5).int(), 0).clamp(-_BIAS, _BIAS)
    below = (above - 1).clamp_min(-_BIAS)
    (one, meant), (other, also_meant) = (_at(values, exponent) for exponent in (above, below))
    errors = [(found - values).square().sum(2, keepdim=True) for found in (meant, also_meant)]
    lower = (errors[1] < errors[0]) & (largest < _SATURATES * _power(below))
    return torch.where(lower, other, one), torch.where(lower, below, above), torch.where(lower, also_meant, meant)


def _at(values: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    power = _power(exponent)
    codes = numbers.to_e2m1(values / power)
    return codes, numbers.from_e2m1(codes) * power


def _power(exponent: Tensor) -> Tensor:
    """Returns 2^exponent."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def scheme(name: str, group: int) -> Scheme:
    """Returns the format of this name."""
    return MxFp4(name, group) if name == "mxfp4" else NvFp4(name, group)
