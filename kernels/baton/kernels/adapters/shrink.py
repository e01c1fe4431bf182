"""The narrow half of LoRA updates: a product with the narrow matrices of all adapters, in one launch.

A tile is some rows of one adapter. Programs beyond a tile's rank end at once, as do those of tiles without an adapter.
With few rows the product is split over k, so that it fills the GPU; the wide half adds the splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

_FEW_PROGRAMS = 264  # two a multiprocessor of an H100
_FEW_ROWS_PROGRAMS = 400  # of tiles of few rows, most of which have smaller ranks than the largest
_MAX_BLOCK_R = 64
_SPLITS = (8, 4, 2)  # of steps with few programs; each number is another kernel, so there are few
_FEW_TILE_ROWS = 16


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    low_ptr,  # [SPLITS, num_rows, PARTS, MAX_RANK] fp32
    x_ptr,  # [num_tokens, K], rows of x_stride
    slots_ptr,  # [num_slots, slot_size]
    offsets_ptr,  # [num_slots, PARTS, 2], rows of 2 TABLE
    ranks_ptr,  # [num_slots, PARTS], rows of TABLE
    order_ptr,  # [num_rows]
    tiles_ptr,  # [num_tiles, 3]
    x_stride,
    slot_size,
    num_rows,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    TABLE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """low_s[i, p, r] = sum over k in split s of x[order_i, k] a[slot, p, r, k]"""
    # grid: (num_tiles, PARTS * MAX_RANK / BLOCK_R, SPLITS)
    if OVERLAP:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    num_r = tl.cdiv(MAX_RANK, BLOCK_R)
    part = tl.program_id(1) // num_r
    split = tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    first_rank = tl.program_id(1) % num_r * BLOCK_R
    used = (count > 0) & (slot >= 0)
    rank = tl.load(ranks_ptr + slot * TABLE + part, mask=used, other=0)
    offset = tl.load(offsets_ptr + (slot * TABLE + part) * 2, mask=used, other=0)
    if OVERLAP:
        gdc_wait()
    if first_rank >= rank:
        return
    rs = first_rank + tl.arange(0, BLOCK_R)
    ks = tl.arange(0, BLOCK_K)
    a_row = slots_ptr + slot.to(tl.int64) * slot_size + tl.multiple_of(offset, 64) + rs[:, None] * K
    places = tl.arange(0, BLOCK_M)
    here = places < count
    rows = tl.load(order_ptr + start + places, mask=here, other=0).to(tl.int64)
    x_row = x_ptr + rows[:, None] * x_stride
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for k in range(split * length, min(K, (split + 1) * length), BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_row + (k + ks)[None, :], mask=here[:, None], other=0.0)
            a = tl.load(a_row + (k + ks)[None, :], mask=(rs < rank)[:, None], other=0.0)
        else:
            inside = k + ks < K
            x = tl.load(x_row + (k + ks)[None, :], mask=here[:, None] & inside, other=0.0)
            a = tl.load(a_row + (k + ks)[None, :], mask=(rs < rank)[:, None] & inside, other=0.0)
        acc = tl.dot(x.to(a.dtype), tl.trans(a), acc, input_precision="ieee")
    at = (split * num_rows + start + places).to(tl.int64)[:, None] * (PARTS * MAX_RANK) + part * MAX_RANK + rs
    tl.store(low_ptr + at, acc, mask=here[:, None] & (rs < rank))


def block_r(max_rank: int) -> int:
    """Returns the ranks that a program of either half computes at once."""
    return max(16, min(_MAX_BLOCK_R, int(triton.next_power_of_2(max_rank))))


def splits_of(num_tiles: int, tile_rows: int, num_parts: int, max_rank: int, k: int, itemsize: int) -> int:
    """Returns the splits of k. `itemsize`: bytes of a value of the matrices."""
    programs = num_tiles * num_parts * -(-max_rank // block_r(max_rank))
    most = _FEW_ROWS_PROGRAMS if tile_rows <= _FEW_TILE_ROWS else _FEW_PROGRAMS
    for splits in _SPLITS:
        if programs * splits <= most and k >= 2 * splits * _block_k(itemsize):
            return splits
    return 1


def narrow_products(
    x: Tensor, slots: Tensor, ranks: Tensor, max_rank: int, order: Tensor, tiles: Tensor, tile_rows: int
) -> Tensor:
    """Returns memory for the result of shrink_adapters, [splits, num_rows, num_parts, max_rank]."""
    num_parts = ranks.shape[1]
    splits = splits_of(len(tiles), tile_rows, num_parts, max_rank, x.shape[1], slots.itemsize)
    return torch.empty(splits, len(order), num_parts, max_rank, dtype=torch.float32, device=x.device)


def shrink_adapters(
    x: Tensor,
    slots: Tensor,
    offsets: Tensor,
    ranks: Tensor,
    max_rank: int,
    order: Tensor,
    tiles: Tensor,
    tile_rows: int,
    *,
    out: Tensor | None = None,
    alone: bool = False,
) -> Tensor:
    """Returns a[s, part] @ x[t] for each row t with the adapter in slot s, [splits, num_rows, num_parts, max_rank].

    The sum over the splits is the product, for rows in their order. Arguments as in reference.adapters.add; `out`: of
    narrow_products. `alone`: on a stream of its own, where no launch precedes it.
    """
    low = narrow_products(x, slots, ranks, max_rank, order, tiles, tile_rows) if out is None else out
    splits, num_rows, num_parts, _ = low.shape
    overlap = overlaps(x) and not alone
    _shrink[(len(tiles), num_parts * triton.cdiv(max_rank, block_r(max_rank)), splits)](
        low,
        x,
        slots,
        offsets,
        ranks,
        order,
        tiles,
        x.stride(0),
        slots.stride(0),
        num_rows,
        K=x.shape[1],
        PARTS=num_parts,
        TABLE=ranks.stride(0),
        MAX_RANK=max_rank,
        SPLITS=splits,
        BLOCK_M=max(16, triton.next_power_of_2(tile_rows)),
        BLOCK_R=block_r(max_rank),
        BLOCK_K=_block_k(slots.itemsize),
        OVERLAP=overlap,
        num_warps=4,
        num_stages=4 if tile_rows <= _FEW_TILE_ROWS else 3,
        launch_pdl=overlap,
    )
    return low


def _block_k(itemsize: int) -> int:
    return 64 if itemsize == 4 else 128
