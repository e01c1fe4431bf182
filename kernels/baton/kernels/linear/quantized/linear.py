"""Products with packed weights: the kernel for a number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.linear.quantized.choice import LinearKernel, kernel_for
from baton.kernels.linear.quantized.dequantize import dequantize
from baton.kernels.linear.quantized.fp8 import SCALED_MM_ROWS, fp8_linear, has_scaled_mm, scaled_mm_linear
from baton.kernels.linear.quantized.fp8_few import few_fp8_linear
from baton.kernels.linear.quantized.matrix import INVARIANT_TILING, matrix_linear
from baton.kernels.linear.quantized.vector import vector_linear
from baton.kernels.linear.small_linear import Workspace
from baton.kernels.packed.rounding import Rounded
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
    m = len(x)
    kernel = kernel_of(x, weight, x.shape[1], batch_invariant=batch_invariant)
    if m and kernel is LinearKernel.SCALED_MM:  # allocates rows of its own
        return scaled_mm_linear(x, weight, out)
    if out is None:
        out = torch.empty(m, weight.num_rows, dtype=x.dtype, device=x.device)
    if not m:
        return out
    return _multiplied(kernel, x, weight, workspace, out)


def kernel_of(x: Tensor, weight: PackedWeight, columns: int, *, batch_invariant: bool = False) -> LinearKernel:
    """Returns the kernel of products with as many rows as x has, in its dtype and on its device."""
    return kernel_for(
        len(x),
        weight,
        columns,
        is_half=x.dtype != torch.float32,
        has_scaled_mm=has_scaled_mm(x),
        batch_invariant=batch_invariant,
    )


def rounding_of(kernel: LinearKernel, weight: PackedWeight) -> tuple[int, int] | None:
    """Returns the group of columns (0: all), and the unit of rows, in which a kernel takes rounded activations; None:
    it takes others."""
    if kernel not in (LinearKernel.FEW_ROUNDED, LinearKernel.ROUNDED, LinearKernel.SCALED_MM):
        return None
    scaled = weight.scale is not None
    return (weight.group if scaled else 0), SCALED_MM_ROWS if scaled and kernel is LinearKernel.SCALED_MM else 1


def rounded_linear(
    kernel: LinearKernel, x: Rounded, weight: PackedWeight, workspace: Workspace | None, out: Tensor | None = None
) -> Tensor:
    """As `quantized_linear`, of activations that are rounded as `rounding_of` says."""
    if kernel is LinearKernel.SCALED_MM:
        return scaled_mm_linear(x, weight, out)
    if out is None:
        out = torch.empty(x.num_tokens, weight.num_rows, dtype=x.dtype, device=x.values.device)
    if kernel is LinearKernel.FEW_ROUNDED:
        return few_fp8_linear(x, weight, out, workspace, parts=1)
    return fp8_linear(x, weight, out)


def _multiplied(
    kernel: LinearKernel, x: Tensor, weight: PackedWeight, workspace: Workspace | None, out: Tensor
) -> Tensor:
    """Fills out [m, n] by a kernel, and returns it."""
    if weight.order is not None and kernel is not LinearKernel.VECTOR:
        x = x.index_select(1, weight.order[0])
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
