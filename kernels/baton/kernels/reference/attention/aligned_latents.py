"""Latent attention whose bits do not depend on chunks and batches: all queries are absorbed, see latent_attention.

Heads attend to the cached vectors as keys, and as values whose last rope_dim columns are dropped. So the attention is
that of one KV head, whose bits depend on positions alone in tiles of a prompt and in decodes padded to tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference.attention.aligned_attention import AlignedPlan, attend_tiles
from baton.kernels.reference.attention.paged_attention import DecodePlan
from baton.kernels.reference.linear.packed import packed_rows


class AbsorbedHeads:
    """The products of heads around attention to the vectors, row by row."""

    def __init__(self, kv_b: Tensor, nope_dim: int) -> None:
        """kv_b [num_heads, nope_dim + value_dim, kv_rank]"""
        self.kv_rank = kv_b.shape[2]
        self._nope_dim = nope_dim
        self._keys = kv_b[:, :nope_dim].transpose(1, 2).contiguous()  # [num_heads, kv_rank, nope_dim]
        self._values = kv_b[:, nope_dim:]

    def lifted(self, query: Tensor) -> Tensor:
        """Returns (W_k^T q, the rotated part of q), [num_tokens, num_heads, kv_rank + rope_dim]."""
        made = [packed_rows(query[:, head, : self._nope_dim], keys, None) for head, keys in enumerate(self._keys)]
        return torch.cat((torch.stack(made, 1), query[..., self._nope_dim :]), -1)

    def values(self, summed: Tensor) -> Tensor:
        """Returns [num_tokens, num_heads, value_dim] of sums [num_tokens, num_heads, kv_rank + rope_dim]."""
        parts = summed[..., : self.kv_rank].unbind(1)
        return torch.stack([packed_rows(part, own, None) for part, own in zip(parts, self._values, strict=True)], 1)


def attend_latents_alone(query: Tensor, cache: Tensor, plan: DecodePlan, heads: AbsorbedHeads, scale: float) -> Tensor:
    """Returns the attention [num_seqs, num_heads, value_dim] of query [num_seqs, num_heads, nope_dim + rope_dim].

    cache [num_blocks, 1, 1, block_size, kv_rank + rope_dim]; the plan's keys are padded to tiles.
    """
    latents = plan.gather.parts(cache, len(query))[0]  # [num_seqs, 1, tokens, dim]
    lifted = heads.lifted(query).unsqueeze(1)
    summed = functional.scaled_dot_product_attention(lifted, latents, latents, attn_mask=plan.mask, scale=scale)
    return heads.values(summed.squeeze(1))


def attend_latents_aligned(
    query: Tensor, cache: Tensor, plan: AlignedPlan, heads: AbsorbedHeads, scale: float
) -> Tensor:
    """Returns the causal attention of one chunk's queries. Shapes as in `attend_latents_alone`."""
    latents = plan.gather.parts(cache, 1)[0, 0].expand(query.shape[1], -1, -1)  # [num_heads, tokens, dim]
    return heads.values(attend_tiles(heads.lifted(query), latents, latents, plan, scale))
