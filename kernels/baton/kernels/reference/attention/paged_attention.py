"""Attention over paged KV. Plans hold the blocks and masks that all layers of a step share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference.kv.quantization import dequantize_into, dequantize_kv

_NEVER = float("-inf")
MASK_ELEMENTS = 1 << 22  # per tile of a prefill chunk


@dataclass(frozen=True, slots=True)
class Gather:
    """Gathers the blocks of sequences, so that the tokens of each head are contiguous."""

    rows: Tensor  # [parts num_seqs num_kv_heads max_blocks], of the cache as [num_blocks parts num_kv_heads, -1]
    out: Tensor  # [the same, block_size * head_dim]: scratch shared by layers and plans
    stored: Tensor | None = None  # the same in e4m3, as bytes, of a quantized cache

    def parts(self, cache: Tensor, num_seqs: int) -> Tensor:
        """Returns [parts, num_seqs, num_kv_heads, tokens, head_dim] of cache [num_blocks, parts, num_kv_heads,
        block_size, head_dim], valid until the scratch is used again."""
        num_blocks, parts, num_kv_heads, block_size, head_dim = cache.shape
        by_head = cache.view(num_blocks * parts * num_kv_heads, block_size * head_dim)
        if self.stored is None:
            torch.index_select(by_head, 0, self.rows, out=self.out)
        else:
            torch.index_select(by_head.view(torch.uint8), 0, self.rows, out=self.stored)
            dequantize_into(self.out, self.stored)
        return self.out.view(parts, num_seqs, num_kv_heads, -1, head_dim)

    def keys_values(self, cache: Tensor, num_seqs: int, kv_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns both parts of a cache of keys and values. `kv_scale` [2, num_kv_heads] multiplies a quantized one."""
        found = self.parts(cache, num_seqs)
        if kv_scale is not None:
            found.mul_(kv_scale.to(found.dtype)[:, None, :, None, None])
        keys, values = found.unbind(0)
        return keys, values


class Scratch:
    """Memory that grows and is never freed, because new pages cost more than the copy into them."""

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of the memory; None: that of `like`."""
        self._memory = torch.empty(0, dtype=dtype or like.dtype, device=like.device)

    def take(self, num_rows: int, size: int) -> Tensor:
        """Returns [num_rows, size] of the scratch, shared by all callers."""
        count = num_rows * size
        if count > self._memory.numel():
            self._memory = torch.empty(count + count // 2, dtype=self._memory.dtype, device=self._memory.device)
        return self._memory[:count].view(num_rows, size)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sequences of similar length that decode one token each."""

    gather: Gather
    mask: Tensor  # [num_seqs, 1, 1, max_blocks * block_size], added to the scores


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One sequence's chunk: its last tokens, whose keys and values are already in the cache."""

    gather: Gather  # of one sequence
    seq_len: int  # tokens, including the chunk
    num_tokens: int  # of the chunk
    window: int  # keys that a query attends to, including its own; 0: all


def plan_gather(block_table: Tensor, cache: Tensor, scratch: Scratch, stored: Scratch | None = None) -> Gather:
    """Returns the gather of block_table [num_seqs, max_blocks]. `stored`: bytes, for a quantized cache."""
    _, parts, num_kv_heads, block_size, head_dim = cache.shape
    sides = torch.arange(parts, device=block_table.device).view(parts, 1, 1, 1) * num_kv_heads
    heads = torch.arange(num_kv_heads, device=block_table.device).view(1, 1, num_kv_heads, 1)
    first = block_table.long().view(1, block_table.shape[0], 1, -1) * (parts * num_kv_heads)
    rows = (first + sides + heads).view(-1)
    size = block_size * head_dim
    return Gather(rows, scratch.take(len(rows), size), None if stored is None else stored.take(len(rows), size))


def plan_decode(gather: Gather, seq_lens: Tensor, max_tokens: int, window: int = 0) -> DecodePlan:
    """Returns the plan of sequences of seq_lens [num_seqs], gathered at max_tokens each. Masks tokens past the ends."""
    positions = torch.arange(max_tokens, device=seq_lens.device)
    ends = seq_lens.view(-1, 1)
    hidden = positions >= ends
    if window:
        hidden |= positions < ends - window
    mask = torch.zeros(hidden.shape, dtype=gather.out.dtype, device=hidden.device).masked_fill_(hidden, _NEVER)
    return DecodePlan(gather, mask.view(len(mask), 1, 1, -1))


def attend_decode(
    query: Tensor,
    cache: Tensor,
    plan: DecodePlan,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """Returns softmax(cap tanh(scale q K^T / cap)) V for query [num_seqs, num_q_heads, head_dim], without a cap
    softmax(scale q K^T) V. `sinks` [num_q_heads] are further scores in each softmax, which belong to no value.
    `kv_scale` [2, num_kv_heads] multiplies a quantized cache."""
    num_seqs, num_q_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    keys, values = plan.gather.keys_values(cache, num_seqs, kv_scale)
    grouped = query.view(num_seqs, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    by_head = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
    out = _attention(grouped, keys, values, plan.mask, scale, soft_cap, by_head)
    return out.reshape(num_seqs, num_q_heads, head_dim)


def attend_prefill(
    query: Tensor,
    cache: Tensor,
    plan: PrefillPlan,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """Returns softmax_{j <= i}(cap tanh(scale q_i K_j / cap)) V_j for the query [num_tokens, num_q_heads, head_dim] of
    one chunk, without a cap softmax_{j <= i}(scale q_i K_j) V_j. `sinks` and `kv_scale` as in `attend_decode`."""
    num_tokens, num_q_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    group = num_q_heads // num_kv_heads
    keys, values = plan.gather.keys_values(cache, 1, kv_scale)
    # The query heads of a group read one KV head, through a stride of 0.
    keys = keys[0, :, None, : plan.seq_len].expand(-1, group, -1, -1)
    values = values[0, :, None, : plan.seq_len].expand(-1, group, -1, -1)
    grouped = query.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    by_head = None if sinks is None else sinks.view(num_kv_heads, group, 1, 1)
    if plan.seq_len == num_tokens and not plan.window and not soft_cap and by_head is None:
        out = functional.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(num_tokens, num_q_heads, head_dim)
    out = torch.empty(num_tokens, num_kv_heads, group, head_dim, dtype=query.dtype, device=query.device)
    # Tiles longer than the window would compute more masked keys.
    tile = max(1, min(plan.window or num_tokens, MASK_ELEMENTS // plan.seq_len))
    for start in range(0, num_tokens, tile):
        stop = min(start + tile, num_tokens)
        end = plan.seq_len - num_tokens + stop  # after the last key of the tile's last query
        first = max(0, end - (stop - start) - plan.window + 1) if plan.window else 0
        mask = causal_mask(stop - start, end - first, plan.window, query)
        seen = (keys[:, :, first:end], values[:, :, first:end])
        tile_out = _attention(grouped[:, :, start:stop], *seen, mask, scale, soft_cap, by_head)
        out[start:stop] = tile_out.permute(2, 0, 1, 3)
    return out.view(num_tokens, num_q_heads, head_dim)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """[..., num_queries, head_dim]; the mask is added to the scores; sinks [..., num_queries or 1, 1]."""
    if not soft_cap and sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, keys.transpose(-1, -2)).mul_(scale)
    if soft_cap:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.add_(mask)
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.matmul(scores.softmax(-1, dtype=wide).to(values.dtype), values)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, column), -1).softmax(-1, dtype=wide)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def causal_mask(num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor:
    """Returns a mask [num_queries, num_keys], added to scores, for the last num_queries of num_keys positions."""
    positions = torch.arange(num_keys, device=like.device)
    own = positions[num_keys - num_queries :, None]
    hidden = positions > own
    if window:
        hidden |= positions <= own - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, _NEVER)


def decode_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    kv_scale: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention of query [num_seqs, num_q_heads, head_dim] over each sequence's first seq_lens tokens.

    cache [num_blocks, 2, num_kv_heads, block_size, head_dim], block_table [num_seqs, max_blocks], seq_lens [num_seqs].
    `kv_scale` [2, num_kv_heads] multiplies a quantized cache; sinks [num_q_heads] as in `attend_decode`.
    """
    if kv_scale is not None:
        cache = dequantize_kv(cache, kv_scale, query.dtype)
    gather = plan_gather(block_table, cache, Scratch(cache))
    plan = plan_decode(gather, seq_lens, block_table.shape[1] * cache.shape[3], window)
    return attend_decode(query, cache, plan, scale, soft_cap, sinks)


def prefill_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    kv_scale: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of query [num_tokens, num_q_heads, head_dim], the last tokens of each sequence, over
    keys and values of all its tokens in cache [num_blocks, 2, num_kv_heads, block_size, head_dim].

    block_table [num_seqs, max_blocks], seq_lens [num_seqs], query_start_loc [num_seqs + 1].
    `kv_scale` [2, num_kv_heads] multiplies a quantized cache; sinks [num_q_heads] as in `attend_decode`.
    """
    if kv_scale is not None:
        cache = dequantize_kv(cache, kv_scale, query.dtype)
    block_size, scratch = cache.shape[3], Scratch(cache)
    starts: Sequence[int] = query_start_loc.tolist()
    chunks = []
    for seq, seq_len in enumerate(seq_lens.tolist()):
        start, stop = starts[seq], starts[seq + 1]
        blocks = block_table[seq : seq + 1, : -(-seq_len // block_size)]
        plan = PrefillPlan(plan_gather(blocks, cache, scratch), seq_len, stop - start, window)
        chunks.append(attend_prefill(query[start:stop], cache, plan, scale, soft_cap, sinks))
    return torch.cat(chunks)
