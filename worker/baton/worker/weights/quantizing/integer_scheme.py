"""Formats of integers with a scale for each group of a row: to the nearest, or as a calibration chose them."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from baton.worker.weights.quantizing import integers
from baton.worker.weights.quantizing.integers import Integers
from baton.worker.weights.quantizing.scheme import Packed, Scheme


class IntegerScheme(Scheme):
    """Packs integers in groups of `group` columns."""

    bits: int = 4
    has_zeros: bool = False
    fixed_scale_dtype: ClassVar[torch.dtype | None] = None  # None: that of the unquantized weight

    @abstractmethod
    def pack_integers(self, made: Integers, dtype: torch.dtype) -> Packed:
        """Returns the tensors of one part. `dtype`: of its unquantized weight."""

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the scales of a weight that has had this dtype."""
        return self.fixed_scale_dtype or dtype

    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        rounded_to = integers.with_zeros if self.has_zeros else integers.symmetric
        return self.pack_integers(rounded_to(weight, self.bits, self.group, self.scale_dtype(dtype)), dtype)
