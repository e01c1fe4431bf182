"""Cuts the states of recurrent layers into pieces that lie in pages of the KV cache. Knows no memory.

A state of one layer is some matrices of fp32 values. A page has a part for each KV layer; each head of a matrix is cut
by its columns, into as few pieces as possible that fit in such a part. Parts are filled in order, layer after layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from baton.rpc.errors import Unsupported

VALUE_BYTES = 4  # fp32


@dataclass(frozen=True, slots=True)
class StateMatrix:
    """A matrix [rows, columns] of each of some heads. Recurrences have [key_dim, value_dim], convolutions one head."""

    num_heads: int
    rows: int
    columns: int

    @property
    def num_values(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class PlacedMatrix:
    """The pieces [rows, width] of one layer's matrix, head after head, each head's by its columns."""

    num_heads: int
    rows: int
    width: int
    parts: tuple[int, ...]  # the part that each piece lies in
    offsets: tuple[int, ...]  # of each piece in its part, in values


@dataclass(frozen=True, slots=True)
class PlacedState:
    """The pieces of a state of all layers of a group."""

    layers: tuple[tuple[PlacedMatrix, ...], ...]
    num_parts: int

    @property
    def unit(self) -> int:
        """Values that every offset is a multiple of."""
        return gcd(*(offset for layer in self.layers for matrix in layer for offset in matrix.offsets))


def place_state(matrices: Sequence[StateMatrix], num_layers: int, part_values: int) -> PlacedState:
    """Returns the pieces of a state. `part_values`: fp32 values that fit in a part.

    Raises Unsupported if a column is longer than a part.
    """
    part = used = 0
    layers = []
    for _ in range(num_layers):
        placed = []
        for matrix in matrices:
            width = _width(matrix, part_values)
            count = matrix.num_heads * (matrix.columns // width)
            parts, offsets = [], []
            for _ in range(count):
                if used + matrix.rows * width > part_values:
                    part, used = part + 1, 0
                parts.append(part)
                offsets.append(used)
                used += matrix.rows * width
            placed.append(PlacedMatrix(matrix.num_heads, matrix.rows, width, tuple(parts), tuple(offsets)))
        layers.append(tuple(placed))
    return PlacedState(tuple(layers), part + 1)


def _width(matrix: StateMatrix, part_values: int) -> int:
    """Returns the columns of a piece: a part of the matrix's columns, the most of those that fit."""
    if matrix.rows > part_values:
        raise Unsupported(
            f"a column of a state has {matrix.rows} values of {VALUE_BYTES} bytes, one layer of a KV block has "
            f"{part_values * VALUE_BYTES} bytes: raise block_size",
            field="block_size",
        )
    columns = matrix.columns
    pieces = next(count for count in range(1, columns + 1) if not columns % count and _fits(matrix, count, part_values))
    return columns // pieces


def _fits(matrix: StateMatrix, count: int, part_values: int) -> bool:
    return matrix.rows * (matrix.columns // count) <= part_values
