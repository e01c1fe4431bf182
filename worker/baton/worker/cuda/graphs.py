"""Whole decode steps as CUDA graphs, one for each padded batch size: inputs, forward pass, sampling, bookkeeping."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def graph_sizes(max_num_requests: int) -> list[int]:
    """The batch sizes to capture: dense where a step is short, sparser where padding costs little."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 4097, 32)]
    below = [size for size in sizes if size < max_num_requests]
    return [*below, max_num_requests]


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One captured step of `size` rows."""

    size: int
    numbers: Tensor  # [2 * size] int32: rows (-1 is padding), then num_computed_tokens
    sampled: Tensor  # [size] int32
    graph: torch.cuda.CUDAGraph

    def fill(self, staging: np.ndarray, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:
        """Writes one step's numbers, padding included, into int32 `staging` [2 * size]."""
        count = len(rows)
        staging[:count] = rows
        staging[count : self.size] = -1
        staging[self.size : self.size + count] = num_computed_tokens
        staging[self.size + count : 2 * self.size] = 0


class DecodeGraphs:
    """The captured sizes. `record(numbers, size)` launches one step's kernels and returns the sampled tokens."""

    def __init__(self, sizes: list[int], device: torch.device, record: Callable[[Tensor, int], Tensor]) -> None:
        self._sizes = sorted(sizes)
        self._graphs: dict[int, DecodeGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            numbers = torch.zeros(2 * size, dtype=torch.int32, device=device)
            numbers[:size] = -1
            record(numbers, size)  # compiles and allocates outside of the capture
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                sampled = record(numbers, size)
            self._graphs[size] = DecodeGraph(size, numbers, sampled, graph)

    def get(self, count: int) -> DecodeGraph:
        """The smallest graph for this many rows."""
        return self._graphs[self._sizes[bisect_left(self._sizes, count)]]
