"""The recurrence of Mamba-2 token by token, for sequences with few tokens. A state is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.recurrence.tiles import softplus, state_tile, step_tiling, token_stride
from baton.kernels.recurrent_states import States, StepSizes


# Values of one must not be compiled separately: a row's result is the same with any number of tokens.
@triton.jit(do_not_specialize=["x_stride", "b_stride", "c_stride", "step_stride", "least", "most"])
def _state_space_step_kernel(
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    x_ptr,  # [num_tokens, num_heads, HEAD_DIM], rows of x_stride
    b_ptr,  # [num_tokens, num_heads / GROUP, STATE_SIZE], rows of b_stride
    c_ptr,  # [num_tokens, num_heads / GROUP, STATE_SIZE], rows of c_stride
    step_ptr,  # [num_tokens, num_heads], rows of step_stride
    log_rate_ptr,  # [num_heads]
    bias_ptr,  # [num_heads]
    skip_ptr,  # [num_heads]
    pool_ptr,  # [num_pieces, STATE_SIZE, WIDTH], pieces of pool_stride
    read_ptr,  # [num_seqs, num_heads * PIECES] int32
    write_ptr,  # [num_seqs, num_heads * PIECES] int32
    bounds_ptr,  # [num_seqs + 1] int32
    keep_ptr,  # [num_seqs] int32
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
    SKIP: tl.constexpr,
    KEEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dt = clamp(softplus(step + bias)); S = exp(-exp(log_rate) dt) S + B (dt x)^T; out = S^T C + skip x"""
    # grid: (HEAD_DIM / TILE, NUM_HEADS, num_seqs)
    column = tl.program_id(0) * TILE
    head = tl.program_id(1)
    seq = tl.program_id(2)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(bounds_ptr + seq)
    length = tl.load(bounds_ptr + seq + 1) - start
    kept = tl.load(keep_ptr + seq) if KEEP else length
    place = seq * NUM_HEADS + head
    at, inside = state_tile(pool_ptr, read_ptr, pool_stride, place, column, PIECES, STATE_SIZE, STATE_PAD, WIDTH, TILE)
    state = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if kept == 0:
        to, kept_inside = state_tile(
            pool_ptr, write_ptr, pool_stride, place, column, PIECES, STATE_SIZE, STATE_PAD, WIDTH, TILE
        )
        tl.store(to, state.to(pool_ptr.dtype.element_ty), mask=kept_inside)

    sizes = tl.arange(0, STATE_PAD)
    real = sizes < STATE_SIZE
    columns = column + tl.arange(0, TILE)
    rate = -tl.exp(tl.load(log_rate_ptr + head).to(tl.float32))
    bias = tl.load(bias_ptr + head).to(tl.float32)
    for index in range(length):
        token = (start + index).to(tl.int64)
        group_at = head // GROUP * STATE_SIZE + sizes
        write = tl.load(b_ptr + token * b_stride + group_at, mask=real, other=0.0).to(tl.float32)
        read = tl.load(c_ptr + token * c_stride + group_at, mask=real, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + token * x_stride + head * HEAD_DIM + columns).to(tl.float32)
        step = softplus(tl.load(step_ptr + token * step_stride + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, least), most)
        state = state * tl.exp(rate * step) + write[:, None] * (step * x)[None, :]
        out = tl.sum(state * read[:, None], 0)
        if SKIP:
            out += x * tl.load(skip_ptr + head).to(tl.float32)
        out_at = out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + columns
        tl.store(out_at, out.to(out_ptr.dtype.element_ty))
        if index + 1 == kept:
            to, kept_inside = state_tile(
                pool_ptr, write_ptr, pool_stride, place, column, PIECES, STATE_SIZE, STATE_PAD, WIDTH, TILE
            )
            tl.store(to, state.to(pool_ptr.dtype.element_ty), mask=kept_inside)


def state_space_step(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    sizes: StepSizes,
    skip: Tensor | None,
    states: States,
    cu_seqlens: Tensor,
    *,
    keep: Tensor | None = None,
) -> Tensor:
    """Computes the recurrence of Mamba-2 as the reference does, in fp32 within a step.

    A rejected draft costs no state, as with `gated_delta_step`. A token's result does not depend, bit for bit, on how
    sequences are cut.
    """
    num_heads, head_dim = x.shape[1:]
    num_groups, state_size = b.shape[1:]
    pieces = states.pieces_per_head(num_heads, state_size, head_dim)
    width = states.pool.shape[2]
    tile, num_warps = step_tiling(state_size, width, states.pool.element_size())
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    overlap = overlaps(x)
    num_seqs = states.read.shape[0]
    if not num_seqs:
        return out
    _state_space_step_kernel[(head_dim // tile, num_heads, num_seqs)](
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
        cu_seqlens if keep is None else keep,
        *sizes.limits,
        *map(token_stride, (x, b, c, sizes.step)),
        states.pool.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_groups,
        STATE_SIZE=state_size,
        STATE_PAD=triton.next_power_of_2(state_size),
        HEAD_DIM=head_dim,
        PIECES=pieces,
        WIDTH=width,
        TILE=tile,
        SKIP=skip is not None,
        KEEP=keep is not None,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )
    return out
