"""Tiles of states and tokens, and small functions, for use in the kernels of recurrences."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 64  # columns of a state in fp32 that a program of a step has
_VALUES = 128  # of a state, in a thread of it
_SHARED_BYTES = 200_000  # that a program takes at most for what it loads ahead
MAX_TILE = 32  # columns of a state that a program of chunks has


@triton.jit
def state_tile(
    pool_ptr,  # [num_pieces, ROWS, WIDTH], pieces of pool_stride
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
    """Returns the pointers [ROWS_PAD, TILE] to a head's columns from `column` on, and their mask"""
    piece = tl.load(ids_ptr + row * PIECES + column // WIDTH)
    rows = tl.arange(0, ROWS_PAD)[:, None]
    # Triton 3.6 does not see that the remainder is a multiple of TILE, and would load one element at a time.
    inner = tl.multiple_of(column % WIDTH, TILE)
    at = pool_ptr + (piece.to(tl.int64) * pool_stride + inner) + (rows * WIDTH + tl.arange(0, TILE)[None, :])
    return at, tl.broadcast_to(rows < tl.where(piece >= 0, ROWS, 0), ROWS_PAD, TILE)


@triton.jit
def owner_of(bounds_ptr, slot, num_seqs, SIZE: tl.constexpr):
    """Returns the sequence that owns a slot: sequence i has those from bounds[i] // SIZE + i on.

    They suffice for its ceil(length / SIZE) chunks, because floor(b / n) - floor(a / n) + 1 >= ceil((b - a) / n).
    """
    BLOCK: tl.constexpr = 128
    owner = -1  # counts the sequences that begin at or before the slot: loads of a search would wait for each other
    for first in range(0, num_seqs, BLOCK):
        seqs = first + tl.arange(0, BLOCK)
        begins = tl.load(bounds_ptr + seqs, mask=seqs < num_seqs, other=0) // SIZE + seqs
        owner += tl.sum(((begins <= slot) & (seqs < num_seqs)).to(tl.int32), 0)
    return owner


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
def load_stored(at, first, rows, end, stride, dims, DIM: tl.constexpr):
    """Returns tokens [first + rows, dims] as they are stored, zero outside. Loops load them ahead"""
    inside = (first + rows < end)[:, None] & (dims < DIM)[None, :]
    where = at + first.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    return tl.load(where, mask=inside, other=0.0)


@triton.jit
def store_rows(at, x, first, rows, end, stride, dims, DIM: tl.constexpr):
    """Stores x at tokens [first + rows, dims]"""
    inside = (first + rows < end)[:, None] & (dims < DIM)[None, :]
    where = at + first.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    tl.store(where, x.to(at.dtype.element_ty), mask=inside)


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


def step_tiling(rows: int, width: int, itemsize: int) -> tuple[int, int]:
    """Returns the columns of a state that a program of a step has, and its warps.

    On an H100, states of 128 rows are fastest with 128 values a thread: few warps wait for each other in sums.
    """
    tile = tile_of(width, _WIDEST if itemsize == 4 else _WIDEST // 2)
    return tile, max(1, triton.next_power_of_2(rows) * tile // (_VALUES * 32))


def stages_of(chunk_bytes: int) -> int:
    """Returns how many chunks a loop loads ahead, itself included: three, or as many as the shared memory holds."""
    return max(1, min(3, _SHARED_BYTES // chunk_bytes))
