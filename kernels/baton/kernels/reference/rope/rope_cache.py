"""The steps between the qkv projection and attention: q/k norm, RoPE, and the write of K and V into the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.reference.kv.quantization import quantize_kv
from baton.kernels.reference.norm.rms_norm import rms_norm


def rotation(
    cos_sin: Tensor, positions: Tensor, rotary_dim: int = 0, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the two factors of `rotate` at these positions, [num_tokens, 1, rotary_dim]; 0: of whole heads.

    cos_sin [max_position, head_dim] holds head_dim / 2 cosines, then as many sines.
    """
    pairs = (rotary_dim or cos_sin.shape[-1]) // 2
    cos, sin = (each[..., :pairs] for each in cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1))
    if interleaved:
        return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for pairs of the first dimensions of heads [num_tokens, num_heads,
    head_dim], as many as cos and sin have: their halves a, b or, if `interleaved`, each even one and the next."""
    width = cos.shape[-1]
    if width < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :width], cos, sin, interleaved), heads[..., width:]), -1)
    pairs, swapped_dim = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    swapped = heads.unflatten(-1, pairs).flip(swapped_dim).flatten(-2)
    return torch.addcmul(heads * cos, swapped, sin).to(heads.dtype)


def write_kv(cache: Tensor, block_ids: Tensor, offsets: Tensor, kv: Tensor) -> None:
    """Writes kv [num_tokens, 2, kv_heads, head_dim] into cache [num_blocks, 2, kv_heads, block_size, head_dim]."""
    cache.permute(0, 3, 1, 2, 4)[block_ids, offsets] = kv


def normed_and_rotated(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool = False,
) -> Tensor:
    """Returns the query and key heads of qkv [num_tokens, num_q_heads + 2 num_kv_heads, head_dim] for attention."""
    num_rotated = num_q_heads + num_kv_heads
    heads = qkv[:, :num_rotated]
    if q_norm is not None and k_norm is not None:
        queries, keys = heads.split((num_q_heads, num_kv_heads), dim=1)
        heads = torch.cat((rms_norm(queries, q_norm, eps), rms_norm(keys, k_norm, eps)), dim=1)
    return rotate(heads, cos, sin, interleaved)


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
    [2, num_kv_heads] fp32, cache is float8_e4m3fn and holds keys and values divided by it. `rotary_dim` and
    `interleaved` as in `rotate`; 0: whole heads rotate. Queries at a position are multiplied by `query_scale`
    [max_position] fp32 of it.
    """
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    num_rotated = num_q_heads + num_kv_heads
    heads = qkv.view(qkv.shape[0], num_q_heads + 2 * num_kv_heads, head_dim)
    cos, sin = rotation(cos_sin, positions, rotary_dim, interleaved)
    rotated = normed_and_rotated(heads, cos, sin, num_q_heads, num_kv_heads, q_norm, k_norm, eps, interleaved)
    keys_values = torch.stack((rotated[:, num_q_heads:], heads[:, num_rotated:]), dim=1)
    if kv_scale is None:
        keys_values = keys_values.to(cache.dtype)
    else:
        # As bytes, which all devices can index.
        keys_values, cache = quantize_kv(keys_values, kv_scale).view(torch.uint8), cache.view(torch.uint8)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    write_kv(cache, slots // block_size, slots % block_size, keys_values[kept])
    queries = rotated[:, :num_q_heads]
    if query_scale is not None:
        queries = (queries * query_scale.index_select(0, positions).view(-1, 1, 1)).to(qkv.dtype)
    heads[:, :num_q_heads] = queries


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
    heads = qkv.view(len(qkv), -1, cos_sin.shape[1])
    num_kv_heads = (heads.shape[1] - num_q_heads) // 2
    cos, sin = rotation(cos_sin, positions, rotary_dim, interleaved)
    heads[:, : num_q_heads + num_kv_heads] = normed_and_rotated(
        heads, cos, sin, num_q_heads, num_kv_heads, q_norm, k_norm, eps, interleaved
    )
