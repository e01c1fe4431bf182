"""Attention of a prompt in tiles that depend on positions alone, so that chunks and batches do not change its bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference.attention.paged_attention import Gather

TILE = 64  # queries

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class AlignedPlan:
    """One sequence's chunk, whose keys and values are in the cache, as tiles of TILE queries.

    Every tile has all of its queries, those outside the chunk as zeros, and all keys up to its end, those not known yet
    hidden. So each is the same call of the same shape in every chunk.
    """

    gather: Gather  # of one sequence's blocks from `first_key` on, up to the last tile's end
    first_key: int  # position of the first gathered key
    start: int  # position of the chunk's first query
    num_tokens: int  # of the chunk
    window: int  # keys that a query attends to, including its own; 0: all
    masks: dict[int, Tensor]  # by the tile's first position: [TILE, keys], added to the scores


def plan_aligned(gather: Gather, first_key: int, start: int, num_tokens: int, window: int) -> AlignedPlan:
    """Returns the plan of a chunk whose gathered keys begin at position `first_key`."""
    tiles = range(start // TILE * TILE, start + num_tokens, TILE)
    masks = {tile: _mask(tile, *tile_keys(tile, TILE, window), window, gather.out) for tile in tiles}
    return AlignedPlan(gather, first_key, start, num_tokens, window, masks)


def tile_keys(start: int, num_tokens: int, window: int) -> tuple[int, int]:
    """Returns the range of keys, as multiples of TILE, that the tiles of a chunk read."""
    first_tile = start // TILE * TILE
    end = -(-(start + num_tokens) // TILE) * TILE
    first = max(0, first_tile - window + 1) // TILE * TILE if window else 0
    return first, end


def attend_aligned(
    query: Tensor, cache: Tensor, plan: AlignedPlan, scale: float, kv_scale: Tensor | None = None
) -> Tensor:
    """Returns softmax_{j <= i}(scale q_i K_j) V_j for the query [num_tokens, num_q_heads, head_dim] of one chunk.

    `kv_scale` [2, num_kv_heads] multiplies a quantized cache.
    """
    num_kv_heads = cache.shape[2]
    group = query.shape[1] // num_kv_heads
    keys, values = plan.gather.keys_values(cache, 1, kv_scale)
    keys, values = (side[0].repeat_interleave(group, 0) for side in (keys, values))
    return attend_tiles(query, keys, values, plan, scale)


def attend_tiles(query: Tensor, keys: Tensor, values: Tensor, plan: AlignedPlan, scale: float) -> Tensor:
    """Returns the attention [num_tokens, num_q_heads, head_dim] of one chunk's queries of this shape, over the gathered
    keys and values [num_q_heads, keys, head_dim]."""
    num_tokens, num_q_heads, head_dim = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    stop = plan.start + num_tokens
    for tile, mask in plan.masks.items():
        begin, end = max(tile, plan.start), min(tile + TILE, stop)
        queries = query.new_zeros(num_q_heads, TILE, head_dim)
        queries[:, begin - tile : end - tile] = query[begin - plan.start : end - plan.start].transpose(0, 1)
        first, last = tile_keys(tile, TILE, plan.window)
        seen = slice(first - plan.first_key, last - plan.first_key)
        part = functional.scaled_dot_product_attention(
            queries[None], keys[None, :, seen], values[None, :, seen], attn_mask=mask, scale=scale
        )
        out[begin - plan.start : end - plan.start] = part[0, :, begin - tile : end - tile].transpose(0, 1)
    return out


def _mask(tile: int, first: int, last: int, window: int, like: Tensor) -> Tensor:
    """Returns a mask [TILE, last - first], added to the scores of a tile's queries."""
    keys = torch.arange(first, last, device=like.device)
    own = torch.arange(tile, tile + TILE, device=like.device)[:, None]
    hidden = keys > own
    if window:
        hidden |= keys <= own - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, _NEVER)
