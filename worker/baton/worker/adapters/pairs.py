"""The pairs of tokens and experts of a step by adapter and expert, in tiles as kernels take rows. Any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.worker.adapters.rows import FEW_TILE_ROWS, AdapterRows

_FEW_PAIRS = 2048  # hardly two have an adapter and an expert in common
_TILE_ROWS = 64


class PairTiles(NamedTuple):
    """Pairs that have an adapter and an expert in common, side by side."""

    order: Tensor  # [num_pairs] int64
    tiles: Tensor  # [num_tiles, 4] int64: slot (-1: no adapter), expert, first index into `order`, number of pairs
    tile_rows: int  # of a tile at most

    def numbered(self, step: int) -> AdapterRows:
        """Returns the pairs by the numbers of slots and experts: slot * step + expert, or -1."""
        slots, experts, first, count = self.tiles.unbind(1)
        numbers = torch.where(slots < 0, -1, slots * step + experts)
        return AdapterRows(self.order, torch.stack((numbers, first, count), 1).int(), self.tile_rows)


def pair_tiles(ids: Tensor, row_slots: Tensor, num_slots: int, num_experts: int) -> PairTiles:
    """Returns the pairs of ids [num_tokens, top_k] in tiles, of which there are as many as so many pairs can need.

    Never synchronizes with the host, so it can be captured.
    """
    num_pairs, device = ids.numel(), ids.device
    tile_rows = FEW_TILE_ROWS if num_pairs <= _FEW_PAIRS else _TILE_ROWS
    most = min(num_pairs, num_slots * num_experts + 1 + num_pairs // tile_rows)
    slots = row_slots[: len(ids)].long().unsqueeze(1)
    keys = torch.where(slots < 0, -1, slots * num_experts + ids).flatten()
    keys, order = keys.sort(stable=True)
    index = torch.arange(num_pairs, device=device)
    begins = torch.ones_like(keys, dtype=torch.bool)
    begins[1:] = keys[1:] != keys[:-1]
    place = index - torch.where(begins, index, 0).cummax(0).values  # among the pairs of its key
    within = place % tile_rows
    tile = (within == 0).cumsum(0) - 1
    tiles = torch.zeros(most, 4, dtype=torch.int64, device=device)
    tiles[:, 0] = -1
    tiles[tile, 0] = torch.where(keys < 0, -1, keys // num_experts)
    tiles[tile, 1] = keys % num_experts
    tiles[tile, 2] = index - within
    tiles[:, 3].scatter_add_(0, tile, torch.ones_like(tile))
    return PairTiles(order, tiles, tile_rows)
