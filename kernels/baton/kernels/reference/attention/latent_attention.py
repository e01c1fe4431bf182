"""Multi-head latent attention over paged latents: one vector a token, from which all heads make keys and values.

A cached vector is c (kv_rank values), then the rotated key k_r (rope_dim values). Head h has keys (W_k c, k_r) and
values W_v c, where W_k [nope_dim, kv_rank] and W_v [value_dim, kv_rank] are its part of `kv_b`. There are two ways:

absorbed   q^T W_k c = (W_k^T q)^T c: queries of kv_rank + rope_dim values attend to the vectors; W_v follows the sum
expanded   keys and values of all heads are made from the vectors

Few queries of many keys are faster absorbed, as decodes are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference.attention.paged_attention import (
    MASK_ELEMENTS,
    DecodePlan,
    Gather,
    PrefillPlan,
    Scratch,
    causal_mask,
    plan_decode,
    plan_gather,
)


def write_latents(cache: Tensor, block_ids: Tensor, offsets: Tensor, latents: Tensor) -> None:
    """Writes latents [num_tokens, dim] into cache [num_blocks, 1, 1, block_size, dim]."""
    cache[:, 0, 0][block_ids, offsets] = latents


def attend_latents_decode(query: Tensor, cache: Tensor, plan: DecodePlan, kv_b: Tensor, scale: float) -> Tensor:
    """Returns the attention [num_seqs, num_heads, value_dim] of query [num_seqs, num_heads, nope_dim + rope_dim].

    cache [num_blocks, 1, 1, block_size, kv_rank + rope_dim], kv_b [num_heads, nope_dim + value_dim, kv_rank].
    """
    latents = _gathered(plan.gather, cache, len(query))  # [num_seqs, tokens, dim]
    return _absorbed(query, latents, kv_b, plan.mask.squeeze(1), scale)


def attend_latents_prefill(query: Tensor, cache: Tensor, plan: PrefillPlan, kv_b: Tensor, scale: float) -> Tensor:
    """Returns the causal attention of one chunk's queries. Shapes as in `attend_latents_decode`."""
    num_tokens, _, qk_dim = query.shape
    kv_rank, size = kv_b.shape[2], kv_b.shape[1]
    latents = _gathered(plan.gather, cache, 1)[0, : plan.seq_len]
    nope_dim = qk_dim - (cache.shape[-1] - kv_rank)
    # Multiplications of a head: making a key and a value, against what longer queries and values cost more a pair.
    if num_tokens * (cache.shape[-1] + kv_rank - qk_dim - (size - nope_dim)) < size * kv_rank:
        return _absorbed_chunk(query, latents, kv_b, scale)
    return _expanded(query, latents, plan, kv_b, scale)


def _gathered(gather: Gather, cache: Tensor, num_seqs: int) -> Tensor:
    """Returns the vectors of sequences, [num_seqs, tokens, dim], valid until the scratch is used again."""
    return gather.parts(cache, num_seqs)[0, :, 0]


def _lifted(query: Tensor, kv_b: Tensor, dim: int) -> Tensor:
    """Returns (W_k^T q, the rotated part of q), [num_tokens, num_heads, dim]."""
    kv_rank = kv_b.shape[2]
    nope_dim = query.shape[2] - (dim - kv_rank)
    lifted = torch.empty(*query.shape[:2], dim, dtype=query.dtype, device=query.device)
    lifted[..., :kv_rank] = torch.bmm(query[..., :nope_dim].transpose(0, 1), kv_b[:, :nope_dim]).transpose(0, 1)
    lifted[..., kv_rank:] = query[..., nope_dim:]
    return lifted


def _absorbed_chunk(query: Tensor, latents: Tensor, kv_b: Tensor, scale: float) -> Tensor:
    """query [num_tokens, num_heads, qk_dim], latents [tokens, dim]"""
    num_tokens, num_heads, _ = query.shape
    tile = max(1, MASK_ELEMENTS // (num_heads * len(latents)))
    made = []
    for start in range(0, num_tokens, tile):
        stop = min(start + tile, num_tokens)
        seen = latents[: len(latents) - num_tokens + stop]
        mask = causal_mask(stop - start, len(seen), 0, query).unsqueeze(1)
        made.append(_absorbed(query[start:stop], seen, kv_b, mask, scale))
    return torch.cat(made)


def _absorbed(query: Tensor, latents: Tensor, kv_b: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query [n, num_heads, qk_dim], latents [n, tokens, dim] or, of one sequence, [tokens, dim], mask [n, 1, tokens]"""
    kv_rank, dim = kv_b.shape[2], latents.shape[-1]
    nope_dim = query.shape[2] - (dim - kv_rank)
    scores = torch.matmul(_lifted(query, kv_b, dim), latents.transpose(-1, -2)).mul_(scale).add_(mask)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    summed = torch.matmul(weights, latents[..., :kv_rank])
    return torch.bmm(summed.transpose(0, 1), kv_b[:, nope_dim:].transpose(1, 2)).transpose(0, 1).contiguous()


def _expanded(query: Tensor, latents: Tensor, plan: PrefillPlan, kv_b: Tensor, scale: float) -> Tensor:
    num_tokens, num_heads, qk_dim = query.shape
    kv_rank = kv_b.shape[2]
    nope_dim = qk_dim - (latents.shape[1] - kv_rank)
    value_dim = kv_b.shape[1] - nope_dim
    made = functional.linear(latents[:, :kv_rank], kv_b.flatten(0, 1)).view(plan.seq_len, num_heads, -1)
    keys = made.new_empty(num_heads, plan.seq_len, qk_dim)
    keys[..., :nope_dim] = made[..., :nope_dim].transpose(0, 1)
    keys[..., nope_dim:] = latents[:, kv_rank:]
    # PyTorch's fused attention takes keys and values of one width.
    width = max(qk_dim, value_dim)
    values = made.new_zeros(num_heads, plan.seq_len, width)
    values[..., :value_dim] = made[..., nope_dim:].transpose(0, 1)
    if width > qk_dim:
        query, keys = functional.pad(query, (0, width - qk_dim)), functional.pad(keys, (0, width - qk_dim))
    queries = query.transpose(0, 1)
    if plan.seq_len == num_tokens:
        out = functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=scale
        )
        return out[0, :, :, :value_dim].transpose(0, 1).contiguous()
    out = made.new_empty(num_tokens, num_heads, value_dim)
    tile = max(1, MASK_ELEMENTS // plan.seq_len)
    for start in range(0, num_tokens, tile):
        stop = min(start + tile, num_tokens)
        end = plan.seq_len - num_tokens + stop  # after the last key of the tile's last query
        mask = causal_mask(stop - start, end, 0, query)
        part = functional.scaled_dot_product_attention(
            queries[None, :, start:stop], keys[None, :, :end], values[None, :, :end], attn_mask=mask, scale=scale
        )
        out[start:stop] = part[0, :, :, :value_dim].transpose(0, 1)
    return out


def latent_decode_attention(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, kv_b: Tensor, scale: float
) -> Tensor:
    """Computes attention of query [num_seqs, num_heads, nope_dim + rope_dim] over each sequence's first tokens.

    block_table [num_seqs, max_blocks], seq_lens [num_seqs]; others as in `attend_latents_decode`.
    """
    gather = plan_gather(block_table, cache, Scratch(cache))
    plan = plan_decode(gather, seq_lens, block_table.shape[1] * cache.shape[3])
    return attend_latents_decode(query, cache, plan, kv_b, scale)


def latent_prefill_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    kv_b: Tensor,
    scale: float,
) -> Tensor:
    """Computes causal attention of query [num_tokens, num_heads, nope_dim + rope_dim], each sequence's last tokens.

    query_start_loc [num_seqs + 1]; others as in `latent_decode_attention`.
    """
    block_size, scratch = cache.shape[3], Scratch(cache)
    starts = query_start_loc.tolist()
    chunks = []
    for seq, seq_len in enumerate(seq_lens.tolist()):
        start, stop = starts[seq], starts[seq + 1]
        blocks = block_table[seq : seq + 1, : -(-seq_len // block_size)]
        plan = PrefillPlan(plan_gather(blocks, cache, scratch), seq_len, stop - start, 0)
        chunks.append(attend_latents_prefill(query[start:stop], cache, plan, kv_b, scale))
    return torch.cat(chunks)
