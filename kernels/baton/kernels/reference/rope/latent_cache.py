"""The steps between the projections of latent attention and attention: the norm, RoPE, and the write into the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.reference.attention.latent_attention import write_latents
from baton.kernels.reference.norm.rms_norm import rms_norm
from baton.kernels.reference.rope.rope_cache import rotate, rotation


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
    rope_dim, kv_rank, block_size = cos_sin.shape[1], norm.shape[0], cache.shape[3]
    cos, sin = rotation(cos_sin, positions, 0, interleaved)
    ends = query.unflatten(1, (num_heads, -1))[..., -rope_dim:]
    ends.copy_(rotate(ends, cos, sin, interleaved))
    key = rotate(latent[:, None, kv_rank:], cos, sin, interleaved)[:, 0]
    stored = torch.cat((rms_norm(latent[:, :kv_rank].contiguous(), norm, eps), key), 1).to(cache.dtype)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    write_latents(cache, slots // block_size, slots % block_size, stored[kept])
