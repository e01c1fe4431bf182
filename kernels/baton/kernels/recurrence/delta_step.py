"""The gated delta rule token by token, for sequences with few tokens. A state is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps
from baton.kernels.recurrence.tiles import softplus, state_tile, step_tiling, token_stride, unit_vector
from baton.kernels.recurrent_states import DeltaGates, States


# Values of one must not be compiled separately: a row's result is the same with any number of tokens.
@triton.jit(do_not_specialize=["query_stride", "key_stride", "value_stride", "decay_stride", "beta_stride"])
def _delta_step_kernel(
    out_ptr,  # [num_tokens, num_heads, VALUE_DIM]
    query_ptr,  # [num_tokens, num_heads / GROUP, KEY_DIM], rows of query_stride
    key_ptr,  # [num_tokens, num_heads / GROUP, KEY_DIM], rows of key_stride
    value_ptr,  # [num_tokens, num_heads, VALUE_DIM], rows of value_stride
    decay_ptr,  # [num_tokens, num_heads] or [num_tokens, num_heads, KEY_DIM], rows of decay_stride
    beta_ptr,  # [num_tokens, num_heads], rows of beta_stride
    log_rate_ptr,  # [num_heads]
    bias_ptr,  # [num_heads] or [num_heads, KEY_DIM]
    pool_ptr,  # [num_pieces, KEY_DIM, WIDTH], pieces of pool_stride
    read_ptr,  # [num_seqs, num_heads * PIECES] int32
    write_ptr,  # [num_seqs, num_heads * PIECES] int32
    bounds_ptr,  # [num_seqs + 1] int32
    keep_ptr,  # [num_seqs] int32
    scale,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    beta_stride,
    pool_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads per key head
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    KEEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """S = exp(g) S + k beta (v - (exp(g) S)^T k)^T; out = scale S^T q; g = -exp(log_rate) softplus(decay + bias)"""
    # grid: (VALUE_DIM / TILE, NUM_HEADS, num_seqs)
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
    at, inside = state_tile(pool_ptr, read_ptr, pool_stride, place, column, PIECES, KEY_DIM, KEY_PAD, WIDTH, TILE)
    state = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if kept == 0:
        to, kept_inside = state_tile(
            pool_ptr, write_ptr, pool_stride, place, column, PIECES, KEY_DIM, KEY_PAD, WIDTH, TILE
        )
        tl.store(to, state.to(pool_ptr.dtype.element_ty), mask=kept_inside, eviction_policy="evict_first")

    keys = tl.arange(0, KEY_PAD)
    real = keys < KEY_DIM
    columns = column + tl.arange(0, TILE)
    rate = -tl.exp(tl.load(log_rate_ptr + head).to(tl.float32))
    if PER_CHANNEL:
        bias = tl.load(bias_ptr + head * KEY_DIM + keys, mask=real, other=0.0).to(tl.float32)
    else:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    for index in range(length):
        token = (start + index).to(tl.int64)
        key_at = head // GROUP * KEY_DIM + keys
        query = tl.load(query_ptr + token * query_stride + key_at, mask=real, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + token * key_stride + key_at, mask=real, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + token * value_stride + head * VALUE_DIM + columns).to(tl.float32)
        beta = tl.sigmoid(tl.load(beta_ptr + token * beta_stride + head).to(tl.float32))
        if NORMALIZE:
            query = unit_vector(query)
            key = unit_vector(key)
        if PER_CHANNEL:
            decay_at = decay_ptr + token * decay_stride + head * KEY_DIM + keys
            decay = tl.load(decay_at, mask=real, other=0.0).to(tl.float32)
        else:
            decay = tl.load(decay_ptr + token * decay_stride + head).to(tl.float32)
        decay = tl.exp(rate * softplus(decay + bias))
        # Both sums are of the state as it was: S^T q = (decay S)^T q + (k q) change. It takes one pass over registers.
        query *= scale
        seen = tl.sum(state * (key * decay)[:, None], 0)
        out = tl.sum(state * (query * decay)[:, None], 0)
        change = (value - seen) * beta
        out += tl.sum(query * key, 0) * change
        if PER_CHANNEL:
            state *= decay[:, None]
        else:
            state *= decay
        state += key[:, None] * change[None, :]
        out_at = out_ptr + (token * NUM_HEADS + head) * VALUE_DIM + columns
        tl.store(out_at, out.to(out_ptr.dtype.element_ty))
        if index + 1 == kept:
            to, kept_inside = state_tile(
                pool_ptr, write_ptr, pool_stride, place, column, PIECES, KEY_DIM, KEY_PAD, WIDTH, TILE
            )
            tl.store(to, state.to(pool_ptr.dtype.element_ty), mask=kept_inside, eviction_policy="evict_first")


def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: DeltaGates,
    states: States,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    keep: Tensor | None = None,
) -> Tensor:
    """Computes the gated delta rule as the reference does, in fp32 within a step.

    A rejected draft costs no state: verify with `keep` = the tokens that are certain, and give the accepted drafts
    again, before the next step's tokens. A token's result does not depend, bit for bit, on how sequences are cut.
    """
    num_heads, value_dim = value.shape[1:]
    num_key_heads, key_dim = key.shape[1:]
    pieces = states.pieces_per_head(num_heads, key_dim, value_dim)
    width = states.pool.shape[2]
    tile, num_warps = step_tiling(key_dim, width, states.pool.element_size())
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    overlap = overlaps(value)
    num_seqs = states.read.shape[0]
    if not num_seqs:
        return out
    _delta_step_kernel[(value_dim // tile, num_heads, num_seqs)](
        out,
        query,
        key,
        value,
        gates.decay,
        gates.beta,
        gates.log_rate,
        gates.bias,
        states.pool,
        states.read,
        states.write,
        cu_seqlens,
        cu_seqlens if keep is None else keep,
        key_dim**-0.5 if scale is None else scale,
        *map(token_stride, (query, key, value, gates.decay, gates.beta)),
        states.pool.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        KEY_PAD=triton.next_power_of_2(key_dim),
        VALUE_DIM=value_dim,
        PIECES=pieces,
        WIDTH=width,
        TILE=tile,
        PER_CHANNEL=gates.decay.dim() == 3,
        NORMALIZE=normalize,
        KEEP=keep is not None,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )
    return out
