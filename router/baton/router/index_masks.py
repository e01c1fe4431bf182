"""Rows of bits, one row for each block of a prompt: where runs end, and how often each bit is set. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def _edges(masks: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where runs of equal rows begin, and the number of rows."""
    differs = masks[1:, 0] != masks[:-1, 0]
    for word in range(1, masks.shape[1]):
        differs |= masks[1:, word] != masks[:-1, word]
    changes = differs.nonzero()[0]
    edges = np.zeros(changes.size + 2, np.int64)
    edges[1:-1] = changes + 1
    edges[-1] = masks.shape[0]
    return edges


def ends_of(held: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Each slot that is in the first row, and the number of rows that it is in; it is in no later one again."""
    edges = _edges(held)
    if held.shape[1] == 1:
        rows: list[int] = held[edges[:-1], 0].tolist()
    else:
        rows = [int.from_bytes(row.tobytes(), "little") for row in held[edges[:-1]].astype("<u8", copy=False)]
    rows.append(0)
    ends: list[tuple[int, int]] = []
    before = rows[0]
    for after, depth in zip(rows[1:], edges[1:].tolist(), strict=True):
        ended = before ^ after
        before = after
        while ended:
            lowest = ended & -ended
            ends.append((lowest.bit_length() - 1, depth))
            ended ^= lowest
    return ends


def sum_rows(masks: NDArray[np.uint64]) -> NDArray[np.int64]:
    """How often each bit is set, over all rows; quick where few rows differ from the one before. [words * 64]"""
    edges = _edges(masks)
    begins, lengths = edges[:-1], edges[1:] - edges[:-1]
    bits = np.unpackbits(masks[begins].astype("<u8", copy=False).view(np.uint8), axis=1, bitorder="little")
    return (lengths.astype(np.float32) @ bits.astype(np.float32)).astype(np.int64)  # exact up to 2**24 rows
