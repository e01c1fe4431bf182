"""Whole decode steps as CUDA graphs for each padded batch size: inputs, forward pass, sampling, bookkeeping.

What only some rows ask for is captured on its own, and replayed behind the step where a row of it asks.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.core import Int32
from baton.worker.executors.cuda.sampling.undrawn import Undrawn

T = TypeVar("T")

_NUM_STAGINGS = 4  # more than the steps that can be in flight


class Recorded(Protocol):
    """Launches kernels of one step for `numbers` [2 * size]."""

    @property
    def logits(self) -> Tensor:
        """Of the last step, [largest size, vocab_size]."""

    def decode(self, numbers: Tensor, size: int) -> Tensor:
        """The step. Returns the tokens that it samples, [size]."""

    def draw_special(self, numbers: Tensor, size: int) -> None:
        """Tokens of rows with edits, filters and masks, in place."""

    def score(self, numbers: Tensor, size: int) -> None:
        """Log-probabilities."""


class _StepGraphs(NamedTuple):
    step: torch.cuda.CUDAGraph
    special: torch.cuda.CUDAGraph
    score: torch.cuda.CUDAGraph
    tokens: Tensor


Progress = Callable[[int, int], None]  # done, of how many


def graph_sizes(max_num_requests: int) -> list[int]:
    """The batch sizes to capture: dense where rows cost, sparser where a step hardly feels padding."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 4097, 64)]
    below = [size for size in sizes if size < max_num_requests]
    return [*below, max_num_requests]


class DecodeGraphs:
    """One captured step for each size. All read the same numbers: rows (-1 is padding), then computed tokens."""

    def __init__(self, sizes: list[int], device: torch.device, recorded: Recorded, progress: Progress) -> None:
        self._sizes = sorted(sizes)
        self._device = device
        self._recorded = recorded
        largest = self._sizes[-1]
        self.numbers = torch.zeros(2 * largest, dtype=torch.int32, device=device)
        self._stagings = [torch.empty(2 * largest, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_STAGINGS)]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_STAGINGS)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._graphs: dict[int, _StepGraphs] = {}
        self._capture_all(recorded, progress)

    def size_for(self, count: int) -> int:
        """The smallest captured size for this many rows."""
        return self._sizes[bisect_left(self._sizes, count)]

    def replay(self, rows: Int32, num_computed_tokens: Int32) -> Undrawn:
        """Queues one step, up to its draws of what only some rows ask for. Valid until the next replay."""
        count = len(rows)
        size = self.size_for(count)
        staging = self._next_staging(2 * size)
        values: NDArray[np.int32] = staging.numpy()
        values[:count] = rows
        values[count:size] = -1
        values[size : size + count] = num_computed_tokens
        values[size + count :] = 0
        self.numbers[: 2 * size].copy_(staging, non_blocking=True)
        self._copied[self._turn].record()
        graphs = self._graphs[size]
        graphs.step.replay()
        logits = self._recorded.logits[:count]
        return Undrawn(self.numbers[:count], graphs.tokens[:count], logits, graphs.special.replay, graphs.score.replay)

    def _next_staging(self, length: int) -> Tensor:
        self._turn = (self._turn + 1) % _NUM_STAGINGS
        self._copied[self._turn].synchronize()
        return self._stagings[self._turn][:length]

    def _capture_all(self, recorded: Recorded, progress: Progress) -> None:
        self.numbers.fill_(-1)
        for size in self._sizes:
            # Whatever is compiled or loaded late is so outside of the capture.
            for launch in (recorded.decode, recorded.draw_special, recorded.score):
                launch(self.numbers[: 2 * size], size)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # The largest first: the others fit into its memory.
        for done, size in enumerate(reversed(self._sizes), 1):
            numbers = self.numbers[: 2 * size]
            step, tokens = capture(partial(recorded.decode, numbers, size), pool, stream)
            special, _ = capture(partial(recorded.draw_special, numbers, size), pool, stream)
            score, _ = capture(partial(recorded.score, numbers, size), pool, stream)
            self._graphs[size] = _StepGraphs(step, special, score, tokens)
            progress(done, len(self._sizes))
        torch.cuda.synchronize(self._device)


def capture(launch: Callable[[], T], pool: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, T]:
    """What `launch` queues, as a graph in the pool's memory, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph: it collects garbage and empties the allocator's cache each time.
    with torch.cuda.stream(stream), _uncollected():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            answer = launch()
        finally:
            graph.capture_end()
    return graph, answer


@contextmanager
def _uncollected() -> Iterator[None]:
    """A collection inside a capture could free device memory, which would break it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
