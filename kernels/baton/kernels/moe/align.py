"""Sorts the pairs of token and expert by expert, in tiles of one expert each. The host reads nothing back.

A pair's number is token * top_k + choice. Tiles are as many as the worst choice of experts needs, so that a launch over
them depends on sizes alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

_BLOCK = 1024


class Alignment(NamedTuple):
    """Pairs of a token and an expert, sorted by expert and padded to whole tiles."""

    pairs: Tensor  # [num_tiles * tile] int32; the number of pairs where a tile's end is empty; of no tile: undefined
    experts: Tensor  # [num_tiles] int32; -1: no tile
    tile: int


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _align_kernel(
    pairs_ptr,  # [num_tiles * TILE] int32
    experts_ptr,  # [num_tiles] int32
    ids_ptr,  # [num_pairs]
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tiles of expert e begin behind those of the experts below e; its pairs keep their order."""
    # grid: (NUM_EXPERTS + 1), the last for what is left of the tiles
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    bins = tl.arange(0, EXPERTS_PAD)
    counts = tl.zeros([EXPERTS_PAD], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < num_pairs, other=NUM_EXPERTS).to(tl.int32)
        counts += tl.histogram(ids, EXPERTS_PAD)
    tiles = tl.where(bins < NUM_EXPERTS, (counts + TILE - 1) // TILE, 0)
    first = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    if expert == NUM_EXPERTS:
        for start in range(first, num_tiles, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(experts_ptr + at, -1, mask=at < num_tiles)
    else:
        count = tl.sum(tl.where(bins == expert, counts, 0), 0)
        end = first + tl.sum(tl.where(bins == expert, tiles, 0), 0)
        for start in range(first, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(experts_ptr + at, expert, mask=at < end)
        empty = count + tl.arange(0, TILE)
        tl.store(pairs_ptr + first * TILE + empty, num_pairs, mask=empty < (end - first) * TILE)
        place = first * TILE
        for start in range(0, num_pairs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ids = tl.load(ids_ptr + at, mask=at < num_pairs, other=NUM_EXPERTS).to(tl.int32)
            mine = (ids == expert).to(tl.int32)
            tl.store(pairs_ptr + place + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
            place += tl.sum(mine, 0)


INDEX_KERNELS = (_align_kernel,)  # what these write is used as an index


def align(ids: Tensor, num_experts: int, tile: int) -> Alignment:
    """Returns the pairs of ids [num_tokens, top_k] in tiles of `tile` pairs."""
    num_pairs = ids.numel()
    num_tiles = num_pairs // tile + min(num_experts, num_pairs)
    pairs = torch.empty(num_tiles * tile, dtype=torch.int32, device=ids.device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    overlap = overlaps(ids)
    _align_kernel[(num_experts + 1,)](
        pairs,
        experts,
        ids,
        num_pairs,
        num_tiles,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=triton.next_power_of_2(num_experts + 1),
        TILE=tile,
        BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(num_pairs))),
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return Alignment(pairs, experts, tile)
