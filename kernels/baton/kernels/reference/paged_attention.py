"""Attention over paged KV. Plans hold what all layers of a step share: which blocks to gather, what to mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_NEVER = float("-inf")
_MASK_ELEMENTS = 1 << 22  # of one tile of a prefill chunk


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sequences of like length that decode one token each."""

    head_rows: Tensor  # [2 num_seqs num_kv_heads max_blocks]: rows of the cache as [num_blocks 2 num_kv_heads, -1]
    mask: Tensor  # [num_seqs, 1, 1, max_blocks * block_size], added to the scores


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One sequence's chunk: its last tokens, whose keys and values are in the cache already."""

    head_rows: Tensor  # as DecodePlan, of one sequence
    seq_len: int  # tokens, the chunk included
    num_tokens: int  # of the chunk
    window: int  # keys that a query sees, itself included; 0: all


def head_rows(block_table: Tensor, num_kv_heads: int) -> Tensor:
    """Rows of the cache as [num_blocks 2 num_kv_heads, -1], in the order [2, num_seqs, num_kv_heads, max_blocks]."""
    sides = torch.arange(2, device=block_table.device).view(2, 1, 1, 1) * num_kv_heads
    heads = torch.arange(num_kv_heads, device=block_table.device).view(1, 1, num_kv_heads, 1)
    first = block_table.long().view(1, block_table.shape[0], 1, -1) * (2 * num_kv_heads)
    return (first + sides + heads).view(-1)


def plan_decode(
    block_table: Tensor, seq_lens: Tensor, num_kv_heads: int, block_size: int, dtype: torch.dtype, window: int = 0
) -> DecodePlan:
    """For block_table [num_seqs, max_blocks] and seq_lens [num_seqs]; entries past a sequence's end name any block."""
    positions = torch.arange(block_table.shape[1] * block_size, device=block_table.device)
    ends = seq_lens.view(-1, 1)
    hidden = positions >= ends
    if window:
        hidden |= positions < ends - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, _NEVER)
    return DecodePlan(head_rows(block_table, num_kv_heads), mask.view(len(mask), 1, 1, -1))


def plan_prefill(block_table: Tensor, seq_len: int, num_tokens: int, num_kv_heads: int, window: int = 0) -> PrefillPlan:
    """For the block table [num_blocks] of one sequence."""
    return PrefillPlan(head_rows(block_table.view(1, -1), num_kv_heads), seq_len, num_tokens, window)


def attend_decode(query: Tensor, cache: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """softmax(scale q K^T) V for query [num_seqs, num_q_heads, head_dim]."""
    num_seqs, num_q_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    keys, values = gather_kv(cache, plan.head_rows, num_seqs)
    grouped = query.view(num_seqs, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask, scale=scale)
    return out.reshape(num_seqs, num_q_heads, head_dim)


def attend_prefill(query: Tensor, cache: Tensor, plan: PrefillPlan, scale: float) -> Tensor:
    """softmax_{j <= i}(scale q_i K_j) V_j for one sequence's chunk, query [num_tokens, num_q_heads, head_dim]."""
    num_tokens, num_q_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    group = num_q_heads // num_kv_heads
    keys, values = gather_kv(cache, plan.head_rows, 1)
    # A head's group reads its keys through a stride of 0.
    keys = keys[0, :, None, : plan.seq_len].expand(-1, group, -1, -1)
    values = values[0, :, None, : plan.seq_len].expand(-1, group, -1, -1)
    grouped = query.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if plan.seq_len == num_tokens and not plan.window:
        out = functional.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(num_tokens, num_q_heads, head_dim)
    out = torch.empty(num_tokens, num_kv_heads, group, head_dim, dtype=query.dtype, device=query.device)
    tile = max(1, _MASK_ELEMENTS // plan.seq_len)
    for start in range(0, num_tokens, tile):
        stop = min(start + tile, num_tokens)
        end = plan.seq_len - num_tokens + stop  # keys that the tile's last query sees
        mask = _causal_mask(stop - start, end, plan.window, query)
        tile_out = functional.scaled_dot_product_attention(
            grouped[:, :, start:stop], keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=scale
        )
        out[start:stop] = tile_out.permute(2, 0, 1, 3)
    return out.view(num_tokens, num_q_heads, head_dim)


def gather_kv(cache: Tensor, rows: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
    """Keys and values, each [num_seqs, num_kv_heads, tokens, head_dim]."""
    num_blocks, _, num_kv_heads, block_size, head_dim = cache.shape
    by_head = cache.view(num_blocks * 2 * num_kv_heads, block_size * head_dim)
    keys, values = by_head.index_select(0, rows).view(2, num_seqs, num_kv_heads, -1, head_dim).unbind(0)
    return keys, values


def _causal_mask(num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor:
    """[num_queries, num_keys] for the last num_queries of num_keys positions, added to the scores."""
    positions = torch.arange(num_keys, device=like.device)
    own = positions[num_keys - num_queries :, None]
    hidden = positions > own
    if window:
        hidden |= positions <= own - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, _NEVER)


def decode_attention(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, *, window: int = 0
) -> Tensor:
    """Attention of query [num_seqs, num_q_heads, head_dim] over each sequence's first seq_lens tokens.

    cache [num_blocks, 2, num_kv_heads, block_size, head_dim], block_table [num_seqs, max_blocks], seq_lens [num_seqs].
    """
    _, _, num_kv_heads, block_size, _ = cache.shape
    plan = plan_decode(block_table, seq_lens, num_kv_heads, block_size, query.dtype, window)
    return attend_decode(query, cache, plan, scale)


def prefill_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    window: int = 0,
) -> Tensor:
    """Causal attention of query [num_tokens, num_q_heads, head_dim], the last tokens of each sequence, whose keys
    and values are all in cache [num_blocks, 2, num_kv_heads, block_size, head_dim].

    block_table [num_seqs, max_blocks], seq_lens [num_seqs], query_start_loc [num_seqs + 1].
    """
    _, _, num_kv_heads, block_size, _ = cache.shape
    starts: Sequence[int] = query_start_loc.tolist()
    chunks = []
    for seq, seq_len in enumerate(seq_lens.tolist()):
        start, stop = starts[seq], starts[seq + 1]
        blocks = block_table[seq, : -(-seq_len // block_size)]
        plan = plan_prefill(blocks, seq_len, stop - start, num_kv_heads, window)
        chunks.append(attend_prefill(query[start:stop], cache, plan, scale))
    return torch.cat(chunks)
