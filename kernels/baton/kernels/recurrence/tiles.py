"""Tiles of states and tokens, and small functions, for use in the kernels of recurrences."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_TILE = 32  # columns of a state that a program has: [128, 32] fp32 take 32 registers of each of 128 threads


@triton.jit
def state_tile(
    ids_ptr,  # [num_seqs, num_heads * PIECES] int32
    pool_stride,
    row,  # of ids: sequence * num_heads + head
    column,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a piece
    TILE: tl.constexpr,
):
    """Returns the offsets [ROWS_PAD, TILE] in the pool of a head's columns from `column` on, and their mask"""
    piece = tl.load(ids_ptr + row * PIECES + column // WIDTH)
    rows = tl.arange(0, ROWS_PAD)[:, None]
    offsets = piece.to(tl.int64) * pool_stride + rows * WIDTH + (column % WIDTH + tl.arange(0, TILE))[None, :]
    return offsets, tl.broadcast_to(rows < tl.where(piece >= 0, ROWS, 0), ROWS_PAD, TILE)


@triton.jit
def owner_of(bounds_ptr, slot, num_seqs, SIZE: tl.constexpr):
    """Returns the sequence that owns a slot: sequence i has those from bounds[i] // SIZE + i on.

    They suffice for its ceil(length / SIZE) chunks, because floor(b / n) - floor(a / n) + 1 >= ceil((b - a) / n).
    """
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(bounds_ptr + middle) // SIZE + middle <= slot:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def chunk_of(bounds_ptr, slot, num_seqs, SIZE: tl.constexpr):
    """Returns a slot's first token and the end of its sequence, which may lie before it"""
    seq = owner_of(bounds_ptr, slot, num_seqs, SIZE)
    start = tl.load(bounds_ptr + seq)
    return start + (slot - (start // SIZE + seq)) * SIZE, tl.load(bounds_ptr + seq + 1)


def num_slots(num_tokens: int, num_seqs: int, size: int) -> int:
    """Returns the slots of all sequences, of which some have no tokens."""
    return num_tokens // size + num_seqs


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def unit_rows(x):
    """x / sqrt(sum_c x_c^2 + 1e-6) of x [rows, columns] fp32"""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def load_rows(at, first, rows, end, stride, dims, DIM: tl.constexpr, NORMALIZE: tl.constexpr):
    """Returns tokens [first + rows, dims] in fp32, zero outside, each divided by its L2 norm with NORMALIZE"""
    inside = (first + rows < end)[:, None] & (dims < DIM)[None, :]
    where = at + first.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    x = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    if NORMALIZE:
        x = unit_rows(x)
    return x


@triton.jit
def store_rows(at, x, first, rows, end, stride, dims):
    """Stores x at tokens [first + rows, dims]"""
    where = at + first.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    tl.store(where, x.to(at.dtype.element_ty), mask=(first + rows < end)[:, None])


@triton.jit
def unit_vector(x):
    """x / sqrt(sum_c x_c^2 + 1e-6) of a vector in fp32"""
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


def token_stride(x: Tensor) -> int:
    """Returns the stride from one token to the next of x [num_tokens, ...], whose tokens must be contiguous."""
    if not x[0:1].is_contiguous():
        raise ValueError(f"each token must be contiguous, got {tuple(x.shape)} with strides {x.stride()}")
    return x.stride(0)


def tile_of(width: int, most: int = MAX_TILE) -> int:
    """Returns the largest power of two, at most `most`, that divides a piece's width."""
    return min(most, width & -width)
