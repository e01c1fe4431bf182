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

_LONG = 32  # tokens of a program, with long sequences
_CHANNELS = 256  # of a program, with short sequences
_LONG_CHANNELS = 64


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
    channels = column + tl.arange(0, TILE)
    places = index * SIZE + tl.arange(0, SIZE)
    x_at = x_ptr + start.to(tl.int64) * x_stride
    piece = tl.load(read_ptr + seq * PIECES + column // WIDTH)
    state_at = pool_ptr + piece.to(tl.int64) * pool_stride + column % WIDTH
    acc = tl.zeros([SIZE, TILE], tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + channels).to(tl.float32)[None, :]
    for tap in tl.static_range(HISTORY + 1):
        taken = _inputs(x_at, state_at, places - HISTORY + tap, length, piece, channels, x_stride, HISTORY, WIDTH, TILE)
        acc += taken * tl.load(weight_ptr + channels * (HISTORY + 1) + tap).to(tl.float32)[None, :]
    if SILU:
        acc = acc * tl.sigmoid(acc)
    out_at = out_ptr + (start + places).to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(places < length)[:, None])
    if index == 0:
        kept = tl.load(keep_ptr + seq) if KEEP else length
        target = tl.load(write_ptr + seq * PIECES + column // WIDTH)
        rows = tl.arange(0, HISTORY_PAD)
        last = _inputs(x_at, state_at, kept - HISTORY + rows, kept, piece, channels, x_stride, HISTORY, WIDTH, TILE)
        tl.debug_barrier()  # the state may be replaced in place
        to = target.to(tl.int64) * pool_stride + rows[:, None] * WIDTH + column % WIDTH + tl.arange(0, TILE)[None, :]
        written = (rows < tl.where(target >= 0, HISTORY, 0))[:, None]
        tl.store(pool_ptr + to, last.to(pool_ptr.dtype.element_ty), mask=written)


@triton.jit
def _inputs(
    x_at,
    state_at,
    places,  # negative: in the state
    length,
    piece,
    channels,
    x_stride,
    HISTORY: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns inputs [places, channels] in fp32, zero outside"""
    inside = (places >= 0) & (places < length)
    from_x = x_at + places.to(tl.int64)[:, None] * x_stride + channels[None, :]
    new = tl.load(from_x, mask=inside[:, None], other=0.0).to(tl.float32)
    stored = (places < 0) & (places >= tl.where(piece >= 0, -HISTORY, 0))
    from_state = state_at + (places + HISTORY)[:, None] * WIDTH + tl.arange(0, TILE)[None, :]
    return new + tl.load(from_state, mask=stored[:, None], other=0.0).to(tl.float32)


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
    long = num_tokens >= _LONG * num_seqs
    history_pad = triton.next_power_of_2(history)
    size = max(_LONG if long else 1, history_pad)
    tile = tile_of(width, _LONG_CHANNELS if long else _CHANNELS)
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
        TILE=tile,
        BIAS=bias is not None,
        SILU=silu,
        KEEP=keep is not None,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    return out
