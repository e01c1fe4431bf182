"""Rows of bits, one row for each block of a prompt: where runs end, and how often each bit is set. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def _edges(masks: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns where runs of equal rows begin, and the number of rows."""
    differs = masks[1:, 0] != masks[:-1, 0]
    for word in range(1, masks.shape[1]):
        differs |= masks[1:, word] != masks[:-1, word]
    changes = differs.nonzero()[0]
    edges = np.zeros(changes.size + 2, np.int64)
    edges[1:-1] = changes + 1
    edges[-1] = masks.shape[0]
    return edges


def ends_of(held: NDArray[np.uint64], live: int) -> list[tuple[int, int]]:
    """Yields each slot of the bits `live` that is in the first row, with the number of first rows that have it."""
    if held.shape[1] == 1:
        column = held.ravel()
        changes = (column[1:] != column[:-1]).nonzero()[0]
        rows: list[int] = column.take(changes).tolist()
        rows.append(column.item(-1))
        depths = changes.tolist()
    else:
        lasts = _edges(held)[1:] - 1
        rows = [int.from_bytes(row.tobytes(), "little") for row in held[lasts].astype("<u8", copy=False)]
        depths = lasts[:-1].tolist()
    depths.append(held.shape[0] - 1)
    ends: list[tuple[int, int]] = []
    before = 0
    for held_then, depth in zip(reversed(rows), reversed(depths), strict=True):
        ended = held_then & live & ~before
        before |= ended
        while ended:
            lowest = ended & -ended
            ends.append((lowest.bit_length() - 1, depth + 1))
            ended ^= lowest
    return ends


def sum_rows(masks: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Counts how often each bit is set over all rows. Fast if few rows differ from the one before. [words * 64]"""
    edges = _edges(masks)
    begins, lengths = edges[:-1], edges[1:] - edges[:-1]
    bits = np.unpackbits(masks[begins].astype("<u8", copy=False).view(np.uint8), axis=1, bitorder="little")
    return (lengths.astype(np.float32) @ bits.astype(np.float32)).astype(np.int64)  # exact up to 2**24 rows
