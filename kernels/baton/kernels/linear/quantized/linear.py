"""Products with packed weights: the kernel for a number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.linear.quantized.dequantize import dequantize
from baton.kernels.linear.quantized.fp8 import fp8_linear, has_scaled_mm, scaled_mm_linear
from baton.kernels.linear.quantized.fp8_few import few_fp8_linear
from baton.kernels.linear.quantized.matrix import INVARIANT_TILING, matrix_linear
from baton.kernels.linear.quantized.vector import vector_linear
from baton.kernels.linear.small_linear import Workspace
from baton.kernels.packed.weight import PackedWeight, rounds

TWO_PARTS = 32  # tokens, of which both parts cost little beside reading a weight of e4m3
FEW = 64  # tokens, for which a product takes as long as reading the weight
SEVERAL = 128  # tokens, for which a weight of e4m3 is better the left operand
MANY = 768  # tokens, for which dequantizing first costs less than doing so in each tile


def quantized_linear(
    x: Tensor,
    weight: PackedWeight,
    workspace: Workspace | None,
    out: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """Returns x @ weight^T + bias [m, n] for x [m, k].

    More than 32 tokens are rounded to 8 bits for weights of e4m3 on devices that multiply them. With `batch_invariant`,
    nothing is rounded, and a row's result does not depend on other rows, bit for bit.
    """
    m = len(x)
    if out is None:
        out = torch.empty(m, weight.num_rows, dtype=x.dtype, device=x.device)
    if not m:
        return out
    if batch_invariant:
        return matrix_linear(x, weight, out, None, INVARIANT_TILING)
    if m == 1:
        return vector_linear(x, weight, out)
    if rounds(weight) and x.dtype != torch.float32:
        return _fp8_linear(x, weight, workspace, out)
    if m < MANY:
        return matrix_linear(x, weight, out, workspace)
    whole = dequantize(weight, x.shape[1], x.dtype)
    if weight.bias is None:
        return torch.mm(x, whole.t(), out=out)
    return torch.addmm(weight.bias, x, whole.t(), out=out)


def _fp8_linear(x: Tensor, weight: PackedWeight, workspace: Workspace | None, out: Tensor) -> Tensor:
    m = len(x)
    if m <= TWO_PARTS:
        return few_fp8_linear(x, weight, out, workspace)
    if m > (FEW if weight.scale is None else SEVERAL) and has_scaled_mm(x, weight):
        return scaled_mm_linear(x, weight, out)
    return few_fp8_linear(x, weight, out, workspace, parts=1) if m <= SEVERAL else fp8_linear(x, weight, out)
