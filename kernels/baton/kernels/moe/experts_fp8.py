"""Computes experts in e4m3 of all tokens on the matrix unit's floats of 8 bits, in four launches or five.

As `experts`, with the matrices read as they are. Tokens, and what is gated, are rounded to e4m3, or split in two parts,
which lose nothing of bf16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from baton.kernels.moe.align import Alignment, align
from baton.kernels.moe.grouped import sum_kernel
from baton.kernels.moe.grouped_fp8 import fp8_down_kernel, fp8_gate_up_kernel
from baton.kernels.moe.tiling import Tiling
from baton.kernels.overlap import overlaps
from baton.kernels.packed.launch import constants, expert_steps, row_constants, row_pointers
from baton.kernels.packed.rounding import rounded
from baton.kernels.packed.weight import ROUND_UNIT, PackedWeight
from baton.kernels.routing import Gate
from baton.kernels.shared_memory import shared_memory

_SLACK = 2048  # bytes of shared memory that the stages leave free


class Fp8Cut(NamedTuple):
    """How the launches cut the products."""

    tile: int  # pairs
    gate_up: Tiling
    down: Tiling


def run_split_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: PackedWeight, down: PackedWeight, gate: Gate
) -> Tensor:
    """As `run_experts`, of weights that `rounds` accepts. Activations are two numbers of e4m3 each."""
    return _run(x, weights, ids, gate_up, down, gate, 2)


def run_few_rounded_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: PackedWeight, down: PackedWeight, gate: Gate
) -> Tensor:
    """As `run_experts`, of weights that `rounds` accepts. Rounds activations, and what is gated, to e4m3 with a scale
    for each 128 columns of a row."""
    return _run(x, weights, ids, gate_up, down, gate, 1)


def _run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    gate: Gate,
    parts: int,
    cut: Fp8Cut | None = None,
) -> Tensor:
    num_tokens, top_k = ids.shape
    hidden = down.num_rows
    cut = cut or choose_cut(ids.numel(), down.num_experts, parts, shared_memory(x.device))
    aligned = align(ids, down.num_experts, cut.tile)
    gated, gated_scale = _gate_and_up(*rounded(x, ROUND_UNIT, parts), aligned, top_k, gate_up, gate, parts, cut.gate_up)
    pairs = torch.empty(num_tokens * top_k, hidden, dtype=x.dtype, device=x.device)
    overlap = overlaps(x)
    fp8_down_kernel[(len(aligned.experts) * triton.cdiv(hidden, cut.down.block_n),)](
        pairs,
        gated,
        gated_scale,
        down.stored,
        gated_scale if down.scale is None else down.scale,
        *row_pointers(down, gated_scale),
        weights,
        aligned.pairs,
        aligned.experts,
        len(pairs),
        N=hidden,
        **_constants(down, gated.shape[1], cut.down, hidden),
        PARTS=parts,
        TILE=cut.tile,
        OVERLAP=overlap,
        num_warps=cut.down.num_warps,
        launch_pdl=overlap,
    )
    out = torch.empty_like(x)
    sum_kernel[(num_tokens, triton.cdiv(hidden, 1024))](
        out, pairs, hidden, TOP_K=top_k, BLOCK=1024, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return out


def _gate_and_up(
    x: Tensor,
    x_scale: Tensor,
    aligned: Alignment,
    top_k: int,
    weight: PackedWeight,
    gate: Gate,
    parts: int,
    tiling: Tiling,
) -> tuple[Tensor, Tensor]:
    """Returns the gated up projection of each place and its scales; undefined at places without a pair."""
    size, num_columns = weight.num_rows // 2, len(aligned.pairs) * parts
    out = torch.empty(num_columns, size, dtype=x.dtype, device=x.device)
    out_scale = torch.empty(triton.cdiv(size, ROUND_UNIT), num_columns, dtype=torch.float32, device=x.device)
    overlap = overlaps(x)
    fp8_gate_up_kernel[(len(aligned.experts) * triton.cdiv(size, tiling.block_n),)](
        out,
        out_scale,
        x,
        x_scale,
        weight.stored,
        x_scale if weight.scale is None else weight.scale,
        *row_pointers(weight, x_scale),
        aligned.pairs,
        aligned.experts,
        len(x) // parts * top_k,
        gate.limit,
        gate.alpha,
        TOP_K=top_k,
        SIZE=size,
        **_constants(weight, x.shape[1], tiling, size),
        CLAMPED=gate.limit > 0,
        PARTS=parts,
        TILE=aligned.tile,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return out, out_scale


def choose_cut(num_pairs: int, num_experts: int, parts: int, shared_bytes: int) -> Fp8Cut:
    """Returns the fastest cut in a search on an H200. The units of activations' scales are the blocks of gates."""
    tile = min(128, max(8, int(triton.next_power_of_2(triton.cdiv(5 * num_pairs, 4 * num_experts)))))
    columns = max(16, tile * parts)
    tile = columns // parts

    def fitting(matrices: int, num_warps: int, stages: int) -> Tiling:
        while stages > 2 and stages * (matrices * ROUND_UNIT + columns) * ROUND_UNIT > shared_bytes - _SLACK:
            stages -= 1
        return Tiling(ROUND_UNIT, ROUND_UNIT, num_warps, stages)

    if columns <= 32:
        return Fp8Cut(tile, fitting(2, 8, 3), fitting(1, 4, 4))
    return Fp8Cut(tile, fitting(2, 8, 4), fitting(1, 4 if columns <= 64 else 8, 3))


def _constants(weight: PackedWeight, k: int, tiling: Tiling, part_rows: int) -> dict[str, Any]:
    """Returns the constants of a launch over parts of so many rows."""
    names = ("K", "NUM_GROUPS", "GROUP", "SCALE_ROWS", "SCALED", "STORED_STEP", "SCALE_STEP")
    known = {**constants(weight, k, tiling.block_k, tiling.block_k), **expert_steps(weight)}
    return {
        **{name: known[name] for name in names},
        **row_constants(weight),
        # Whether the rows of a block share their scales.
        "WHOLE": weight.scale_rows % tiling.block_n == 0 and part_rows % weight.scale_rows == 0,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "STAGES": tiling.num_stages,
    }
