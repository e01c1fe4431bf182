"""How the products of experts are cut: pairs per tile, and rows and columns of a matrix per program and step."""

from __future__ import annotations

from typing import NamedTuple

import triton

from baton.kernels.packed.weight import ROUND_UNIT, PackedWeight

_SLACK = 2048  # bytes of shared memory that the stages leave free
_LARGE_TILE = 64
_LEAST_STEP = 16
_FEW_WASTE = 1.4
_SHORT_STEP = 2048
_GATE_UP_ROWS = 2  # what gates and ups ask for; downs ask for 4


class Tiling(NamedTuple):
    """How one launch cuts a matrix product."""

    block_n: int  # rows of an expert's matrix per program
    block_k: int  # columns per step
    num_warps: int
    num_stages: int


def choose_tile(num_pairs: int, num_experts: int, itemsize: int = 2) -> int:
    """Returns the number of pairs per tile: slightly more than an expert has if all have equally many."""
    largest = 128 if itemsize < 4 else 64
    return min(largest, max(16, int(triton.next_power_of_2(triton.cdiv(5 * num_pairs, 4 * num_experts)))))


def choose_tiling(k: int, itemsize: int, tile: int, matrices: int = 1, shared_bytes: int = 227 * 1024) -> Tiling:
    """Returns the fastest tiling in a search on an H100, for products that read this many `matrices` at once.

    The step over k does not depend on the tile, so that sums keep their order. Small shared memory reduces the stages.
    """
    block_k, stages = (64, 4) if itemsize < 4 else (32, 2)
    block_n, num_warps = 64, 4  # rows: the fewest that Hopper's matrix unit supports
    if tile >= _LARGE_TILE and itemsize < 4:
        block_n, num_warps, stages = (128, 8, 4) if matrices == 2 else (128, 4, 3)
    block_k = _dividing(k, block_k)
    step_bytes = (matrices * block_n + tile) * block_k * itemsize
    return Tiling(block_n, block_k, num_warps, _fitting(stages, step_bytes, shared_bytes))


def choose_packed_tiling(
    weight: PackedWeight, k: int, itemsize: int, tile: int, matrices: int = 1, shared_bytes: int = 227 * 1024
) -> Tiling:
    """Returns a tiling for weights that are dequantized in registers, with the largest step that hardly exceeds k.

    The step over k does not depend on the tile, so that sums keep their order.
    """
    block_n, num_warps = (128, 8) if tile >= _LARGE_TILE and itemsize < 4 else (64, 4)
    block_k = _covering(k, 128 if itemsize < 4 else 32, 1.05)
    step_bytes = (matrices * block_n * weight.bits // 8 + tile * itemsize) * block_k
    return Tiling(block_n, block_k, num_warps, _fitting(4, step_bytes, shared_bytes))


def choose_rounded_tiling(tile: int, matrices: int, shared_bytes: int) -> Tiling:
    """Returns a tiling for weights and activations of e4m3, whose units are those of the activations' scales."""
    step_bytes = (matrices * ROUND_UNIT + tile) * ROUND_UNIT
    return Tiling(ROUND_UNIT, ROUND_UNIT, 8, _fitting(4, step_bytes, shared_bytes))


def choose_few_tiling(weight: PackedWeight, k: int, block_n: int) -> Tiling:
    """Returns a tiling for single tokens."""
    if weight.numbers == "e4m3" and block_n == _GATE_UP_ROWS:  # in a search on an H200
        return Tiling(4, _covering(k, 1024, _FEW_WASTE), 4, 1)
    if weight.bits == 8:
        return Tiling(block_n, _covering(k, 2048, _FEW_WASTE), 4, 1)
    block_k = _covering(k, 4096, _FEW_WASTE)
    num_warps = 2 if block_n == _GATE_UP_ROWS and block_k <= _SHORT_STEP else 4
    return Tiling(4, block_k, num_warps, 1)


def _covering(k: int, block_k: int, waste: float) -> int:
    """Returns the largest half of halves of a step whose steps cover at most `waste` times k."""
    while block_k > _LEAST_STEP and triton.cdiv(k, block_k) * block_k > waste * k:
        block_k //= 2
    return block_k


def _dividing(k: int, block_k: int) -> int:
    """Returns the largest half of halves of a step that divides k."""
    while k % block_k:
        block_k //= 2
    return block_k


def _fitting(stages: int, step_bytes: int, shared_bytes: int) -> int:
    while stages > 2 and stages * step_bytes > shared_bytes - _SLACK:
        stages -= 1
    return stages
