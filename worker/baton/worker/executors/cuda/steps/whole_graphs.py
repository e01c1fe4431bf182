"""Forward passes over whole prompts as CUDA graphs, one for each padded number of tokens.

The launches of a step take a slow host longer than the kernels take the device, even those of thousands of tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.kernels.attention.whole import tile_columns, tiles_over
from baton.worker.core import Int32
from baton.worker.executors.cuda.steps.graphs import Progress, capture
from baton.worker.executors.host.whole_rows import WholeColumns
from baton.worker.layers.cuda.whole import WholeInputs
from baton.worker.models.model import Model

SIZES = (
    16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120,
    6144, 7168, 8192, 10240, 12288, 14336, 16384,
)  # fmt: skip
FEW_TOKENS = 2048  # with fewer, small tiles give the device more programs
FEW_ROWS = 64  # of a tile
_MANY_ROWS = 128
_ROOMY = 512  # tokens; in larger graphs, tiles without a sequence would take time
_BYTES_PER_LAYER = 1 << 17  # of a graph


def whole_graph_bytes(num_layers: int, max_tokens: int) -> int:
    """Estimates the memory of all graphs on the device, without the activations of the largest."""
    return len([size for size in SIZES if size <= max_tokens]) * num_layers * _BYTES_PER_LAYER


class _Recorded(NamedTuple):
    flat: Tensor  # int32 inputs
    graph: Any
    hidden: Tensor  # [size, hidden_size], in memory that all graphs share


class WholeGraphs:
    """Graphs of a model's forward pass. `copy` copies int32 values to a target on the device."""

    def __init__(
        self,
        decoder: Model[WholeInputs],
        max_tokens: int,
        device: torch.device,
        copy: Callable[[Int32, Tensor], None],
        *,
        has_types: bool,
    ) -> None:
        self._decoder = decoder
        self._sizes = [size for size in SIZES if size <= max_tokens]
        self._device = device
        self._copy = copy
        self._has_types = has_types
        self._recorded: dict[int, _Recorded] = {}

    def fit(self, columns: WholeColumns) -> bool:
        """Returns whether there is a graph for this step."""
        num_tokens = len(columns.token_ids)
        if not self._sizes or num_tokens > self._sizes[-1]:
            return False
        size = self._size_for(num_tokens)
        num_tiles = int((-(-columns.seq_lens // tile_rows(size))).sum())
        return num_tiles <= max_tiles(size)

    def replay(self, columns: WholeColumns) -> Tensor:
        """Queues the forward pass. Returns the hidden states of its tokens, valid until the next replay."""
        num_tokens = len(columns.token_ids)
        size = self._size_for(num_tokens)
        recorded = self._recorded[size]
        self._copy(padded(columns, size, has_types=self._has_types), recorded.flat)
        recorded.graph.replay()
        return recorded.hidden[:num_tokens]

    def record(self, progress: Progress) -> None:
        """Captures every size."""
        flats = {size: torch.from_numpy(self._empty(size)).to(self._device) for size in self._sizes}
        hidden = torch.empty(0)
        for size, flat in flats.items():
            hidden = self._forward(size, flat)  # compiles and loads kernels before the capture
        torch.cuda.synchronize(self._device)
        shared = torch.empty_like(hidden)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # The largest first, because the others fit into its memory.
        for done, size in enumerate(reversed(self._sizes), 1):
            graph, hidden = capture(partial(self._forward_into, shared[:size], flats[size]), pool, stream)
            self._recorded[size] = _Recorded(flats[size], graph, hidden)
            progress(done, len(self._sizes))
        torch.cuda.synchronize(self._device)

    def _size_for(self, num_tokens: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_tokens)]

    def _empty(self, size: int) -> Int32:
        nothing = np.zeros(0, np.int32)
        return padded(WholeColumns(nothing, nothing, None, nothing.astype(np.int64)), size, has_types=self._has_types)

    def _forward_into(self, out: Tensor, flat: Tensor) -> Tensor:
        return out.copy_(self._forward(len(out), flat))

    def _forward(self, size: int, flat: Tensor) -> Tensor:
        return self._decoder.forward(inputs_over(flat, size, has_types=self._has_types))


def tile_rows(size: int) -> int:
    """Returns the rows of a tile in a graph of this size."""
    return FEW_ROWS if size <= FEW_TOKENS else _MANY_ROWS


def max_tiles(size: int) -> int:
    """Returns the tiles, and so the sequences, that a graph of this size has room for."""
    return max(4, size // 8 if size <= _ROOMY else size // 16)


def padded(columns: WholeColumns, size: int, *, has_types: bool) -> Int32:
    """Returns the inputs of a step for a graph, one array after another. Tiles of padding are of an empty sequence."""
    num_tokens, num_seqs, most = len(columns.token_ids), len(columns.seq_lens), max_tiles(size)
    tiles = tile_columns(columns.seq_lens, tile_rows(size))
    num_tiles = (len(tiles.flat) - num_seqs - 1) // 2
    num_per_token = 3 if has_types else 2
    flat = np.zeros(num_per_token * size + most + 2 + 2 * most, np.int32)
    per_token = flat[: num_per_token * size].reshape(num_per_token, size)
    per_token[0, :num_tokens], per_token[1, :num_tokens] = columns.token_ids, columns.positions
    if columns.token_types is not None:
        per_token[2, :num_tokens] = columns.token_types
    starts = flat[num_per_token * size :][: most + 2]
    starts[: num_seqs + 1] = tiles.flat[: num_seqs + 1]
    starts[num_seqs + 1 :] = num_tokens
    seq, start = flat[num_per_token * size + most + 2 :].reshape(2, most)
    seq[:num_tiles], start[:num_tiles] = tiles.flat[num_seqs + 1 :].reshape(2, num_tiles)
    seq[num_tiles:] = most
    return flat


def inputs_over(flat: Tensor, size: int, *, has_types: bool) -> WholeInputs:
    """Returns the inputs in the memory of `padded`."""
    num_per_token, most = 3 if has_types else 2, max_tiles(size)
    tokens, positions, *types = flat[: num_per_token * size].view(num_per_token, size)
    tiles = tiles_over(flat[num_per_token * size :], most + 1, tile_rows(size))
    return WholeInputs(tokens, positions, types[0] if types else None, tiles)
