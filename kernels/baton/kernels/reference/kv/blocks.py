"""Copies KV blocks of all layers between the pool and contiguous memory."""

from __future__ import annotations

from torch import Tensor


def gather_blocks(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Returns [n, num_layers, ...] of pool [num_layers, num_blocks, ...] for block_ids [n]."""
    return pool[:, block_ids.long()].transpose(0, 1).contiguous()


def scatter_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copies staging [n, num_layers, ...] back into pool, in place; block_ids [n] are distinct."""
    pool[:, block_ids.long()] = staging.transpose(0, 1)
