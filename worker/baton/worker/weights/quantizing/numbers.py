"""Rounding of weights to numbers of 8 and 4 bits, and the packing of those."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.worker.quantization.quantized.fp4 import E2M1

FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0
E2M1_MOST = 6.0
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between the magnitudes of e2m1
_VALUES = torch.tensor(E2M1)
_SIGN = 8


def grouped(weight: Tensor, group: int) -> Tensor:
    """Returns a view [rows, groups, columns of a group]."""
    found: Tensor = weight.unflatten(1, (-1, group))  # type: ignore[no-untyped-call]
    return found


def scale_of(largest: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    """Returns the scales at which these magnitudes are the number `most`, as `dtype` holds them, in fp32. Where all
    values are 0, it is 1."""
    limits = torch.finfo(dtype)
    scale = (largest / most).clamp(limits.tiny * limits.eps, limits.max).to(dtype).float()
    return torch.where(largest > 0, scale, 1.0)


def rounded(values: Tensor, scale: Tensor, low: int, high: int, zero: Tensor | int = 0) -> Tensor:
    """Returns the nearest integers from `low` to `high`, of which `zero` stands for 0."""
    return (values / scale).round().add(zero).clamp(low, high)


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """Returns the nearest e4m3 numbers."""
    return (values / scale).clamp(-FP8_MOST, FP8_MOST).to(FP8)


def to_e2m1(values: Tensor) -> Tensor:
    """Returns the codes of the nearest e2m1 numbers, of which the largest magnitude is 6."""
    return torch.bucketize(values.abs(), _MIDPOINTS, out_int32=True) + _SIGN * (values < 0)


def from_e2m1(codes: Tensor) -> Tensor:
    """Returns the numbers that the codes stand for."""
    return _VALUES[codes]


def bytes_of(codes: Tensor) -> Tensor:
    """Returns two codes of 4 bits a byte, along the last dimension. The first one is in the low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def words_of(integers: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Returns integers of 4 or 8 bits in words of int32, along the last dimension, the first one in the lowest bits.

    `order`: which of a word's integers is at each place; empty: as they are.
    """
    integers = integers.to(torch.int32)
    if order:
        integers = integers.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)  # type: ignore[no-untyped-call]
    packed = bytes_of(integers) if bits == 4 else integers.to(torch.uint8)
    return packed.contiguous().view(torch.int32)
