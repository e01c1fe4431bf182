"""Computes the experts of all tokens in three launches: gate and up, weighted down, and the sum of a token's experts.

Each output is one chain of multiply-adds over k in one fp32 accumulator, or one sum over groups of k, with the expert's
matrix as the left operand, and a token's experts are summed in the order of its choice. A token's result therefore does
not depend on other tokens. Activations that are rounded to e4m3 are the exception: those of few tokens are not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from baton.kernels.moe.align import Alignment, align
from baton.kernels.moe.grouped import down_kernel, gate_up_kernel, sum_kernel
from baton.kernels.moe.tiling import (
    Tiling,
    choose_packed_tiling,
    choose_rounded_tiling,
    choose_tile,
    choose_tiling,
)
from baton.kernels.overlap import overlaps
from baton.kernels.packed.launch import constants, expert_steps, pointers, row_constants, row_pointers
from baton.kernels.packed.rounding import rounded
from baton.kernels.packed.weight import ROUND_UNIT, PackedWeight
from baton.kernels.routing import Gate
from baton.kernels.shared_memory import shared_memory


class Rows(NamedTuple):
    """Rows of activations, and their scales where they are rounded."""

    values: Tensor  # [num_rows, columns]
    scale: Tensor | None = None  # [columns / 128, num_rows] fp32, of values in e4m3


def run_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor | PackedWeight,
    down: Tensor | PackedWeight,
    gate: Gate,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's experts, [num_tokens, hidden_size].

    x [num_tokens, hidden_size], weights and ids [num_tokens, top_k], gate_up [num_experts, 2 size, hidden_size] with
    gates first, down [num_experts, hidden_size, size]; biases [num_experts, 2 size] and [num_experts, hidden_size],
    which packed weights have themselves.
    """
    return _run(Rows(x), weights, ids, stack_of(gate_up, gate_up_bias), stack_of(down, down_bias), gate, x.dtype)


def run_rounded_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: PackedWeight, down: PackedWeight, gate: Gate
) -> Tensor:
    """As `run_experts`, of weights that `rounds` accepts. Rounds activations, and what is gated, to e4m3 with a scale
    for each 128 columns of a row."""
    return _run(Rows(*rounded(x, ROUND_UNIT)), weights, ids, gate_up, down, gate, x.dtype)


def stack_of(stack: Tensor | PackedWeight, bias: Tensor | None = None) -> PackedWeight:
    """Returns a stack of plain matrices [num_experts, rows, columns] as kernels read packed ones."""
    if isinstance(stack, PackedWeight):
        return stack
    first_bias = None if bias is None else bias[0]
    bits = 8 * stack.element_size()
    return PackedWeight("plain", stack[0], stack.shape[1], bits, bias=first_bias, num_experts=len(stack))


def _run(
    x: Rows, weights: Tensor, ids: Tensor, gate_up: PackedWeight, down: PackedWeight, gate: Gate, dtype: torch.dtype
) -> Tensor:
    aligned = align(ids, down.num_experts, choose_tile(ids.numel(), down.num_experts, dtype.itemsize))
    gated = gate_and_up(x, aligned, ids.shape[1], gate_up, gate)
    return down_and_sum(gated, aligned, weights, down, dtype)


def gate_and_up(x: Rows, aligned: Alignment, top_k: int, weight: PackedWeight, gate: Gate) -> Rows:
    """Returns the gated up projection of each place, [num_tiles * tile, size]; undefined at places without a pair."""
    values = x.values
    size, num_places = weight.num_rows // 2, len(aligned.pairs)
    out = torch.empty(num_places, size, dtype=values.dtype, device=values.device)
    out_scale = None
    if x.scale is not None:
        out_scale = torch.empty(triton.cdiv(size, ROUND_UNIT), num_places, dtype=torch.float32, device=values.device)
    tiling = _tiling(weight, x, aligned.tile, 2)
    overlap = overlaps(values)
    gate_up_kernel[(len(aligned.experts) * triton.cdiv(size, tiling.block_n),)](
        out,
        out if out_scale is None else out_scale,
        values,
        values if x.scale is None else x.scale,
        *pointers(weight, values),
        aligned.pairs if weight.order is None else weight.order,
        *row_pointers(weight, values),
        aligned.pairs,
        aligned.experts,
        len(values) * top_k,
        gate.limit,
        gate.alpha,
        TOP_K=top_k,
        SIZE=size,
        **_constants(weight, x, tiling, size),
        CLAMPED=gate.limit > 0,
        TILE=aligned.tile,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return Rows(out, out_scale)


def down_and_sum(x: Rows, aligned: Alignment, weights: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Returns each token's down projections summed with `weights` [num_tokens, top_k]: [num_tokens, hidden_size]."""
    hidden, (num_tokens, top_k) = weight.num_rows, weights.shape
    pairs = down_pairs(x, aligned, weights, weight, dtype)
    out = torch.empty(num_tokens, hidden, dtype=dtype, device=pairs.device)
    overlap = overlaps(pairs)
    sum_kernel[(num_tokens, triton.cdiv(hidden, 1024))](
        out, pairs, hidden, TOP_K=top_k, BLOCK=1024, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return out


def down_pairs(x: Rows, aligned: Alignment, weights: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Returns each pair's product times its weight, [num_pairs, hidden_size]."""
    values, hidden = x.values, weight.num_rows
    pairs = torch.empty(weights.numel(), hidden, dtype=dtype, device=values.device)
    tiling = _tiling(weight, x, aligned.tile, 1)
    overlap = overlaps(values)
    down_kernel[(len(aligned.experts) * triton.cdiv(hidden, tiling.block_n),)](
        pairs,
        values,
        values if x.scale is None else x.scale,
        *pointers(weight, values),
        aligned.pairs if weight.order is None else weight.order,
        *row_pointers(weight, values),
        weights,
        aligned.pairs,
        aligned.experts,
        len(pairs),
        N=hidden,
        **_constants(weight, x, tiling, hidden),
        TILE=aligned.tile,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return pairs


def _tiling(weight: PackedWeight, x: Rows, tile: int, matrices: int) -> Tiling:
    k, itemsize, shared_bytes = x.values.shape[1], x.values.element_size(), shared_memory(x.values.device)
    if x.scale is not None:
        return choose_rounded_tiling(tile, matrices, shared_bytes)
    if weight.numbers == "plain":
        return choose_tiling(k, itemsize, tile, matrices, shared_bytes)
    return choose_packed_tiling(weight, k, itemsize, tile, matrices, shared_bytes)


def _constants(weight: PackedWeight, x: Rows, tiling: Tiling, part_rows: int) -> dict[str, Any]:
    """Returns the constants of a launch over parts of so many rows."""
    return {
        **constants(weight, x.values.shape[1], tiling.block_k, tiling.block_k),
        **expert_steps(weight),
        **row_constants(weight),
        "ROUNDED": x.scale is not None,
        # Whether the rows of a block share their scales.
        "WHOLE": weight.scale_rows % tiling.block_n == 0 and part_rows % weight.scale_rows == 0,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "STAGES": tiling.num_stages,
    }
