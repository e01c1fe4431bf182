"""What both kernels of the wide half of LoRA updates share: loads of matrices, and the columns of a program.

A program computes some columns of the rows of one tile, in blocks that are loaded while earlier ones are multiplied.
Tiles of small ranks have blocks with more columns, and programs of more blocks, so that all programs read about as many
bytes: with one size for all, those of large ranks would run alone at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

SMALL_RANK = tl.constexpr(16)  # tiles up to this rank are small
_SMALL_BY = 4  # the columns of a program of a small tile, beside those of another one
_MANY_ROWS = 32  # of a tile, from which blocks have fewer columns
_PROGRAMS = 400  # about as many as run at once


@triton.jit
def wide_block(b_row, cols, width, rs, rank):
    """Returns b [BLOCK_R, BLOCK_N]"""
    return tl.load(
        b_row + rs[:, None] * width + cols[None, :], mask=(rs < rank)[:, None] & (cols < width)[None, :], other=0.0
    )


@triton.jit
def narrow_block(low_ptr, first, here, rs, rank, split_stride, SPLITS: tl.constexpr):
    """Returns sum over s of low_s [BLOCK_M, BLOCK_R]"""
    mask = here[:, None] & (rs < rank)[None, :]
    low = tl.load(low_ptr + first[:, None] + rs[None, :], mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(low_ptr + split * split_stride + first[:, None] + rs[None, :], mask=mask, other=0.0)
    return low


class WideShape(NamedTuple):
    """The columns that programs compute."""

    small_block: int  # at once, in tiles of small ranks
    block: int  # in others
    stages: int  # blocks on their way
    most: int  # of a program of a rank that is not small
    small_by: int  # a program of a small rank has so many times that of another
    warps: int = 4

    def columns(self, num_tiles: int, width: int) -> int:
        """Returns the columns of a program, of a rank that is not small if any is, for parts of `width` in all."""
        block = self.block if self.small_by > 1 else self.small_block
        return max(block, min(self.most, num_tiles * width // _PROGRAMS // block * block))


def wide_shape(tile_rows: int, max_rank: int, itemsize: int) -> WideShape:
    """Returns the shape for tiles of so many rows. `itemsize`: bytes of a value of the matrices."""
    mixed = max_rank > SMALL_RANK.value
    if itemsize == 4:  # more of fp32 take more shared memory than there is
        return WideShape(64, 64, 1, 256, _SMALL_BY if mixed else 1)
    if tile_rows > _MANY_ROWS:
        return WideShape(64, 64, 3, 64, 1)
    return WideShape(256, 128, 3, 512, _SMALL_BY) if mixed else WideShape(128, 128, 3, 128, 1)


def gated_shape(tile_rows: int, max_rank: int, itemsize: int) -> WideShape:
    """Returns the shape of programs that compute a gate, too. Arguments as above."""
    mixed = max_rank > SMALL_RANK.value
    if itemsize == 4:
        return wide_shape(tile_rows, max_rank, itemsize)
    if tile_rows > _MANY_ROWS:
        return WideShape(64, 64, 3, 256, 1)
    return WideShape(256, 128, 3, 1024, _SMALL_BY, warps=8) if mixed else WideShape(128, 128, 3, 1024, 1)
