"""The weight of a linear as a checkpoint packs it, as kernels read it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

# plain: in the dtype of activations. e4m3: floats of 8 bits. bytes: integers of 8 bits. e2m1: floats of 4 bits, two a
# byte. words: integers in int32, along input features. nf4, fp4: of 4 bits, by the tables of bitsandbytes, two a byte.
Numbers = Literal["plain", "e4m3", "bytes", "e2m1", "words", "nf4", "fp4"]
ROUND_UNIT = 128  # columns of a step of products with rounded activations


class PackedWeight(NamedTuple):
    """w_nk = (stored_nk - zero_ng) * scale_ng * row_scale_n, for the group g of column k"""

    numbers: Numbers
    stored: Tensor
    num_rows: int  # n
    bits: int = 8
    # fp32, e4m3, or uint8: exponents of 2, plus 127
    scale: Tensor | None = None  # [n / scale_rows, num_groups]
    scale_rows: int = 1
    group: int = 0  # columns of a scale
    zero: Tensor | None = None  # int8 or fp32 as `scale`, or int32 [n / per word, num_groups]
    zero_plus: int = 0  # what stored zeros of words lack
    # The place in x of each column, for equal parts of the rows; None: as x is.
    order: Tensor | None = None  # [parts, k] int32
    row_scale: Tensor | None = None  # [n] fp32
    divides: bool = False  # by row_scale
    bias: Tensor | None = None  # [n]
    num_experts: int = 1  # more: tensors are the first expert's, and those of the others follow in memory

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads at least."""
        tensors = (self.stored, self.scale, self.zero, self.order, self.row_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def has_row_factors(self) -> bool:
        """Whether scales are of whole rows alone."""
        return self.scale is None and self.zero is None


def readable(stored: Tensor, *, has_e4m3: bool) -> Tensor:
    """Returns e4m3 as bytes for a device without these floats."""
    return stored if has_e4m3 or stored.dtype != torch.float8_e4m3fn else stored.view(torch.uint8)


def rounds(weight: PackedWeight) -> bool:
    """Returns whether products with the weight may take rounded activations."""
    is_whole = weight.scale is None or (weight.group % ROUND_UNIT == 0 and weight.scale.dtype == torch.float32)
    return weight.numbers == "e4m3" and weight.stored.dtype == torch.float8_e4m3fn and is_whole
