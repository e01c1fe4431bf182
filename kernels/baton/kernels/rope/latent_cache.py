"""The steps between the projections of latent attention and attention: the norm, RoPE, and the write into the pool."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

_HEADS = 16  # of queries, of one program


@triton.jit
def _rotate(
    to,  # [ROWS, 1] pointers
    source,  # [ROWS, 1] pointers
    real,  # [ROWS, 1]
    cos,  # [HALF_PAD]
    sin,  # [HALF_PAD]
    ROPE_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """(a, b) -> (a cos - b sin, b cos + a sin), of neighbours if INTERLEAVED, else of the halves"""
    kind = to.dtype.element_ty
    half: tl.constexpr = ROPE_DIM // 2
    if INTERLEAVED:
        # Neighbours are read and written at once.
        dims = tl.arange(0, 2 * HALF_PAD)
        kept = real & (dims < ROPE_DIM)[None, :]
        values = tl.load(source + dims[None, :], mask=kept, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(values, [ROWS, HALF_PAD, 2]))
        turned = tl.join(a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :])
        tl.store(to + dims[None, :], tl.reshape(turned, [ROWS, 2 * HALF_PAD]).to(kind), mask=kept)
    else:
        dims = tl.arange(0, HALF_PAD)
        kept = real & (dims < half)[None, :]
        a = tl.load(source + dims[None, :], mask=kept, other=0.0).to(tl.float32)
        b = tl.load(source + half + dims[None, :], mask=kept, other=0.0).to(tl.float32)
        tl.store(to + dims[None, :], (a * cos[None, :] - b * sin[None, :]).to(kind), mask=kept)
        tl.store(to + half + dims[None, :], (b * cos[None, :] + a * sin[None, :]).to(kind), mask=kept)


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr", "latent_ptr", "query_ptr"])
def _latent_cache_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS * QK_DIM], rows of query_stride; the last ROPE_DIM values of heads are rotated
    latent_ptr,  # [num_tokens, KV_RANK + ROPE_DIM], rows of latent_stride
    cache_ptr,  # [num_blocks * block_size, KV_RANK + ROPE_DIM]
    positions_ptr,  # [num_tokens] int32
    slot_mapping_ptr,  # [num_tokens] int32, block * block_size + offset; -1 writes nothing
    cos_sin_ptr,  # [max_position, ROPE_DIM] fp32: cosines, then sines
    norm_ptr,  # [KV_RANK]
    query_stride,
    latent_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    QK_DIM: tl.constexpr,
    KV_RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """cache = (c / sqrt(mean(c^2) + eps) * norm, rotated k) of each (c, k); (a, b) -> (a cos - b sin, b cos + a sin)"""
    # grid: (num_tokens, 1 + NUM_HEADS / HEADS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half: tl.constexpr = ROPE_DIM // 2
    dims = tl.arange(0, HALF_PAD)
    pairs = dims < half
    turn_at = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROPE_DIM + dims
    cos = tl.load(turn_at, mask=pairs, other=1.0)
    sin = tl.load(turn_at + half, mask=pairs, other=0.0)
    if part > 0:
        heads = (part - 1) * HEADS + tl.arange(0, HEADS)
        at = query_ptr + token * query_stride + heads[:, None] * QK_DIM + (QK_DIM - ROPE_DIM)
        _rotate(at, at, (heads < NUM_HEADS)[:, None], cos, sin, ROPE_DIM, HALF_PAD, HEADS, INTERLEAVED)
        return
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    latent_ptr += token * latent_stride
    cache_ptr += slot * (KV_RANK + ROPE_DIM)
    kind = cache_ptr.dtype.element_ty
    ranks = tl.arange(0, RANK_PAD)
    inside = ranks < KV_RANK
    values = tl.load(latent_ptr + ranks, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / KV_RANK + eps)
    weight = tl.load(norm_ptr + ranks, mask=inside, other=0.0).to(tl.float32)
    tl.store(cache_ptr + ranks, (values * scale * weight).to(kind), mask=inside)
    one = tl.zeros([1, 1], tl.int32)
    _rotate(
        cache_ptr + KV_RANK + one, latent_ptr + KV_RANK + one, one == 0, cos, sin, ROPE_DIM, HALF_PAD, 1, INTERLEAVED
    )


def latent_rope_and_cache(
    query: Tensor,
    latent: Tensor,
    cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    norm: Tensor,
    *,
    num_heads: int,
    eps: float,
    interleaved: bool,
) -> None:
    """Rotates the ends of the heads of query [num_tokens, num_heads * qk_dim] in place. Norms and rotates latent
    [num_tokens, kv_rank + rope_dim], and writes it into cache [num_blocks, 1, 1, block_size, kv_rank + rope_dim] at
    slot_mapping [num_tokens] int32 (-1: not at all).

    cos_sin [max_position, rope_dim] fp32 holds rope_dim / 2 cosines and as many sines per position; norm [kv_rank].
    """
    rope_dim, kv_rank = cos_sin.shape[1], norm.shape[0]
    heads = min(_HEADS, triton.next_power_of_2(num_heads))
    overlap = overlaps(query)
    _latent_cache_kernel[(query.shape[0], 1 + triton.cdiv(num_heads, heads))](
        query,
        latent,
        cache,
        positions,
        slot_mapping,
        cos_sin,
        norm,
        query.stride(0),
        latent.stride(0),
        eps,
        NUM_HEADS=num_heads,
        QK_DIM=query.shape[1] // num_heads,
        KV_RANK=kv_rank,
        RANK_PAD=triton.next_power_of_2(kv_rank),
        ROPE_DIM=rope_dim,
        HALF_PAD=triton.next_power_of_2(rope_dim // 2),
        HEADS=heads,
        INTERLEAVED=interleaved,
        OVERLAP=overlap,
        num_warps=2,
        launch_pdl=overlap,
    )
