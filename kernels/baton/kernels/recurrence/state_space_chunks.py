"""The recurrence of Mamba-2 in chunks, for long sequences. A program carries a head's state from chunk to chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.recurrence.tiles import (
    load_rows,
    load_stored,
    softplus,
    stages_of,
    state_tile,
    store_rows,
    tile_of,
    token_stride,
)
from baton.kernels.recurrent_states import CHUNK, States, StepSizes

_LEAST_DIM = 16  # of matrix products


@triton.jit(do_not_specialize=["least", "most"])
def _state_space_chunks_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    x_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM], rows of x_stride
    b_ptr,  # [num_tokens, NUM_HEADS / GROUP, STATE_SIZE], rows of b_stride
    c_ptr,  # [num_tokens, NUM_HEADS / GROUP, STATE_SIZE], rows of c_stride
    step_ptr,  # [num_tokens, NUM_HEADS], rows of step_stride
    log_rate_ptr,  # [NUM_HEADS]
    bias_ptr,  # [NUM_HEADS]
    skip_ptr,  # [NUM_HEADS]
    pool_ptr,  # [num_pieces, STATE_SIZE, WIDTH], pieces of pool_stride
    read_ptr,  # [num_seqs, NUM_HEADS * PIECES] int32
    write_ptr,  # [num_seqs, NUM_HEADS * PIECES] int32
    bounds_ptr,  # [num_seqs + 1] int32
    least,
    most,
    x_stride,
    b_stride,
    c_stride,
    step_stride,
    pool_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads per group of B and C
    STATE_SIZE: tl.constexpr,
    STATE_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    SKIP: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = exp(G) C S + tril(C B^T exp(G_i - G_j)) dt x + skip x; S = exp(G_last) S + B^T exp(G_last - G) dt x"""
    # grid: (HEAD_DIM / TILE, NUM_HEADS, num_seqs)
    column = tl.program_id(0) * TILE
    head = tl.program_id(1)
    seq = tl.program_id(2)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(bounds_ptr + seq)
    end = tl.load(bounds_ptr + seq + 1)
    place = seq * NUM_HEADS + head
    at, inside = state_tile(pool_ptr, read_ptr, pool_stride, place, column, PIECES, STATE_SIZE, STATE_PAD, WIDTH, TILE)
    state = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    rows = tl.arange(0, SIZE)
    sizes = tl.arange(0, STATE_PAD)
    columns = column + tl.arange(0, TILE)
    group_at = head // GROUP * STATE_SIZE
    head_at = head * HEAD_DIM
    rate = -tl.exp(tl.load(log_rate_ptr + head).to(tl.float32))
    bias = tl.load(bias_ptr + head).to(tl.float32)
    for done in range(0, end - start, SIZE):
        first = start + done
        write = load_stored(b_ptr + group_at, first, rows, end, b_stride, sizes, STATE_SIZE)
        read = load_stored(c_ptr + group_at, first, rows, end, c_stride, sizes, STATE_SIZE)
        x = load_rows(x_ptr + head_at, first, rows, end, x_stride, columns, HEAD_DIM, False)
        present = first + rows < end
        step_at = step_ptr + first.to(tl.int64) * step_stride + head + rows * step_stride
        step = tl.load(step_at, mask=present, other=0.0).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(step + bias), least), most)
        step = tl.where(present, step, 0.0)
        total = tl.cumsum(rate * step, 0)
        last = tl.sum(rate * step, 0)
        scaled = x * step[:, None]
        inner = tl.dot(read, tl.trans(write), input_precision=PRECISION)
        apart = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        inner = tl.where(rows[None, :] <= rows[:, None], inner * apart, 0.0)
        out = tl.dot(read, state.to(dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
        out += tl.dot(inner.to(dtype), scaled.to(dtype), input_precision=PRECISION)
        if SKIP:
            out += x * tl.load(skip_ptr + head).to(tl.float32)
        store_rows(out_ptr + head_at, out, first, rows, end, NUM_HEADS * HEAD_DIM, columns, HEAD_DIM)
        late = (scaled * tl.exp(tl.minimum(last - total, 0.0))[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(write), late, input_precision=PRECISION)
    to, kept_inside = state_tile(
        pool_ptr, write_ptr, pool_stride, place, column, PIECES, STATE_SIZE, STATE_PAD, WIDTH, TILE
    )
    tl.store(to, state.to(pool_ptr.dtype.element_ty), mask=kept_inside)


def state_space_chunks(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    sizes: StepSizes,
    skip: Tensor | None,
    states: States,
    cu_seqlens: Tensor,
) -> Tensor:
    """Computes the recurrence of Mamba-2 in chunks as the reference does.

    With activations of 16 bits, products round their operands to them, and states stay in fp32 from chunk to chunk.
    """
    num_heads, head_dim = x.shape[1:]
    num_groups, state_size = b.shape[1:]
    pieces = states.pieces_per_head(num_heads, state_size, head_dim)
    width = states.pool.shape[2]
    state_pad = max(_LEAST_DIM, triton.next_power_of_2(state_size))
    tile = tile_of(width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    overlap = overlaps(x)
    num_seqs = states.read.shape[0]
    if not num_seqs:
        return out
    _state_space_chunks_kernel[(head_dim // tile, num_heads, num_seqs)](
        out,
        x,
        b,
        c,
        sizes.step,
        sizes.log_rate,
        sizes.bias,
        sizes.bias if skip is None else skip,
        states.pool,
        states.read,
        states.write,
        cu_seqlens,
        *sizes.limits,
        *map(token_stride, (x, b, c, sizes.step)),
        states.pool.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_groups,
        STATE_SIZE=state_size,
        STATE_PAD=state_pad,
        HEAD_DIM=head_dim,
        PIECES=pieces,
        WIDTH=width,
        TILE=tile,
        SIZE=CHUNK,
        SKIP=skip is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        OVERLAP=overlap,
        num_warps=8,  # with four, registers do not suffice
        num_stages=stages_of(2 * CHUNK * state_pad * x.element_size()),
        launch_pdl=overlap,
    )
    return out
