"""Decode steps as CUDA graphs, one for each padded batch size: inputs, forward pass, sampling, bookkeeping.

Kernels for special rows are separate graphs, replayed after the step if it has such rows.
"""

from __future__ import annotations

import gc
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from baton.worker.core import Int32, Int64
from baton.worker.executors.cuda.adapters.device_rows import DeviceRows
from baton.worker.executors.cuda.sampling.undrawn import Undrawn

T = TypeVar("T")

_NUM_STAGINGS = 4  # more than the steps in flight


class Recorded(Protocol):
    """Launches the kernels of one step for `numbers` [2 * size]."""

    @property
    def logits(self) -> Tensor:
        """Logits of the last step, [largest size, vocab_size]."""

    def decode(self, numbers: Tensor, size: int) -> Tensor:
        """Launches the step. Returns its tokens, [size]."""

    def draw_special(self, numbers: Tensor, size: int) -> None:
        """Replaces the tokens of rows with edits, filters or masks."""

    def score(self, numbers: Tensor, size: int) -> None:
        """Computes log-probabilities."""


class _Staging(NamedTuple):
    pinned: Tensor
    values: Int32  # the same memory
    copied: torch.cuda.Event


class _StepGraphs(NamedTuple):
    numbers: Tensor  # [2 * size], that the step reads
    step: torch.cuda.CUDAGraph
    adapted: torch.cuda.CUDAGraph  # the step with adapters; without any, the step
    special: torch.cuda.CUDAGraph
    score: torch.cuda.CUDAGraph
    tokens: Tensor


Progress = Callable[[int, int], None]  # done, total


def graph_sizes(max_num_requests: int) -> list[int]:
    """Returns the batch sizes to capture: dense where padding is expensive, sparser where it is cheap."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 4097, 64)]
    below = [size for size in sizes if size < max_num_requests]
    return [*below, max_num_requests]


class DecodeGraphs:
    """A captured step for each size. All read the same numbers: rows (-1: padding), then numbers of computed tokens.

    `adapters`: a second set of steps adds the updates of adapters.
    """

    def __init__(
        self,
        sizes: list[int],
        device: torch.device,
        recorded: Recorded,
        progress: Progress,
        adapters: DeviceRows | None = None,
    ) -> None:
        self._sizes = sorted(sizes)
        self._adapters = adapters
        self._device = device
        self._recorded = recorded
        largest = self._sizes[-1]
        self.numbers = torch.zeros(2 * largest, dtype=torch.int32, device=device)
        self._stagings = itertools.cycle([_new_staging(2 * largest) for _ in range(_NUM_STAGINGS)])
        self._graphs: dict[int, _StepGraphs] = {}
        self._capture_all(recorded, progress)

    def size_for(self, count: int) -> int:
        """Returns the smallest captured size for this many rows."""
        return self._sizes[bisect_left(self._sizes, count)]

    def replay(self, rows: Int64, num_computed_tokens: Int32, *, adapted: bool = False) -> Undrawn:
        """Queues one step, without the kernels for special rows. The result is valid until the next replay. `adapted`:
        some rows have adapters."""
        count = len(rows)
        size = self.size_for(count)
        pinned, values, copied = next(self._stagings)
        copied.synchronize()
        values[:count] = rows
        values[count:size] = -1
        values[size : size + count] = num_computed_tokens
        values[size + count : 2 * size] = 0
        graphs = self._graphs[size]
        graphs.numbers.copy_(pinned[: 2 * size], non_blocking=True)
        copied.record()
        (graphs.adapted if adapted else graphs.step).replay()
        logits = self._recorded.logits
        return Undrawn(graphs.numbers, graphs.tokens[:count], logits, graphs.special.replay, graphs.score.replay)

    def _capture_all(self, recorded: Recorded, progress: Progress) -> None:
        self.numbers.fill_(-1)
        for size in self._sizes:
            # Compiles and loads kernels before the capture.
            if self._adapters is not None:
                with self._adapters.try_out(size):
                    recorded.decode(self.numbers[: 2 * size], size)
            for launch in (recorded.decode, recorded.draw_special, recorded.score):
                launch(self.numbers[: 2 * size], size)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # The largest first, because the others fit into its memory.
        for done, size in enumerate(reversed(self._sizes), 1):
            numbers = self.numbers[: 2 * size]
            step, tokens = capture(partial(recorded.decode, numbers, size), pool, stream)
            adapted = step
            if self._adapters is not None:  # its tokens are in the same memory
                with self._adapters.used(size):
                    adapted, _ = capture(partial(recorded.decode, numbers, size), pool, stream)
            special, _ = capture(partial(recorded.draw_special, numbers, size), pool, stream)
            score, _ = capture(partial(recorded.score, numbers, size), pool, stream)
            self._graphs[size] = _StepGraphs(numbers, step, adapted, special, score, tokens)
            progress(done, len(self._sizes))
        torch.cuda.synchronize(self._device)


def _new_staging(length: int) -> _Staging:
    pinned = torch.empty(length, dtype=torch.int32, pin_memory=True)
    return _Staging(pinned, pinned.numpy(), torch.cuda.Event())  # type: ignore[no-untyped-call]


def capture(launch: Callable[[], T], pool: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures `launch` as a graph in the pool's memory. Returns the graph and the result of `launch`."""
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph, which collects garbage and empties the allocator's cache each time.
    with torch.cuda.stream(stream), _uncollected():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            answer = launch()
        finally:
            graph.capture_end()
    return graph, answer


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disables garbage collection, which could free device memory and so break a capture."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
