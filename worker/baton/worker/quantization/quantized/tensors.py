"""The tensors that a format stores for a linear: their names, their shapes, and the parameters that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest

ALL = 1 << 40  # rows or columns: those of the whole matrix


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A matrix of the checkpoint. Its parameter has as many rows as the weight, or a part of them."""

    param: str
    ending: str  # of its name, behind that of the linear
    dtype: torch.dtype  # of the parameter; floats are converted to it
    rows: int = 1  # of the weight, which one row stands for
    columns: int | Fraction = 1  # of the weight, which one column stands for
    transposed: bool = False  # in the checkpoint
    one_a_part: bool = False  # one number a part, which is repeated for each of its rows

    def size(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the rows and columns for a weight of this size."""
        return -(-rows // self.rows), -(-columns // self.columns)

    def span(self, rows: slice) -> slice:
        """Returns its rows for some rows of the weight."""
        return slice(rows.start // self.rows, -(-rows.stop // self.rows))


def fill_dummy(into: Tensor, generator: torch.Generator) -> None:
    """Fills a packed tensor with random values. Vectors of integers, which name groups, stay as they are."""
    if into.is_floating_point():
        into.copy_(torch.empty(into.shape, device=into.device).normal_(generator=generator))
    elif min(into.shape) > 1:
        limits = torch.iinfo(into.dtype)
        into.random_(limits.min, limits.max, generator=generator)


def check_finite(values: Tensor, name: str) -> None:
    """Raises InvalidRequest for NaN and infinity."""
    wrong = ~torch.isfinite(values.float())
    count = int(wrong.sum())
    if count:
        first = wrong.nonzero()[0].tolist()
        raise InvalidRequest(
            f"{name} holds {count} values that are not finite, the first at {first}: the checkpoint is damaged; "
            "download it again",
            field="model",
        )
