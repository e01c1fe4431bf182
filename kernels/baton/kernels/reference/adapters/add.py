"""Adds LoRA updates to a linear's output, grouped by adapter. Rows without an adapter cost nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor


class _Update(NamedTuple):
    rows: Tensor  # that use it, [count] int64
    part: int
    rank: int
    scale: float
    offsets: tuple[int, int]  # of both matrices
    memory: Tensor  # the slot's

    def matrix(self, which: int, height: int, width: int) -> Tensor:
        """Returns the matrix [height, width]: 0: the narrow one, 1: the wide one."""
        first = self.offsets[which]
        return self.memory[first : first + height * width].view(height, width)


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
    """out[t, part] += factor * scales[s, part] * (a[s, part] @ x[t]) @ b[s, part] for rows t with an adapter in slot s

    x [num_tokens, in_features], out [num_tokens, out_features]; slots [num_slots, slot_size] are the adapters' memory;
    offsets [num_slots, num_parts, 2] int64 are where in a slot a [rank, in_features] and b [rank, columns of the part]
    begin; ranks and scales [num_slots, num_parts], where rank 0 is no update and max_rank the largest; ends: the column
    after each part's last one; order [num_rows]: rows of the step, those of a slot side by side; tiles [num_tiles, 3]:
    slot, where -1 is no adapter, first index into `order`, and number of rows, from 0 to tile_rows. Returns out.
    """
    for update in _updates(slots, offsets, ranks, scales, order, tiles):
        first, end = ends[update.part - 1] if update.part else 0, ends[update.part]
        a = update.matrix(0, update.rank, x.shape[1])
        low = x.index_select(0, update.rows).to(a.dtype) @ a.t()
        added = low @ update.matrix(1, update.rank, end - first)
        out[:, first:end].index_add_(0, update.rows, added.to(out.dtype), alpha=factor * update.scale)
    return out


def embed_adapters(
    token_ids: Tensor,
    out: Tensor,
    slots: Tensor,
    offsets: Tensor,
    ranks: Tensor,
    scales: Tensor,
    max_rank: int,
    vocab_size: int,
    order: Tensor,
    tiles: Tensor,
    tile_rows: int,
) -> Tensor:
    """out[t] += scales[s] * a[s, :, token_ids[t]] @ b[s] for each row t with the adapter in slot s.

    token_ids [num_tokens], out [num_tokens, hidden_size], a [rank, vocab_size] and b [rank, hidden_size]; the rest is
    as in `add_adapters`, of one part. Returns out.
    """
    for update in _updates(slots, offsets, ranks, scales, order, tiles):
        a = update.matrix(0, update.rank, vocab_size)
        low = a.index_select(1, token_ids.index_select(0, update.rows)).t()
        added = low @ update.matrix(1, update.rank, out.shape[1])
        out.index_add_(0, update.rows, added.to(out.dtype), alpha=update.scale)
    return out


def _updates(
    slots: Tensor, offsets: Tensor, ranks: Tensor, scales: Tensor, order: Tensor, tiles: Tensor
) -> Iterator[_Update]:
    """Yields those of each part, tile by tile."""
    for slot, start, count in tiles.tolist():
        if slot < 0 or not count:
            continue
        rows = order[start : start + count].long()
        known = ranks[slot].tolist(), scales[slot].tolist(), offsets[slot].tolist()
        for part, (rank, scale, places) in enumerate(zip(*known, strict=True)):
            if rank:
                yield _Update(rows, part, rank, scale, tuple(places), slots[slot])
