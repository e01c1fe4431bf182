"""Whole decode steps as CUDA graphs, one for each padded batch size: inputs, forward pass, sampling, bookkeeping."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_STAGINGS = 4  # more than the steps that can be in flight

# Launches one step's kernels for `numbers` [2 * size] and returns what it yields, [size, ...].
Record = Callable[[Tensor, int], Tensor]


def graph_sizes(max_num_requests: int) -> list[int]:
    """The batch sizes to capture: dense where a step is short, sparser where padding costs little."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 4097, 32)]
    below = [size for size in sizes if size < max_num_requests]
    return [*below, max_num_requests]


class DecodeGraph:
    """One captured step of `size` rows."""

    def __init__(self, size: int, record: Record, device: torch.device, pool: Any) -> None:
        self.size = size
        # int32: rows (-1 is padding), then num_computed_tokens
        self.numbers = torch.zeros(2 * size, dtype=torch.int32, device=device)
        self.numbers[:size] = -1
        self._stagings = [torch.empty(2 * size, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_STAGINGS)]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_STAGINGS)]  # type: ignore[no-untyped-call]
        self._turn = 0
        record(self.numbers, size)  # compiles and allocates outside of the capture
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        # A collection inside the capture could free device memory, which would break it.
        gc.disable()
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._out = record(self.numbers, size)
        finally:
            gc.enable()

    def replay(self, rows: NDArray[np.int32], num_computed_tokens: NDArray[np.int32]) -> Tensor:
        """Queues one step. The result is that of the rows, valid until the next replay."""
        count = len(rows)
        turn = self._turn
        self._turn = (turn + 1) % _NUM_STAGINGS
        self._copied[turn].synchronize()
        staging = self._stagings[turn].numpy()
        staging[:count] = rows
        staging[count : self.size] = -1
        staging[self.size : self.size + count] = num_computed_tokens
        staging[self.size + count :] = 0
        self.numbers.copy_(self._stagings[turn], non_blocking=True)
        self._copied[turn].record()
        self._graph.replay()
        return self._out[:count]


class DecodeGraphs:
    """Every size twice: to the sampled tokens, captured at once; and only to the logits, captured when first asked."""

    def __init__(self, sizes: list[int], device: torch.device, to_tokens: Record, to_logits: Record) -> None:
        self._sizes = sorted(sizes)
        self._device = device
        self._to_logits = to_logits
        self._pool = torch.cuda.graph_pool_handle()
        # The largest first: the others fit into its memory.
        self._tokens = {size: self._capture(size, to_tokens) for size in reversed(self._sizes)}
        self._logits: dict[int, DecodeGraph] = {}

    def get(self, count: int, with_sampling: bool) -> DecodeGraph:
        """The smallest graph for this many rows."""
        size = self._sizes[bisect_left(self._sizes, count)]
        if with_sampling:
            return self._tokens[size]
        if size not in self._logits:
            self._logits[size] = self._capture(size, self._to_logits)
        return self._logits[size]

    def _capture(self, size: int, record: Record) -> DecodeGraph:
        return DecodeGraph(size, record, self._device, self._pool)
