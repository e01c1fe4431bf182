"""Sorts pairs of a token and an expert by expert, into tiles of one expert each. The host reads nothing back.

A pair's number is token * top_k + choice. The number of tiles suffices for any choice of experts, so that the grid of a
launch depends only on sizes. Few pairs are sorted in one launch, in which each expert's program reads all of them. Many
pairs take three launches: one counts the pairs of each block, one sums the counts of each expert, one places the pairs.
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
_FEW_PAIRS = 2048
_COUNTED = 256  # pairs per block, if there are many pairs
_COMPARED = 32  # pairs or experts that a block's pairs are compared with at once
_SCANNED = 512  # blocks whose counts are summed at once


class Alignment(NamedTuple):
    """Pairs of a token and an expert, sorted by expert and padded to whole tiles."""

    pairs: Tensor  # [num_tiles * tile] int32; num_pairs at a tile's empty places; undefined beyond the last tile
    experts: Tensor  # [num_tiles] int32; -1: no tile
    places: Tensor  # [num_pairs] int32, each pair's index in `pairs`
    spans: Tensor  # [num_experts, 2] int32: each expert's first tile and number of tiles
    tile: int


@triton.jit
def _write_span(
    pairs_ptr, experts_ptr, spans_ptr, expert, first, end, count, num_pairs, num_tiles,
    NUM_EXPERTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes an expert's tiles, span and empty places. As expert NUM_EXPERTS, marks the remaining tiles as unused."""
    if expert == NUM_EXPERTS:
        for start in range(first, num_tiles, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(experts_ptr + at, -1, mask=at < num_tiles)
    else:
        tl.store(spans_ptr + expert * 2, first)
        tl.store(spans_ptr + expert * 2 + 1, end - first)
        for start in range(first, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(experts_ptr + at, expert, mask=at < end)
        for start in range(count, (end - first) * TILE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(pairs_ptr + first * TILE + at, num_pairs, mask=at < (end - first) * TILE)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _align_kernel(
    pairs_ptr,  # [num_tiles * TILE] int32
    experts_ptr,  # [num_tiles] int32
    places_ptr,  # [num_pairs] int32
    spans_ptr,  # [NUM_EXPERTS, 2] int32
    ids_ptr,  # [num_pairs]
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Places the pairs of expert e, in their order, in tiles that follow those of the experts below e."""
    # grid: (NUM_EXPERTS + 1), the last for unused tiles
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
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    end = first + tl.sum(tl.where(bins == expert, tiles, 0), 0)
    _write_span(
        pairs_ptr, experts_ptr, spans_ptr, expert, first, end, count, num_pairs, num_tiles, NUM_EXPERTS, TILE, BLOCK
    )
    if expert < NUM_EXPERTS:
        place = first * TILE
        for start in range(0, num_pairs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ids = tl.load(ids_ptr + at, mask=at < num_pairs, other=NUM_EXPERTS).to(tl.int32)
            mine = (ids == expert).to(tl.int32)
            own = place + tl.cumsum(mine, 0) - 1
            tl.store(pairs_ptr + own, at, mask=mine > 0)
            tl.store(places_ptr + at, own, mask=mine > 0)
            place += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _count_kernel(
    counts_ptr,  # [EXPERTS_PAD, num_blocks] int32
    ids_ptr,  # [num_pairs]
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Counts the pairs of each expert in a block."""
    # grid: (num_blocks)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < num_pairs, other=NUM_EXPERTS).to(tl.int32)
    bins = tl.arange(0, EXPERTS_PAD)
    tl.store(counts_ptr + bins * num_blocks + tl.program_id(0), tl.histogram(ids, EXPERTS_PAD))


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_kernel(
    counts_ptr,  # [EXPERTS_PAD, num_blocks] int32
    totals_ptr,  # [NUM_EXPERTS] int32
    num_blocks,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Replaces an expert's counts by the sums of those before them."""
    # grid: (NUM_EXPERTS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        at = counts_ptr + expert * num_blocks + blocks
        counts = tl.load(at, mask=blocks < num_blocks, other=0)
        tl.store(at, total + tl.cumsum(counts, 0) - counts, mask=blocks < num_blocks)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "num_blocks"])
def _place_kernel(
    pairs_ptr,  # [num_tiles * TILE] int32
    experts_ptr,  # [num_tiles] int32
    places_ptr,  # [num_pairs] int32
    spans_ptr,  # [NUM_EXPERTS, 2] int32
    before_ptr,  # [EXPERTS_PAD, num_blocks] int32, the expert's pairs in earlier blocks
    totals_ptr,  # [NUM_EXPERTS] int32
    ids_ptr,  # [num_pairs]
    num_pairs,
    num_tiles,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Writes the places of a block's pairs, after those of its experts' earlier pairs; or the tiles of an expert."""
    # grid: (num_blocks + NUM_EXPERTS + 1), the last for unused tiles
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    if block < num_blocks:
        _place_block(
            pairs_ptr, places_ptr, before_ptr, totals_ptr, ids_ptr, block, num_pairs, num_blocks, NUM_EXPERTS,
            EXPERTS_PAD, TILE, BLOCK, COMPARED,
        )  # fmt: skip
    else:
        expert = block - num_blocks
        bins = tl.arange(0, EXPERTS_PAD)
        counts = tl.load(totals_ptr + bins, mask=bins < NUM_EXPERTS, other=0)
        tiles = (counts + TILE - 1) // TILE
        first = tl.sum(tl.where(bins < expert, tiles, 0), 0)
        count = tl.sum(tl.where(bins == expert, counts, 0), 0)
        end = first + tl.sum(tl.where(bins == expert, tiles, 0), 0)
        _write_span(
            pairs_ptr, experts_ptr, spans_ptr, expert, first, end, count, num_pairs, num_tiles, NUM_EXPERTS, TILE, BLOCK
        )


@triton.jit
def _place_block(
    pairs_ptr, places_ptr, before_ptr, totals_ptr, ids_ptr, block, num_pairs, num_blocks,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):  # fmt: skip
    """Writes the places of a block's pairs: after the tiles of lower experts and the earlier pairs of the same one."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    live = at < num_pairs
    ids = tl.load(ids_ptr + at, mask=live, other=0).to(tl.int32)
    before = tl.load(before_ptr + ids * num_blocks + block, mask=live, other=0)
    for start in tl.static_range(0, BLOCK, COMPARED):
        other = block * BLOCK + start + tl.arange(0, COMPARED)
        others = tl.load(ids_ptr + other, mask=other < num_pairs, other=-1).to(tl.int32)
        same = (ids[:, None] == others[None, :]) & (other[None, :] < at[:, None])
        before += tl.sum(same.to(tl.int32), 1)
    tiles_before = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, EXPERTS_PAD, COMPARED):
        lower = start + tl.arange(0, COMPARED)
        tiles = (tl.load(totals_ptr + lower, mask=lower < NUM_EXPERTS, other=0) + TILE - 1) // TILE
        tiles_before += tl.sum(tl.where(lower[None, :] < ids[:, None], tiles[None, :], 0), 1)
    place = tiles_before * TILE + before
    tl.store(pairs_ptr + place, at, mask=live)
    tl.store(places_ptr + at, place, mask=live)


def align(ids: Tensor, num_experts: int, tile: int) -> Alignment:
    """Returns the pairs of ids [num_tokens, top_k], sorted by expert, in tiles of `tile` pairs."""
    num_pairs, device = ids.numel(), ids.device
    num_tiles = num_pairs // tile + min(num_experts, num_pairs)
    aligned = Alignment(
        torch.empty(num_tiles * tile, dtype=torch.int32, device=device),
        torch.empty(num_tiles, dtype=torch.int32, device=device),
        torch.empty(num_pairs, dtype=torch.int32, device=device),
        torch.empty(num_experts, 2, dtype=torch.int32, device=device),
        tile,
    )
    if num_pairs > _FEW_PAIRS:
        _align_many(aligned, ids, num_experts)
        return aligned
    overlap = overlaps(ids)
    _align_kernel[(num_experts + 1,)](
        *aligned[:4],
        ids,
        num_pairs,
        num_tiles,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=_padded(num_experts),
        TILE=tile,
        BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(num_pairs))),
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return aligned


def _align_many(aligned: Alignment, ids: Tensor, num_experts: int) -> None:
    num_pairs, padded, overlap = ids.numel(), _padded(num_experts), overlaps(ids)
    num_blocks = triton.cdiv(num_pairs, _COUNTED)
    counts = torch.empty(padded, num_blocks, dtype=torch.int32, device=ids.device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    _count_kernel[(num_blocks,)](
        counts,
        ids,
        num_pairs,
        num_blocks,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=padded,
        BLOCK=_COUNTED,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    _scan_kernel[(num_experts,)](
        counts, totals, num_blocks, BLOCK=_SCANNED, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    _place_kernel[(num_blocks + num_experts + 1,)](
        *aligned[:4],
        counts,
        totals,
        ids,
        num_pairs,
        len(aligned.experts),
        num_blocks,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=padded,
        TILE=aligned.tile,
        BLOCK=_COUNTED,
        COMPARED=_COMPARED,
        OVERLAP=overlap,
        num_warps=8,
        launch_pdl=overlap,
    )


def _padded(num_experts: int) -> int:
    """Returns the number of bins of a histogram, a power of two that leaves a bin for masked ids."""
    return int(triton.next_power_of_2(num_experts + 1))
