"""Merges the pieces of cut sequences of latents. A program merges some heads, or a part of one, of a sequence."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.attention.latent_cuts import LatentCuts
from baton.kernels.overlap import overlaps

_ELEMENTS = 8192  # that a program loads at once: 32 registers of its 256 threads
_LEAST_WIDTH = 128
_MOST_HEADS = 4  # at once


@triton.jit(do_not_specialize=["num_heads"])
def _merge_kernel(
    out_ptr,  # [num_seqs, num_heads, KV_RANK]
    partial_ptr,  # [max_pieces, num_heads, KV_RANK] fp32
    lse_ptr,  # [max_pieces, num_heads] fp32, base 2
    spans_ptr,  # [num_seqs, 2] int32, of LatentCuts
    num_heads,
    KV_RANK: tl.constexpr,
    AT_ONCE: tl.constexpr,  # pieces
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNITS: tl.constexpr,  # programs per sequence
    OVERLAP: tl.constexpr,
):
    """out = sum_p 2^(lse_p - max) partial_p / sum_p 2^(lse_p - max)"""
    # grid: (num_seqs * UNITS)
    seq = tl.program_id(0) // UNITS
    unit = tl.program_id(0) % UNITS
    if OVERLAP:
        gdc_launch_dependents()
    # Spans are written before the previous kernel.
    begin = tl.load(spans_ptr + seq * 2)
    count = tl.load(spans_ptr + seq * 2 + 1)
    if OVERLAP:
        gdc_wait()
    if count <= 1:
        return
    columns: tl.constexpr = (KV_RANK + WIDTH - 1) // WIDTH
    some = tl.arange(0, AT_ONCE)
    heads = unit // columns * HEADS + tl.arange(0, HEADS)
    dims = unit % columns * WIDTH + tl.arange(0, WIDTH)
    top = tl.full([HEADS], -1.0e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    for first in range(0, count, AT_ONCE):
        live = ((first + some) < count)[:, None] & (heads < num_heads)[None, :]
        rows = (begin + first + some).to(tl.int64)[:, None] * num_heads + heads[None, :]
        lse = tl.load(lse_ptr + rows, mask=live, other=float("-inf"))
        kept = live[:, :, None] & (dims < KV_RANK)[None, None, :]
        part = tl.load(partial_ptr + rows[:, :, None] * KV_RANK + dims[None, None, :], mask=kept, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top[None, :])
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    acc = acc / total[:, None]
    at = (seq.to(tl.int64) * num_heads + heads)[:, None] * KV_RANK + dims[None, :]
    mask = (heads < num_heads)[:, None] & (dims < KV_RANK)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def merge_pieces(out: Tensor, partial: Tensor, lse: Tensor, cuts: LatentCuts) -> None:
    """Writes the sequences of out [num_seqs, num_heads, kv_rank] that have several pieces.

    partial [max_pieces, num_heads, kv_rank] and lse [max_pieces, num_heads] fp32 are the pieces' outputs.
    """
    num_seqs, num_heads, kv_rank = out.shape
    rank_pad = triton.next_power_of_2(kv_rank)
    at_once = min(64, triton.next_power_of_2(triton.cdiv(cuts.programs, num_seqs) + 1))
    width = min(rank_pad, max(_LEAST_WIDTH, _ELEMENTS // at_once))
    heads = min(_MOST_HEADS, max(1, _ELEMENTS // at_once // width))
    overlap = overlaps(out)
    units = triton.cdiv(num_heads, heads) * triton.cdiv(kv_rank, width)
    _merge_kernel[(num_seqs * units,)](
        out,
        partial,
        lse,
        cuts.spans,
        num_heads,
        KV_RANK=kv_rank,
        AT_ONCE=at_once,
        HEADS=heads,
        WIDTH=width,
        UNITS=units,
        OVERLAP=overlap,
        num_warps=8,
        launch_pdl=overlap,
    )
