"""Which kernel multiplies a number of tokens with a packed weight. Loads no Triton."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from baton.kernels.packed.weight import ROUND_UNIT, PackedWeight, rounds

TWO_PARTS = 32  # tokens, of which both parts cost little beside reading a weight of e4m3
FEW = 64  # tokens, for which a product takes as long as reading the weight
SEVERAL = 128  # tokens, for which a weight of e4m3 is better the left operand
MANY = 768  # tokens, for which dequantizing first costs less than doing so in each tile
_SCALED_MM_UNIT = 16
_SCALED_MM_BLOCKS = 4 * ROUND_UNIT  # columns: scales of blocks are read four at a time


class LinearKernel(enum.Enum):
    """A kernel; the value is what it does."""

    INVARIANT = "linear.quantized.matrix, sums in one order"
    VECTOR = "linear.quantized.vector"
    TWO_PARTS = "linear.quantized.fp8_few, activations in two parts of e4m3"
    FEW_ROUNDED = "linear.quantized.fp8_few, activations rounded to e4m3"
    ROUNDED = "linear.quantized.fp8, activations rounded to e4m3"
    SCALED_MM = "torch._scaled_mm, activations rounded to e4m3"
    MATRIX = "linear.quantized.matrix"
    DEQUANTIZED = "linear.quantized.dequantize, then cuBLAS"


def kernel_for(
    num_tokens: int,
    weight: PackedWeight,
    columns: int,
    *,
    is_half: bool = True,  # activations are of 16 bits
    has_scaled_mm: bool = False,  # PyTorch multiplies floats of 8 bits with scales on this device, in this dtype
    batch_invariant: bool = False,
) -> LinearKernel:
    """Returns the kernel of a product with so many tokens."""
    if batch_invariant:
        return LinearKernel.INVARIANT
    if num_tokens == 1:
        return LinearKernel.VECTOR
    if not (rounds(weight) and is_half):
        return LinearKernel.MATRIX if num_tokens < MANY else LinearKernel.DEQUANTIZED
    if num_tokens <= TWO_PARTS:
        return LinearKernel.TWO_PARTS
    is_many = num_tokens > (FEW if weight.scale is None else SEVERAL)
    if is_many and has_scaled_mm and fits_scaled_mm(weight, columns):
        return LinearKernel.SCALED_MM
    return LinearKernel.FEW_ROUNDED if num_tokens <= SEVERAL else LinearKernel.ROUNDED


def fits_scaled_mm(weight: PackedWeight, columns: int) -> bool:
    """Returns whether PyTorch's product takes the sizes and the scales."""
    if weight.scale is None:
        return columns % _SCALED_MM_UNIT == 0 and weight.num_rows % _SCALED_MM_UNIT == 0
    is_square = (weight.scale_rows, weight.group) == (ROUND_UNIT, ROUND_UNIT) and weight.row_scale is None
    fits = columns % _SCALED_MM_BLOCKS == 0 and weight.num_rows % ROUND_UNIT == 0
    return is_square and fits


def kernel_ranges(weight: PackedWeight, columns: int, *, has_scaled_mm: bool) -> Iterator[tuple[int, LinearKernel]]:
    """Yields each kernel for 16-bit activations and the first number of tokens that it multiplies, in order."""
    last = None
    for first in (1, 2, TWO_PARTS + 1, FEW + 1, SEVERAL + 1, MANY):
        kernel = kernel_for(first, weight, columns, has_scaled_mm=has_scaled_mm)
        if kernel is not last:
            yield first, kernel
        last = kernel
