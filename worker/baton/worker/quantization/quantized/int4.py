"""Products of few rows in bfloat16 with weights of 4 bits or 8, by PyTorch's kernels, which unpack in registers.

Their copies of the weights stay beside the packed ones, which products of many rows dequantize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from baton.worker.quantization.base import Params
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.quantized.method import PackedMethod, PackedOps

INT4_BITS, INT4_MIDDLE, INT4_LEAST_GROUP = 4, 8, 32
_GROUPS = (256, 128, 64, INT4_LEAST_GROUP)  # sizes that the kernel has
_ROW_STEP = 16
_ROWS_AT_ONCE = 1024  # packed: a multiple of the kernel's blocks
_MOST_TOKENS = 48  # beyond them, dequantizing rows costs less


class Int4Rows(NamedTuple):
    """w = (stored - INT4_MIDDLE) * scale + least"""

    stored: Tensor  # [rows, columns], 0 to 15
    scale: Tensor  # [rows, num_groups] fp32
    least: Tensor


# Rows of a weight, which begin at a whole unit.
ReadInt4 = Callable[[Params, slice], Int4Rows]


class Int4Ops(PackedOps):
    """Products with a copy of the weight in the kernel's order."""

    def __init__(self, kernels: Kernels, method: PackedMethod, read: ReadInt4) -> None:
        super().__init__(kernels, method)
        self._read = read

    def prepared(self, params: Params) -> Params:
        """Returns the parameters and the copy, if the kernel has this size."""
        num_rows = self._method.out_features(params)
        first = self._read(params, slice(0, self._method.unit))
        group = _group(first.stored.shape[1], first.scale.shape[1])
        if num_rows % _ROW_STEP or not group:
            return params
        packed, scales = [], []
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            rows = self._read(params, slice(start, min(start + _ROWS_AT_ONCE, num_rows)))
            packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.stored.int().contiguous(), 1))
            both = torch.stack([rows.scale, rows.least], dim=2).to(torch.bfloat16)
            scales.append(both.repeat_interleave(rows.stored.shape[1] // group // rows.scale.shape[1], dim=1))
        return {**params, "int4": torch.cat(packed), "int4_scales": torch.cat(scales).transpose(0, 1).contiguous()}

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        if "int4" not in params or len(x) > _MOST_TOKENS or x.dtype is not torch.bfloat16:
            return super().multiply(params, x, out)
        scales = params["int4_scales"]
        group = x.shape[1] // len(scales)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), params["int4"], group, scales)
        return _with_bias(product, params, out)


class Int8Ops(PackedOps):
    """Products with weights of 8 bits whose rows have one scale each."""

    def prepared(self, params: Params) -> Params:
        return {**params, "row_scale": params["scale"].flatten().to(torch.bfloat16)}

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        if "row_scale" not in params or len(x) > _MOST_TOKENS or x.dtype is not torch.bfloat16:
            return super().multiply(params, x, out)
        product = torch._weight_int8pack_mm(x.contiguous(), params["weight"], params["row_scale"])
        return _with_bias(product, params, out)


def _with_bias(product: Tensor, params: Params, out: Tensor | None) -> Tensor:
    bias = params.get("bias")
    if bias is not None:
        product.add_(bias)
    return product if out is None else out.copy_(product)


def _group(columns: int, num_groups: int) -> int:
    """Returns the largest group of the kernel that lies in one of ours; 0: none does."""
    ours = columns // num_groups
    return next((size for size in _GROUPS if ours % size == 0), 0)
