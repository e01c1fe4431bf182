"""Short causal depthwise convolution with state. A sequence's first program also writes its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.recurrence.tiles import num_slots, owner_of, tile_of, token_stride
from baton.kernels.recurrent_states import States

_LONG = 32  # tokens of a slot, with long sequences


@triton.jit(do_not_specialize=["num_seqs"])
def _causal_conv_kernel(
    out_ptr,  # [num_tokens, CHANNELS]
    x_ptr,  # [num_tokens, CHANNELS], rows of x_stride
    weight_ptr,  # [CHANNELS, HISTORY + 1]
    bias_ptr,  # [CHANNELS]
    pool_ptr,  # [num_pieces, HISTORY, WIDTH], pieces of pool_stride
    read_ptr,  # [num_seqs, PIECES] int32
    write_ptr,  # [num_seqs, PIECES] int32
    bounds_ptr,  # [num_seqs + 1] int32
    keep_ptr,  # [num_seqs] int32
    num_seqs,
    x_stride,
    pool_stride,
    CHANNELS: tl.constexpr,
    HISTORY: tl.constexpr,
    HISTORY_PAD: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,  # tokens of a slot, at least HISTORY: only a sequence's first slot reads its state
    ROWS: tl.constexpr,  # tokens that are computed at once
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    KEEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out_t = act(bias + sum_j weight_j x_(t - HISTORY + j)), where x before the sequence is its state"""
    # grid: (num_slots, CHANNELS / TILE)
    slot = tl.program_id(0)
    column = tl.program_id(1) * TILE
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    seq = owner_of(bounds_ptr, slot, num_seqs, SIZE)
    start = tl.load(bounds_ptr + seq)
    length = tl.load(bounds_ptr + seq + 1) - start
    index = slot - (start // SIZE + seq)
    inner = tl.arange(0, TILE)
    place = tl.multiple_of(column % WIDTH, TILE)  # of the columns in their piece; Triton 3.6 does not see it
    x_at = x_ptr + start.to(tl.int64) * x_stride + column
    piece = tl.load(read_ptr + seq * PIECES + column // WIDTH)
    state_at = pool_ptr + piece.to(tl.int64) * pool_stride + place
    weight_at = weight_ptr + (column + inner) * (HISTORY + 1)
    w0, w1, w2, w3 = _first_weights(weight_at, HISTORY + 1, TILE)
    for block in range(0, tl.minimum(SIZE, length - index * SIZE), ROWS):
        places = index * SIZE + block + tl.arange(0, ROWS)
        acc = tl.zeros([ROWS, TILE], tl.float32)
        if BIAS:
            acc += tl.load(bias_ptr + column + inner).to(tl.float32)[None, :]
        if index * SIZE + block < HISTORY:
            for tap in tl.static_range(HISTORY):
                stored = _stored(state_at, places - HISTORY + tap, piece, inner, HISTORY, WIDTH)
                acc += stored * _weight_of(tap, w0, w1, w2, w3, weight_at)[None, :]
        for tap in tl.static_range(HISTORY + 1):
            taken = _inputs(x_at, places - HISTORY + tap, length, inner, x_stride)
            acc += taken * _weight_of(tap, w0, w1, w2, w3, weight_at)[None, :]
        if SILU:
            acc = acc * tl.sigmoid(acc)
        out_at = out_ptr + (start + places).to(tl.int64)[:, None] * CHANNELS + column + inner[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(places < length)[:, None])
    if index == 0:
        kept = tl.load(keep_ptr + seq) if KEEP else length
        target = tl.load(write_ptr + seq * PIECES + column // WIDTH)
        rows = tl.arange(0, HISTORY_PAD)
        last = _inputs(x_at, kept - HISTORY + rows, kept, inner, x_stride)
        last += _stored(state_at, kept - HISTORY + rows, piece, inner, HISTORY, WIDTH)
        tl.debug_barrier()  # the state may be replaced in place
        to = target.to(tl.int64) * pool_stride + rows[:, None] * WIDTH + place + inner[None, :]
        written = (rows < tl.where(target >= 0, HISTORY, 0))[:, None]
        tl.store(pool_ptr + to, last.to(pool_ptr.dtype.element_ty), mask=written)


@triton.jit
def _first_weights(weight_at, TAPS: tl.constexpr, TILE: tl.constexpr):
    """Returns the weights [TILE] of four taps in fp32, loaded together because a channel's are consecutive"""
    taps = tl.arange(0, 4)
    loaded = tl.load(weight_at[:, None] + taps[None, :], mask=(taps < TAPS)[None, :], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(loaded, TILE, 2, 2))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _weight_of(TAP: tl.constexpr, w0, w1, w2, w3, weight_at):
    """Returns a tap's weights [TILE] in fp32"""
    if TAP == 0:
        return w0
    if TAP == 1:
        return w1
    if TAP == 2:
        return w2
    if TAP == 3:
        return w3
    return tl.load(weight_at + TAP).to(tl.float32)


@triton.jit
def _inputs(x_at, places, length, inner, x_stride):
    """Returns a sequence's inputs [places, inner] in fp32, zero outside"""
    inside = (places >= 0) & (places < length)
    at = x_at + places.to(tl.int64)[:, None] * x_stride + inner[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def _stored(state_at, places, piece, inner, HISTORY: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the state's inputs [places, inner] in fp32, of negative places; zero outside"""
    inside = (places < 0) & (places >= tl.where(piece >= 0, -HISTORY, 0))
    at = state_at + (places + HISTORY)[:, None] * WIDTH + inner[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: States,
    cu_seqlens: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
    keep: Tensor | None = None,
) -> Tensor:
    """Convolves x [num_tokens, channels] as the reference does, with sums in fp32.

    A token's result does not depend, bit for bit, on how sequences are cut.
    """
    num_tokens, channels = x.shape
    history = weight.shape[1] - 1
    pieces = states.pieces_per_head(1, history, channels)
    width = states.pool.shape[2]
    num_seqs = states.read.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_seqs:
        return out
    history_pad = triton.next_power_of_2(history)
    size, rows, tile, num_warps = _tiling(num_tokens, num_seqs, width, history_pad, x.element_size())
    overlap = overlaps(x)
    _causal_conv_kernel[(num_slots(num_tokens, num_seqs, size), channels // tile)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        states.pool,
        states.read,
        states.write,
        cu_seqlens,
        cu_seqlens if keep is None else keep,
        num_seqs,
        token_stride(x),
        states.pool.stride(0),
        CHANNELS=channels,
        HISTORY=history,
        HISTORY_PAD=history_pad,
        PIECES=pieces,
        WIDTH=width,
        SIZE=size,
        ROWS=rows,
        TILE=tile,
        BIAS=bias is not None,
        SILU=silu,
        KEEP=keep is not None,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )
    return out


def _tiling(num_tokens: int, num_seqs: int, width: int, history_pad: int, itemsize: int) -> tuple[int, int, int, int]:
    """Returns a slot's tokens, those computed at once, channels of a program, and its warps."""
    if num_tokens >= _LONG * num_seqs:
        return max(_LONG, history_pad), 2, tile_of(width, 512 // itemsize), 1
    return history_pad, 1, tile_of(width, 1024 // itemsize), 2
