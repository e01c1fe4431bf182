"""Products with packed weights: the kernel for a number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.linear.quantized.choice import LinearKernel, kernel_for
from baton.kernels.linear.quantized.dequantize import dequantize
from baton.kernels.linear.quantized.fp8 import fp8_linear, has_scaled_mm, scaled_mm_linear
from baton.kernels.linear.quantized.fp8_few import few_fp8_linear
from baton.kernels.linear.quantized.matrix import INVARIANT_TILING, matrix_linear
from baton.kernels.linear.quantized.vector import vector_linear
from baton.kernels.linear.small_linear import Workspace
from baton.kernels.packed.weight import PackedWeight


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
    m, k = x.shape
    is_half = x.dtype != torch.float32
    with_scaled_mm = has_scaled_mm(x)
    kernel = kernel_for(m, weight, k, is_half=is_half, has_scaled_mm=with_scaled_mm, batch_invariant=batch_invariant)
    if m and kernel is LinearKernel.SCALED_MM:  # allocates rows of its own
        return scaled_mm_linear(x, weight, out)
    if out is None:
        out = torch.empty(m, weight.num_rows, dtype=x.dtype, device=x.device)
    if not m:
        return out
    return _multiplied(kernel, x, weight, workspace, out)


def _multiplied(
    kernel: LinearKernel, x: Tensor, weight: PackedWeight, workspace: Workspace | None, out: Tensor
) -> Tensor:
    """Fills out [m, n] by a kernel, and returns it."""
    match kernel:
        case LinearKernel.INVARIANT:
            return matrix_linear(x, weight, out, None, INVARIANT_TILING)
        case LinearKernel.VECTOR:
            return vector_linear(x, weight, out)
        case LinearKernel.TWO_PARTS:
            return few_fp8_linear(x, weight, out, workspace)
        case LinearKernel.FEW_ROUNDED:
            return few_fp8_linear(x, weight, out, workspace, parts=1)
        case LinearKernel.ROUNDED:
            return fp8_linear(x, weight, out)
        case LinearKernel.SCALED_MM:
            return scaled_mm_linear(x, weight, out)
        case LinearKernel.MATRIX:
            return matrix_linear(x, weight, out, workspace)
        case LinearKernel.DEQUANTIZED:
            return _dequantized_linear(x, weight, out)


def _dequantized_linear(x: Tensor, weight: PackedWeight, out: Tensor) -> Tensor:
    whole = dequantize(weight, x.shape[1], x.dtype)
    if weight.bias is None:
        return torch.mm(x, whole.t(), out=out)
    return torch.addmm(weight.bias, x, whole.t(), out=out)
