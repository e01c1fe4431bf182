"""Element-wise ops of some rows at a time, so that a row's bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# PyTorch splits element-wise ops of more values over threads, and rounds the ends of their parts in another way.
_MAX_VALUES = (1 << 15) - 1
_VECTOR = 16  # values that it computes at once; rows of other widths end with some that are computed one by one


def by_parts(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns the op of x [num_rows, width], of some rows at a time."""
    found = [op(part) for part in parts_of(x)]
    return found[0] if len(found) == 1 else torch.cat(found)


def parts_of(x: Tensor) -> Iterator[Tensor]:
    """Yields the rows of x [num_rows, width] in parts; x itself if it has none."""
    width = x.shape[1]
    step = 1 if width % (2 * _VECTOR) else max(1, _MAX_VALUES // width)
    yield from (x[start : start + step] for start in range(0, max(1, len(x)), step))
