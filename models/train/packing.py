"""Documents packed into rows of one length, and the block masks that keep them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from train.chats.chat import Tokens

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Row:
    """Documents one behind the other. Targets are the next tokens; what is not trained on has weight 0."""

    ids: Tensor  # [length] int64
    targets: Tensor  # [length] int64
    weights: Tensor  # [length] fp32
    positions: Tensor  # [length] int64, within the document
    starts: Tensor  # [length] int64, where the token's document starts

    def to(self, device: torch.device) -> Row:
        parts = (self.ids, self.targets, self.weights, self.positions, self.starts)
        return Row(
            *(part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part for part in parts)
        )


def make_row(documents: Sequence[Tokens], length: int) -> Row:
    """Returns one row; documents past its end are cut, what is left free is a document of padding."""
    ids, targets = np.zeros(length, np.int64), np.zeros(length, np.int64)
    weights: NDArray[np.float32] = np.zeros(length, np.float32)
    starts = np.zeros(length, np.int64)
    at = 0
    for document in documents:
        size = min(len(document), length - at)
        if size <= 1:
            break
        ids[at : at + size] = document.ids[:size]
        targets[at : at + size - 1] = document.ids[1:size]
        weights[at : at + size - 1] = document.trained[1:size]
        starts[at : at + size] = at
        at += size
    starts[at:] = at
    positions = np.arange(length) - starts
    return Row(*(torch.from_numpy(part) for part in (ids, targets, weights, positions, starts)))


def packed(documents: Iterator[Tokens], length: int) -> Row:
    """Returns a row filled from an endless stream of documents."""
    taken, used = [], 0
    while used < length:
        taken.append(next(documents))
        used += len(taken[-1])
    return make_row(taken, length)


def block_mask(starts: Tensor, window: int) -> BlockMask:
    """Returns masks of causal attention within each document of [length]. `window`: a query's most keys, 0: all."""
    length = len(starts)
    count = length // _BLOCK
    ends = starts.view(count, _BLOCK)
    index = torch.arange(count, device=starts.device)
    first = ends[:, 0] // _BLOCK  # the earliest key of the block's first query
    if window:
        first = torch.maximum(first, (index * _BLOCK - window + 1).clamp(min=0) // _BLOCK)
    kv, q = index[None, :], index[:, None]
    seen = (kv >= first[:, None]) & (kv <= q)
    whole = seen & (kv < q) & (kv * _BLOCK >= ends[:, -1:])
    if window:
        whole &= (q + 1) * _BLOCK - 1 - kv * _BLOCK < window
    partial = seen & ~whole

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (key <= query) & (key >= starts[query])
        return inside & (query - key < window) if window else inside

    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(whole), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for each row of a matrix of flags, how many are set, and their columns first."""
    columns = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None].contiguous()


def masks_of(row: Row, windows: Sequence[int]) -> dict[int, BlockMask]:
    """Returns a mask for each window."""
    return {window: block_mask(row.starts, window) for window in set(windows)}
