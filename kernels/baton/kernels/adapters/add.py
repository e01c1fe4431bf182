"""LoRA updates of a linear's output, for all adapters of a step: both halves, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from baton.kernels.adapters.expand import expand_adapters
from baton.kernels.adapters.expand_gated import expand_gated_adapters
from baton.kernels.adapters.shrink import shrink_adapters


def add_adapters(
    x: Tensor,
    out: Tensor,
    slots: Tensor,
    offsets: Tensor,
    ranks: Tensor,
    scales: Tensor,
    max_rank: int,
    ends: Sequence[int],
    order: Tensor,
    tiles: Tensor,
    tile_rows: int,
    *,
    factor: float = 1.0,
) -> Tensor:
    """Computes reference.adapters.add.add_adapters, of at most three parts."""
    low = shrink_adapters(x, slots, offsets, ranks, max_rank, order, tiles, tile_rows)
    return expand_adapters(out, low, slots, offsets, ranks, scales, ends, order, tiles, tile_rows, factor=factor)


def gate_adapters(
    x: Tensor,
    gate_up: Tensor,
    slots: Tensor,
    offsets: Tensor,
    ranks: Tensor,
    scales: Tensor,
    max_rank: int,
    order: Tensor,
    tiles: Tensor,
    tile_rows: int,
) -> Tensor:
    """Returns silu(first half) * second half of gate_up with its updates, which it may overwrite."""
    low = shrink_adapters(x, slots, offsets, ranks, max_rank, order, tiles, tile_rows)
    return expand_gated_adapters(gate_up, low, slots, offsets, ranks, scales, order, tiles, tile_rows)
