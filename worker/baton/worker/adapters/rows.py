"""The rows of a step by their adapters, as kernels take them. Host only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NO_SLOT = -1  # of a row without an adapter
FEW_TILE_ROWS = 16  # most rows of a tile in steps of few rows: decodes, hardly two of one adapter


class AdapterRows(NamedTuple):
    """The rows of a step in tiles, each of one adapter or of none."""

    order: Tensor  # [num_rows] int32 or int64, those of a slot side by side
    tiles: Tensor  # [num_tiles, 3] int32: slot, first index into `order`, number of rows
    tile_rows: int  # of a tile at most


class HostRows(NamedTuple):
    """AdapterRows in host memory."""

    order: NDArray[np.int64]
    tiles: NDArray[np.int32]


def rows_of(slots: NDArray[np.int32], tile_rows: int) -> HostRows:
    """Returns the order and the tiles of rows with these slots, [num_rows]."""
    order = np.argsort(slots, kind="stable")
    used, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    each = -(-counts // tile_rows)
    first = np.concatenate([np.arange(number) * tile_rows for number in each]) if len(each) else each
    rows = np.minimum(np.repeat(counts, each) - first, tile_rows)
    return HostRows(order, np.stack((np.repeat(used, each), np.repeat(starts, each) + first, rows), 1).astype(np.int32))


def most_tiles(num_rows: int, num_slots: int, tile_rows: int) -> int:
    """Returns the most tiles of so many rows: of every slot, and of no adapter, one may be partly filled."""
    return min(num_rows, num_slots + 1 + num_rows // tile_rows)
