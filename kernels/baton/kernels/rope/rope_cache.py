"""The steps between the qkv projection and attention: q/k norm, RoPE, and the write of K and V into a pool, if any."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _rope_kernel(
    qkv_ptr,  # [num_tokens, (num_q_heads + 2 num_kv_heads) * HEAD_DIM]; q is rotated in place
    cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    positions_ptr,  # [num_tokens] int32
    slot_mapping_ptr,  # [num_tokens] int32, block * BLOCK_SIZE + offset; -1 writes nothing
    cos_sin_ptr,  # [max_position, HEAD_DIM] fp32: cosines, then sines
    q_norm_ptr,  # [HEAD_DIM]
    k_norm_ptr,  # [HEAD_DIM]
    kv_scale_ptr,  # [2, num_kv_heads] fp32
    query_scale_ptr,  # [max_position] fp32
    qkv_stride,
    num_q_heads,
    num_kv_heads,
    eps,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUERY_SCALED: tl.constexpr,
    IN_PLACE: tl.constexpr,  # there is no pool: k is rotated in place too
    OVERLAP: tl.constexpr,
):
    """(a, b) -> (a cos - b sin, b cos + a sin) for the pairs a, b of each head, after its norm if NORM"""
    # grid: (num_tokens, (num_q_heads + 2 num_kv_heads) / HEADS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, HALF_PAD)
    num_heads = num_q_heads + 2 * num_kv_heads
    real = (heads < num_heads)[:, None] & (dims < half)[None, :]
    # Pairs are in the halves of a head, or adjacent, or in the halves of its first dimensions. Dimensions after those
    # do not rotate; their cosines are 1 and their sines are 0.
    first = dims
    second = dims + half
    if INTERLEAVED:
        first = dims * 2
        second = dims * 2 + 1
    elif ROTARY_DIM < HEAD_DIM:
        turns = dims < ROTARY_DIM // 2
        first = tl.where(turns, dims, dims + ROTARY_DIM // 2)
        second = first + tl.where(turns, ROTARY_DIM // 2, (HEAD_DIM - ROTARY_DIM) // 2)
    at = token * qkv_stride + heads[:, None] * HEAD_DIM
    low = tl.load(qkv_ptr + at + first[None, :], mask=real, other=0.0)
    high = tl.load(qkv_ptr + at + second[None, :], mask=real, other=0.0)
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    is_query = heads < num_q_heads
    is_value = heads >= num_q_heads + num_kv_heads
    if NORM:
        rms = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
        inside = dims < half
        q_low = tl.load(q_norm_ptr + first, mask=inside, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_norm_ptr + second, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_norm_ptr + first, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_norm_ptr + second, mask=inside, other=0.0).to(tl.float32)[None, :]
        dtype = qkv_ptr.dtype.element_ty
        a = ((a * rms).to(dtype).to(tl.float32) * tl.where(is_query[:, None], q_low, k_low)).to(dtype).to(tl.float32)
        b = ((b * rms).to(dtype).to(tl.float32) * tl.where(is_query[:, None], q_high, k_high)).to(dtype).to(tl.float32)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + dims, mask=dims < half, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + half + dims, mask=dims < half, other=0.0)[None, :]
    new_low = tl.where(is_value[:, None], low.to(tl.float32), a * cos - b * sin).to(low.dtype)
    new_high = tl.where(is_value[:, None], high.to(tl.float32), b * cos + a * sin).to(low.dtype)
    if QUERY_SCALED:
        query_scale = tl.load(query_scale_ptr + position)
        scale = tl.where(is_query, query_scale, 1.0)[:, None]
        new_low = (new_low.to(tl.float32) * scale).to(low.dtype)
        new_high = (new_high.to(tl.float32) * scale).to(low.dtype)
    rotated = is_query
    if IN_PLACE:
        rotated = heads < num_q_heads + num_kv_heads
    tl.store(qkv_ptr + at + first[None, :], new_low, mask=real & rotated[:, None])
    tl.store(qkv_ptr + at + second[None, :], new_high, mask=real & rotated[:, None])
    if not IN_PLACE:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot >= 0:
            # K heads, then V heads: the pool's own order within a block.
            side = heads - num_q_heads
            cell = (slot // BLOCK_SIZE * 2 * num_kv_heads + side) * BLOCK_SIZE + slot % BLOCK_SIZE
            where = cell[:, None] * HEAD_DIM
            keep = real & (side >= 0)[:, None]
            kv_type = cache_ptr.dtype.element_ty
            kv_low = new_low
            kv_high = new_high
            if SCALED:
                scale = tl.load(kv_scale_ptr + side, mask=(side >= 0) & (heads < num_heads), other=1.0)[:, None]
                kv_low = _within(tl.div_rn(new_low.to(tl.float32), scale))
                kv_high = _within(tl.div_rn(new_high.to(tl.float32), scale))
            tl.store(cache_ptr + where + first[None, :], kv_low.to(kv_type), mask=keep)
            tl.store(cache_ptr + where + second[None, :], kv_high.to(kv_type), mask=keep)


@triton.jit
def _within(x):
    """Clamps to the range of e4m3, because larger values would become NaN."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


def rope_and_cache(
    qkv: Tensor,
    cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    num_q_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scale: Tensor | None = None,
    rotary_dim: int = 0,
    interleaved: bool = False,
    query_scale: Tensor | None = None,
) -> None:
    """Rotates the queries of qkv [num_tokens, (q + 2 kv heads) * head_dim] in place and writes K and V into cache
    [num_blocks, 2, num_kv_heads, block_size, head_dim] at slot_mapping [num_tokens] int32 (-1: not at all).

    cos_sin [max_position, head_dim] fp32 holds head_dim / 2 cosines and as many sines per position. With `kv_scale`
    [2, num_kv_heads] fp32, cache is float8_e4m3fn and holds keys and values divided by it. Of each head the first
    `rotary_dim` dimensions rotate (0: all), in pairs of their halves or, if `interleaved`, of adjacent ones. Queries at
    a position are multiplied by `query_scale` [max_position] fp32.
    """
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    num_heads = num_q_heads + 2 * num_kv_heads
    heads = min(16, triton.next_power_of_2(num_heads))
    overlap = overlaps(qkv)
    _rope_kernel[(qkv.shape[0], triton.cdiv(num_heads, heads))](
        qkv,
        cache,
        positions,
        slot_mapping,
        cos_sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        cos_sin if kv_scale is None else kv_scale,
        cos_sin if query_scale is None else query_scale,
        qkv.stride(0),
        num_q_heads,
        num_kv_heads,
        eps,
        NORM=q_norm is not None,
        SCALED=kv_scale is not None,
        HEAD_DIM=head_dim,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        HEADS=heads,
        ROTARY_DIM=rotary_dim or head_dim,
        INTERLEAVED=interleaved,
        QUERY_SCALED=query_scale is not None,
        IN_PLACE=False,
        num_warps=4,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )


def rope_in_place(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_q_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    rotary_dim: int = 0,
    interleaved: bool = False,
) -> None:
    """Rotates queries and keys of qkv [num_tokens, (q + 2 kv heads) * head_dim] in place. See rope_and_cache."""
    head_dim = cos_sin.shape[1]
    num_heads = qkv.shape[1] // head_dim
    num_kv_heads = (num_heads - num_q_heads) // 2
    heads = min(16, triton.next_power_of_2(num_q_heads + num_kv_heads))
    overlap = overlaps(qkv)
    _rope_kernel[(qkv.shape[0], triton.cdiv(num_q_heads + num_kv_heads, heads))](
        qkv,
        qkv,
        positions,
        positions,
        cos_sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        cos_sin,
        cos_sin,
        qkv.stride(0),
        num_q_heads,
        num_kv_heads,
        eps,
        NORM=q_norm is not None,
        SCALED=False,
        HEAD_DIM=head_dim,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=1,
        HEADS=heads,
        ROTARY_DIM=rotary_dim or head_dim,
        INTERLEAVED=interleaved,
        QUERY_SCALED=False,
        IN_PLACE=True,
        num_warps=4,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
